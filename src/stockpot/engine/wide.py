"""All LoRA adapters of a module side by side: y = W0 x + B diag(c) A x, with c each adapter's weight over its rank.

A (R, in) and B (out, R) are the factors of all adapters, concatenated; they stay where they are, and only c changes.
W0, A and B get no gradient: c's is the sum over tokens of (A x) * (B^T g). `Wide.added` is the meaning in plain
PyTorch, for every kind of module; for a plain nn.Linear `_Linear` computes the same with the sums inside the products.
"""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from stockpot import ranks
from stockpot.errors import TaskError
from stockpot.names import file_names, is_quantised
from stockpot.pool.lora import Adapters
from stockpot.pool.source import listed
from stockpot.task import Task
from stockpot.task.checks import gradients

_CONVOLUTIONS: dict[Any, Callable[..., Tensor]] = {
    nn.Conv1d.forward: F.conv1d,
    nn.Conv2d.forward: F.conv2d,
    nn.Conv3d.forward: F.conv3d,
}
TRIED = 8  # rows or samples of a trial
NEAR, QUANTISED = 1e-2, 0.3  # relative error of W0 x that a module may have, and one whose weight is not as stored


@dataclass(eq=False)
class Wide:
    """One module, its factors on the device, and which adapter every rank belongs to."""

    name: str  # of its weight
    module: nn.Module
    A: Tensor  # (R, in), of an embedding (words, R), of a convolution (R, in, kernel)
    B: Tensor  # (out, R), of a convolution (out, R, 1...)
    owner: Tensor  # (R,) on the host
    scale: Tensor  # (R,) on the host, s of each rank
    convolve: Callable[..., Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.A.nbytes + self.B.nbytes

    @property
    def exact(self) -> bool:
        """Whether `_Linear` may take the place of the module's own forward."""
        module = self.module
        plain = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        weight: Any = module.weight
        own = type(weight) is nn.Parameter or ranks.local(weight) is not weight  # divided, and whole when it runs
        return plain and own and not is_quantised(weight)

    def added(self, x: Tensor, c: Tensor, dtype: torch.dtype) -> Tensor:
        """B diag(c) A x. c: (R,)"""
        m: Any = self.module
        A, B = self.A.to(dtype), self.B.to(dtype)
        # h * c is computed in c's precision and rounded after: rounding c would be one error for all tokens.
        if self.convolve is not None:
            h = self.convolve(x.to(dtype), A, None, m.stride, m.padding, m.dilation)
            return self.convolve((h * c.view(-1, *[1] * (A.dim() - 2))).to(dtype), B)
        if not isinstance(m, nn.Embedding):
            return F.linear((F.linear(x.to(dtype), A) * c).to(dtype), B)
        h = F.embedding(x, A) * c
        if m.padding_idx is not None:  # torch gives the row of the padding no gradient
            h = torch.where((x != m.padding_idx)[..., None], h, h.detach())
        return F.linear(h.to(dtype), B)

    def alone(self, A: Tensor, B: Tensor) -> Wide:
        """The module with one adapter in place of all. A: (r, in), B: (out, r), its scale inside."""
        A, B, rank = A.to(self.A), B.to(self.B), B.shape[1]
        A = A.T.contiguous() if isinstance(self.module, nn.Embedding) else A
        return replace(self, A=A, B=B, owner=torch.zeros(rank, dtype=torch.long), scale=self.scale.new_ones(rank))

    def forward(self, c: Tensor, own: Callable[..., Any]) -> Callable[..., Any]:
        """What the module does with its adapters. c: (R,), read anew at every call."""

        def plain(*args: Any, **kwargs: Any) -> Any:
            y = own(*args, **kwargs)
            x = args[0] if args else next(iter(kwargs.values()))
            return y + self.added(x, c, y.dtype)

        if not self.exact:
            return plain
        module: Any = self.module

        def fused(input: Tensor) -> Any:
            if module.weight.requires_grad:  # somebody asks for all gradients
                return plain(input)
            return _Linear.apply(input, module.weight, module.bias, c, self.A, self.B)  # type: ignore[no-untyped-call]

        return fused


class _Linear(torch.autograd.Function):
    """W0 x + b + B diag(c) A x; keeps A x and not x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, c: Tensor, A: Tensor, B: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])  # (tokens, in)
        y = F.linear(flat, weight, bias)
        dtype = y.dtype  # that of autocast, where it is on
        h = F.linear(flat.to(dtype), A.to(dtype))  # (tokens, R)
        y.addmm_(_times(h, c), B.T.to(dtype))
        ctx.save_for_backward(weight, c, A, B, h)
        ctx.x_dtype = x.dtype
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        weight, c, A, B, h = ctx.saved_tensors
        (grad,) = grads
        g, dtype = grad.reshape(-1, grad.shape[-1]), grad.dtype  # (tokens, out)
        of_x = of_bias = of_c = None
        back = g @ B.to(dtype)  # (tokens, R)
        if ctx.needs_input_grad[0]:
            of_x = g @ weight.to(dtype)
            of_x.addmm_(_times(back, c), A.to(dtype))
            of_x = of_x.view(*grad.shape[:-1], -1).to(ctx.x_dtype)
        if ctx.needs_input_grad[2]:
            of_bias = g.sum(dim=0)
        if ctx.needs_input_grad[3]:
            of_c = (h * back).sum(dim=0, dtype=c.dtype)
        return of_x, None, of_bias, of_c, None, None


def _times(h: Tensor, c: Tensor) -> Tensor:
    """h diag(c), rounded once. h: (tokens, R)"""
    return torch.mul(h, c, out=torch.empty_like(h))


# Which modules there are ---------------------------------------------------------------------------------


def wide_modules(task: Task, adapters: Adapters) -> tuple[dict[str, Wide], tuple[str, ...]]:
    """Every tensor that can be learned with as factors, and notes on adapters whose deltas must be made instead."""
    modules, own = dict(task.model.named_modules()), file_names(task.model, adapters.specs)
    shared = Counter(id(tensor) for _, tensor in task.model.named_parameters(remove_duplicate=False))
    found: dict[str, Wide] = {}
    melted: defaultdict[str, list[str]] = defaultdict(list)  # by reason
    for name in adapters.specs:
        if not any(name in one.factors for one in adapters.each):
            continue
        module = modules.get(own.get(name, name).removesuffix(".weight"))
        if module is None or not isinstance(module.weight, Tensor):
            melted["no module of the model has them"].append(name)
        elif not adapters.only_factors(name):
            melted["an adapter holds them, or their bias, as full tensors"].append(name)
        elif shared[id(module.weight)] > 1:
            melted["the model ties them to other weights"].append(name)
        elif isinstance(made := _wide(task, adapters, name, module), Wide):
            found[name] = made
        else:
            melted[made].append(name)
    for name in _used_otherwise(task, list(found.values())):
        del found[name]
        melted["the model uses this weight without calling its module"].append(name)
    return found, tuple(
        f"learned with full weights, not factors, because {why}: {listed(names, 3)}" for why, names in melted.items()
    )


def _wide(task: Task, adapters: Adapters, name: str, module: nn.Module) -> Wide | str:
    """The module with all its adapters; or why they cannot stay factors."""
    weight: Any = module.weight
    dtype = adapters.specs[name].dtype if is_quantised(weight) else weight.dtype
    parts: list[tuple[Tensor, Tensor]] = []
    owners: list[int] = []
    scales: list[float] = []
    turned = False
    for k, one in enumerate(adapters.each):
        if name in one.factors:
            A, B, scale, turned = adapters.factors(k, name)
            parts.append((A.to(task.device, dtype), B.to(task.device, dtype)))
            owners += [k] * len(A)
            scales += [scale] * len(A)
    A, B = (torch.cat([part[i] for part in parts], dim=i) for i in range(2))
    wide = Wide(name, module, A, B, torch.tensor(owners), torch.tensor(scales, dtype=torch.float64))
    forward = type(module).forward
    if isinstance(module, nn.Embedding):
        if forward is not nn.Embedding.forward or module.max_norm is not None or module.scale_grad_by_freq:
            return "their embedding does more than look up rows"
        wide.A = A.T.contiguous()
    elif A.dim() > 2 or forward in _CONVOLUTIONS:
        plain: Any = module
        if forward not in _CONVOLUTIONS or plain.groups != 1 or plain.padding_mode != "zeros":
            return "their convolution has groups, another padding than zeros, or a forward of its own"
        wide.convolve = _CONVOLUTIONS[forward]
    elif not wide.exact and task.sharded:
        return "their modules are not nn.Linear, and cannot be tried where the model is divided among ranks"
    elif not wide.exact and not _is_linear(task, adapters, wide, turned):
        return f"{type(module).__name__} does not compute W0 x"
    return wide


def _is_linear(task: Task, adapters: Adapters, wide: Wide, turned: bool) -> bool:
    """Whether the module does what a linear layer with the base's weight does, forward and backward; a quantised one
    does so nearly, and is refused where it gives its input no such gradient: adapters before it would learn nothing."""
    module: Any = wide.module
    weight = module.weight
    base = adapters.base.tensor(wide.name).to(task.device)
    base = base.T if turned else base  # (out, in)
    as_stored = not is_quantised(weight)
    before = weight.detach().clone() if as_stored else None
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(TRIED, width, generator=generator).to(task.device, wide.A.dtype) for width in base.shape[::-1])
    try:
        with task.evaluating():
            if before is not None:
                weight.data.copy_(base.T if turned else base)
            y = module(x) - module(torch.zeros_like(x))
            with torch.enable_grad():
                x.requires_grad_(True)
                back = _input_gradient(module(x), x, g)
    except Exception:  # a module of somebody's own may do anything
        return False
    finally:
        if before is not None:
            weight.data.copy_(before)
    limit = NEAR if as_stored else QUANTISED
    if not _near(y, F.linear(x.detach(), base.to(x.dtype)), limit):
        return False
    if _near(back, g @ base.to(g.dtype), limit):
        return True
    if as_stored:
        return False
    raise TaskError.of(
        f"module {wide.name.removesuffix('.weight')} ({type(module).__name__}), quantised",
        expected="the gradient of W0 x for its input",
        found="none" if back is None else "another",
        fix="learn on a device on which the library's layers can be trained through, or load the model as it is stored",
    )


def _input_gradient(y: Tensor, x: Tensor, g: Tensor) -> Tensor | None:
    if not y.requires_grad:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of kernels without a backward
        return torch.autograd.grad(y, x, g.to(y.dtype), allow_unused=True)[0]


def _near(found: Tensor | None, wanted: Tensor, limit: float) -> bool:
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        return False
    wanted = wanted.double()
    return bool((found.double() - wanted).norm() <= limit * wanted.norm())


def _used_otherwise(task: Task, wides: list[Wide]) -> list[str]:
    """Weights that the loss depends on without their module's forward, in one of the ways in which models run.

    An attention layer may read the weight of its output layer, an encoder may take a fast path in evaluation.
    """
    weights: dict[str, Any] = {w.name: w.module.weight for w in wides}
    weights = {name: weight for name, weight in weights.items() if not is_quantised(weight)}
    flags = [(p, p.requires_grad) for p in task.model.parameters()]
    batch = task.to_device(task.fit.batch(torch.arange(min(TRIED, len(task.fit)))))
    calls: list[set[str]] = []
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        with task.evaluating(), _watched(wides) as called:
            task.loss(batch)
        calls.append(called)
        with task.learning(), torch.enable_grad():
            with _watched(wides) as called:
                task.loss(batch)
            calls.append(called)
            for weight in weights.values():
                weight.requires_grad_(True)
            with _watched(wides, cut=True) as called:
                loss = task.loss(batch).total
            calls.append(called)
            reached: Sequence[Tensor | None] = (None,) * len(weights)
            if loss.requires_grad and weights:
                reached = gradients(task.model, loss, list(weights.values()))
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
    found = {name for name, gradient in zip(weights, reached, strict=True) if gradient is not None}
    found |= {name for called in calls for name in called if not all(name in each for each in calls)}
    # Of codes no gradient tells who reads them.
    return [w.name for w in wides if w.name in found or (w.name not in weights and w.name not in calls[0])]


@contextmanager
def _watched(wides: list[Wide], *, cut: bool = False) -> Iterator[set[str]]:
    """Collects the modules that are called; with `cut`, no gradient reaches a weight through its own module."""
    called: set[str] = set()

    def watching(wide: Wide, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            called.add(wide.name)
            if not cut:
                return own(*args, **kwargs)
            with torch.no_grad():
                out = own(*args, **kwargs)
            inputs = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            return _Cut.apply(out, *inputs)  # type: ignore[no-untyped-call]

        return forward

    with replaced([(wide.module, watching(wide, wide.module.forward)) for wide in wides]):
        yield called


class _Cut(torch.autograd.Function):
    """The first argument, as if it came from the others with a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        ctx.inputs = inputs
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: ARG004
        return None, *(
            torch.zeros_like(x) if need else None for x, need in zip(ctx.inputs, ctx.needs_input_grad[1:], strict=True)
        )


@contextmanager
def replaced(forwards: list[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules another forward; some libraries put their own into the instance, which comes back."""
    before = [(vars(module), vars(module).get("forward")) for module, _ in forwards]
    try:
        for module, forward in forwards:
            vars(module)["forward"] = forward
        yield
    finally:
        for own, earlier in before:
            own.pop("forward")
            if earlier is not None:
                own["forward"] = earlier

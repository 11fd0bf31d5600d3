"""Learning on the factors of adapters is learning on the models they make, without making them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lora_zoo import adapter_pool, merged
from stockpot import Pool, Task, cook
from stockpot.engine import Engine, Live, Options
from stockpot.engine.factored import FactoredLive
from stockpot.engine.wide import Wide, _Linear, wide_modules
from stockpot.errors import TaskError
from stockpot.layout import Layout
from stockpot.pool import lora
from stockpot.soups.problem import Problem

WORDS, WIDTH, CLASSES = 9, 6, 3
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Mixed(nn.Module):
    """An embedding with padding, a convolution, linear layers with and without bias, a weight kept as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.filter = nn.Conv1d(WIDTH, 8, 3, padding=1, stride=2)
        self.first = nn.Linear(8, 8, bias=False)
        self.turned = Turned(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.filter(self.words(x).transpose(1, 2)).transpose(1, 2)
        h = torch.tanh(self.turned(torch.tanh(self.first(h))))
        out: Tensor = self.last(h.mean(dim=1))
        return out


class Turned(nn.Module):
    """As the Conv1D of transformers."""

    def __init__(self, width: int, out: int, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.3)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight * self.factor


EACH = [
    {"words": 2, "filter": 1, "last": 2},
    {"first": 3, "last": 1},
    {"words": 1, "first": 2, "filter": 2},
    {"words": 3, "filter": 2, "first": 1, "last": 4},
]


def zoo(folder: Path, dtype: torch.dtype = torch.float64, **more: Any) -> Pool:
    return adapter_pool(folder, Mixed, EACH, dtype, embeddings=("words",), **more)


def task_of(model: nn.Module, n: int = 24, **settings: Any) -> Task:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (n, 5), generator=generator)
    return Task(model, (ids, torch.randint(0, CLASSES, (n,), generator=generator)), device=DEVICE, **settings)


def gradient(
    pool: Pool, task: Task, granularity: str, wide: dict[str, Wide] | None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Loss and coefficient gradient at the same coefficients, whatever the store."""
    layout = Layout.of(pool, granularity, facts=pool.facts())
    live = Live(task, pool, layout) if wide is None else FactoredLive(task, pool, layout, wide)
    K, G = len(pool), len(layout)
    with live, task.learning():
        engine = Engine(live, Options(batch_size=16, **options), task.fit, block_size=3)
        D = engine.load([0, 1, 3])
        alpha = torch.randn(K, G, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(live.dtype) * 0.2
        engine.mix(engine.theta_fix(alpha, [0, 1, 3]), alpha[[0, 1, 3]].to(live.device))
        loss, slope, _ = engine.gradient(D, engine.batch(task.fit, torch.arange(16)), None)
        engine.close()
    return loss.cpu(), slope.cpu()


@pytest.mark.parametrize("granularity", ["tensor", "module", "model"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"low_memory": True}])
def test_the_gradient_is_that_of_the_merged_checkpoints(
    tmp_path: Path, granularity: str, options: dict[str, Any]
) -> None:
    pool = zoo(tmp_path)
    task = task_of(Mixed().double())
    wide, notes = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    assert (set(wide), notes) == ({"words.weight", "filter.weight", "first.weight", "last.weight"}, ())
    found = gradient(pool, task, granularity, wide, **options)
    wanted = gradient(merged(pool, tmp_path / "full"), task_of(Mixed().double()), granularity, None, **options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert found[1].abs().min() < found[1].abs().max()


@pytest.mark.parametrize(
    "method", ["best", "uniform", "greedy", "ensemble", "learned+", "hl", "hl+", "mehl+", "crossfit"]
)
def test_every_method_gives_what_it_gives_for_the_merged_checkpoints(tmp_path: Path, method: str) -> None:
    pool = zoo(tmp_path, own={1: {"dense": {"last.bias": torch.ones(CLASSES, dtype=torch.float64)}}})
    options: dict[str, Any] = (
        {} if method in ("best", "uniform", "greedy", "ensemble") else {"steps": 8, "batch_size": 8}
    )
    options |= {"block_size": 2} if method in ("mehl+", "crossfit") else {}
    found, wanted = (
        cook(one, task_of(Mixed().double()), method, **options) for one in (pool, merged(pool, tmp_path / "full"))
    )
    if found.soup is None or wanted.soup is None:
        torch.testing.assert_close(found.score.table, wanted.score.table, rtol=0, atol=0)
        return
    assert found.soup.layout == wanted.soup.layout
    torch.testing.assert_close(found.soup.W, wanted.soup.W, rtol=0, atol=1e-10)
    assert [note for note in found.notes if "written as" not in note] == list(wanted.notes)


def test_no_delta_is_made_while_learning_and_choosing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, made = zoo(tmp_path), []
    plain = lora.Adapters.delta
    problem = Problem(pool, task_of(Mixed().double()))

    def watched(self: lora.Adapters, k: int, name: str, dtype: torch.dtype) -> Tensor:
        made.append(name)
        return plain(self, k, name, dtype)

    monkeypatch.setattr(lora.Adapters, "delta", watched)
    from stockpot.soups.registry import decides, method_named, settings_for

    for name in ("best", "greedy", "hl+", "crossfit"):
        settings = settings_for(name, steps=4) if name in ("hl+", "crossfit") else settings_for(name)
        decides(method_named(name))(problem, method_named(name), settings, None)
    assert made == []
    problem.pool.tensor(0, "last.weight")
    assert made == ["last.weight"]  # it would have been seen


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device; run by hand on one")
def test_kernels_and_graphs_learn_the_same(tmp_path: Path) -> None:
    pool = zoo(tmp_path, torch.float32)
    full = merged(pool, tmp_path / "full")
    settings: dict[str, Any] = {"steps": 20, "batch_size": 8, "block_size": 3, "blocks": 3}
    paths: list[str] = []
    found = []
    for one, more in ((pool, {}), (pool, {"graphs": False}), (full, {"directions": "fp32"})):

        def listen(event: Any) -> None:
            if event.kind == "engine":
                paths.append(event.data["path"])

        soup = cook(one, task_of(Mixed()), "mehl+", listen=listen, **settings, **more).soup
        assert soup is not None
        found.append(soup.W)
    assert paths == ["CUDA graph", "eager", "CUDA graph"]
    assert (found[0] - 0.25).abs().max() > 0.05
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-4)


def test_preset_authors_makes_full_weights_and_says_so(tmp_path: Path) -> None:
    pool = zoo(tmp_path)
    found, wanted = (
        cook(one, task_of(Mixed().double()), "hl+", preset="authors", steps=4)
        for one in (pool, merged(pool, tmp_path / "full"))
    )
    assert found.notes[:1] == (
        "preset authors scales directions to norm one: full weights were made of the adapters for it",
    )
    assert found.soup is not None
    assert wanted.soup is not None
    assert torch.equal(found.soup.W, wanted.soup.W)


# The forward pass of one module ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_the_fused_linear_layer_is_its_meaning(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 10, bias=bias).to(DEVICE, dtype)
    layer.weight.requires_grad_(False)
    A, B = torch.randn(7, 12).to(DEVICE, dtype), torch.randn(10, 7).to(DEVICE, dtype)
    wide = Wide("weight", layer, A, B, torch.zeros(7, dtype=torch.long), torch.ones(7))
    x = torch.randn(2, 5, 12).to(DEVICE, dtype).requires_grad_()
    c = torch.randn(7, device=DEVICE, dtype=torch.promote_types(dtype, torch.float32)).requires_grad_()
    inputs = [x, c, *([layer.bias] if bias else [])]
    out: list[list[Tensor]] = []
    for fused in (True, False):
        apply: Any = _Linear.apply
        y = apply(x, layer.weight, layer.bias, c, A, B) if fused else layer(x) + wide.added(x, c, dtype)
        out.append([y, *torch.autograd.grad((y * y.detach().cos()).sum(), inputs)])
    exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    exact = (exact + F.linear(F.linear(x.double(), A.double()) * c.double(), B.double())).detach()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out[0][0].double(), exact, rtol=0, atol=16 * float(exact.abs().max()) * eps)
    for one, other in zip(*out, strict=True):
        scale = float(other.detach().abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=16 * scale * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_and_checkpointing_take_the_fused_layer(tmp_path: Path, dtype: torch.dtype) -> None:
    pool = zoo(tmp_path, dtype)
    task = task_of(Mixed().to(dtype), autocast=torch.bfloat16)
    wide, _ = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    loss, slope = gradient(pool, task, "tensor", wide, low_memory=True)
    exact, wanted = gradient(pool, task_of(Mixed().to(dtype)), "tensor", None)
    assert float((loss - exact).abs()) < 0.02 * float(exact)
    assert torch.cosine_similarity(slope.flatten(), wanted.flatten(), dim=0) > 0.999


# What cannot stay factors --------------------------------------------------------------------------------


class Reader(nn.Module):
    """Weights that are read without their modules: tied, by an attention layer, by a formula."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.plain = nn.Linear(8, 8)
        self.formula = nn.Linear(8, 8)
        self.scaled = Turned(8, 8, factor=2.0)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        h = h + self.attention(h, h, h)[0]
        h = torch.tanh(self.plain(h)) @ self.formula.weight.T
        out: Tensor = self.last(self.scaled(h).mean(dim=1))
        return out


def test_weights_that_are_used_otherwise_are_made_in_full_and_named(tmp_path: Path) -> None:
    modules = {"words": 2, "attention.out_proj": 2, "plain": 2, "formula": 2, "last": 1}
    dense = {"last.weight": torch.zeros(CLASSES, 8, dtype=torch.float64)}
    only = {"words": 1, "plain": 3}
    pool = adapter_pool(
        tmp_path,
        Reader,
        [modules, modules, only, modules],
        torch.float64,
        embeddings=("words",),
        own={2: {"dense": dense}},
    )
    task = task_of(Reader().double())
    wide, notes = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    assert set(wide) == {"words.weight", "plain.weight"}
    assert set(notes) == {
        "learned with full weights, not factors, because the model uses this weight without calling its module:"
        " attention.out_proj.weight, formula.weight",
        "learned with full weights, not factors, because an adapter holds them, or their bias, as full tensors:"
        " last.weight",
    }
    found = gradient(pool, task, "tensor", wide)
    wanted = gradient(merged(pool, tmp_path / "full"), task_of(Reader().double()), "tensor", None)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-9, atol=1e-12)
    assert set(notes) <= set(cook(pool, task, "uniform").notes)


def test_a_fast_path_of_evaluation_that_skips_modules_is_seen(tmp_path: Path) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
            self.last = nn.Linear(8, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.layer(self.words(x)).mean(dim=1))
            return out

    pool = adapter_pool(tmp_path, Encoder, [{"layer.linear1": 2, "last": 2}, {"layer.linear1": 1}], torch.float64)
    found, wanted = (
        cook(one, task_of(Encoder().double()), "hl+", steps=4, batch_size=8).soup
        for one in (pool, merged(pool, tmp_path / "full"))
    )
    assert found is not None
    assert wanted is not None
    torch.testing.assert_close(found.W, wanted.W, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("factor", "learned"), [(1.0, True), (2.0, False)])
def test_a_module_of_its_own_kind_must_compute_what_a_linear_layer_does(
    tmp_path: Path, factor: float, learned: bool
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(WORDS, 8), Turned(8, 8, factor), nn.Flatten(), nn.Linear(40, CLASSES))

    pool = adapter_pool(tmp_path, build, [{"1": 2}, {"1": 3}], torch.float64, fan_in_fan_out=True)
    model = build().double()
    task = task_of(model)  # moves it to the device
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wide, notes = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    assert set(wide) == ({"1.weight"} if learned else set())
    refused = ("learned with full weights, not factors, because Turned does not compute W0 x: 1.weight",)
    assert notes == (() if learned else refused)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_model_is_given_back_as_it_was_made(tmp_path: Path) -> None:
    pool, model = zoo(tmp_path), Mixed().double()
    task = task_of(model)
    wide, _ = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    own = model.last.forward
    vars(model.last)["forward"] = own  # as some libraries do
    with FactoredLive(task, pool, Layout.of(pool, facts=pool.facts()), wide) as live:
        live.load_ingredient(2)
        assert model.last.forward != own
        ids = task.fit.batch(torch.arange(4))[0].to(DEVICE)
        held = model(ids)
    assert vars(model.last)["forward"] is own
    assert "forward" not in vars(model.first)
    task.load({name: pool.tensor(2, name) for name in pool.specs})
    torch.testing.assert_close(held, model(ids))


# A quantised base ----------------------------------------------------------------------------------------


class Codes(nn.Module):
    """A linear layer as libraries quantise it: bytes and a scale for each row, and a forward of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        self.absmax: Tensor
        self.register_buffer("absmax", scale)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.absmax, self.bias)


def quantised(pool: Pool) -> tuple[nn.Module, dict[str, Tensor]]:
    """The base with its two last linear layers quantised, and the weights that these layers really have."""
    model = Mixed().double()
    assert pool.adapters is not None
    own = {name: pool.adapters.base.tensor(name).clone() for name in pool.specs}
    model.load_state_dict(own)
    for name in ("first", "last"):
        codes = Codes(getattr(model, name))
        own[f"{name}.weight"] = (codes.weight.double() * codes.absmax).clone()
        setattr(model, name, codes)
    return model, own


@pytest.mark.parametrize(
    ("method", "form"),
    [("uniform", "auto"), ("greedy", "auto"), ("hl+", "auto"), ("crossfit", "auto"), ("best", 1), ("hl+", 1)],
)
def test_a_quantised_model_learns_and_holds_the_soup_beside_its_weights(tmp_path: Path, method: str, form: Any) -> None:
    pool = zoo(tmp_path)
    model, own = quantised(pool)
    options: dict[str, Any] = {"steps": 6, "batch_size": 8} if method in ("hl+", "crossfit") else {}
    options["form"] = form  # of a cut rank the scores are those of what is written
    before = model.last.weight.clone()  # type: ignore[operator, union-attr]
    found = cook(pool, task_of(model), method, **options)
    # The same with a base that has what the codes stand for.
    (tmp_path / "exact").mkdir()
    save_file(own, tmp_path / "exact" / "base.safetensors")
    exact = Pool.open(tmp_path / "adapters", base=tmp_path / "exact" / "base.safetensors")
    exact.digests()
    exact._scan = replace(exact._scan, digests=pool.digests())  # type: ignore[type-var]
    wanted = cook(exact, task_of(plain := Mixed().double()), method, **options)
    assert found.soup is not None
    assert wanted.soup is not None
    assert found.fit is not None
    assert wanted.fit is not None
    torch.testing.assert_close(found.soup.W, wanted.soup.W, rtol=0, atol=1e-10)
    assert torch.equal(found.fit.table, wanted.fit.table)
    assert torch.equal(model.last.weight.cpu(), before)  # type: ignore[arg-type, union-attr]
    ids = torch.randint(0, WORDS, (4, 5)).to(DEVICE)
    torch.testing.assert_close(model(ids), plain(ids))
    again = cook(pool, task_of(model), method, **options)  # the soup that is in the model is taken off first
    assert again.soup is not None
    assert torch.equal(again.soup.W, found.soup.W)
    torch.testing.assert_close(model(ids), plain(ids))


def test_what_a_quantised_model_cannot_hold_is_refused(tmp_path: Path) -> None:
    pool = zoo(tmp_path)
    with pytest.raises(TaskError, match=r"model tensor last.weight: expected numbers: its adapters cannot stay beside"):
        cook(pool, task_of(quantised(pool)[0]), "uniform", exclude="last.weight")
    with pytest.raises(TaskError, match=r"found quantised weights \(2 such tensors\)"):
        cook(pool, task_of(quantised(pool)[0]), "hl+", preset="authors", steps=2)
    with pytest.raises(TaskError, match=r"the model has 2 more"):  # full checkpoints
        cook(merged(pool, tmp_path / "full"), task_of(quantised(pool)[0]), "uniform")


def test_a_quantised_layer_that_gives_no_gradient_is_refused(tmp_path: Path) -> None:
    """Such as those of bitsandbytes on some processors: adapters before it would learn nothing, silently."""
    pool = zoo(tmp_path)
    model, _ = quantised(pool)
    last: Any = model.last
    plain = last.forward
    last.forward = lambda x: plain(x.detach())
    with pytest.raises(
        TaskError, match=r"module last \(Codes\), quantised: expected the gradient of W0 x .* found none"
    ):
        cook(pool, task_of(model), "hl+", steps=2)


class OfBytes(Tensor):
    """Weights as torchao keeps them: a tensor without memory of its own, whose operations know what it stands for."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> OfBytes:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = args
            return F.linear(x, weight.codes.to(x.dtype) * weight.scale, *bias, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.aten.clone.default):
            return OfBytes(args[0].codes, args[0].scale)
        if func is torch.ops.aten._to_copy.default:  # to the device where there is one
            return OfBytes(args[0].codes.to(kwargs.get("device")), args[0].scale.to(kwargs.get("device")))
        raise NotImplementedError(f"{func}")


def test_weights_without_memory_of_their_own(tmp_path: Path) -> None:
    pool, tables = zoo(tmp_path), []
    for kept in (False, True):
        model, _ = quantised(pool)
        if kept:
            codes: Any = model.last
            layer = nn.Linear(codes.in_features, codes.out_features).double()
            layer.weight = nn.Parameter(OfBytes(codes.weight.data, codes.absmax), requires_grad=False)
            layer.bias = codes.bias
            model.last = layer
        found = cook(pool, task_of(model), "hl+", steps=6, batch_size=8)
        assert found.soup is not None
        assert found.fit is not None
        tables.append((found.soup.W, found.fit.table))
    for one, other in zip(*tables, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)

"""Batches are trees of tensors; models are called on them, and keep labels, logits and a loss in known places."""

from __future__ import annotations

import copy
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stockpot.errors import StockpotError, TaskError

LABEL_KEYS = ("labels", "label", "y", "target")
# Columns that metrics read; a model gets one only if its forward names it.
JUDGED = (
    "bytes", "options", "option_labels", "option_lengths", "answer", "prompt_ids", "prompt_mask", "answer_ids",
)  # fmt: skip

# Trees --------------------------------------------------------------------------------------------


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf; containers keep their types where they can be rebuilt."""
    if isinstance(tree, Mapping):
        mapped = {key: map_tree(function, value) for key, value in tree.items()}
        if type(tree) is dict or not isinstance(tree, MutableMapping):
            return mapped
        # A tokenizer's BatchEncoding is read through attributes by user code, so its type must survive.
        rebuilt = copy.copy(tree)
        rebuilt.update(mapped)
        return rebuilt
    if isinstance(tree, (tuple, list)):
        items = [map_tree(function, value) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items) if isinstance(tree, tuple) else items
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return map_tree(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def on_device(tree: Any, device: torch.device) -> Any:
    """The tree with its tensors on the device."""

    def move(leaf: Tensor) -> Tensor:
        if device.type == "mps" and leaf.dtype == torch.float64:  # which Apple's devices do not have
            leaf = leaf.float()
        return leaf.to(device, non_blocking=True)

    return map_tensors(move, tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with the Python expression that reaches it, such as `['labels']` or `[0]`."""
    if isinstance(tree, (Mapping, tuple, list)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value, f"{path}[{key!r}]")
    else:
        yield path, tree


def refill(tree: Any, values: Iterable[Any]) -> Any:
    """The same tree with its leaves replaced, in the order of `leaves`."""
    remaining = iter(values)
    return map_tree(lambda _: next(remaining), tree)


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the rows of its labels, or else of its first tensor."""
    for _, leaf in (*leaves(find_labels(batch)), *leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, (Mapping, tuple)) else 1


# The user's functions -----------------------------------------------------------------------------

_PATHS = sysconfig.get_paths()
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), _PATHS["stdlib"], _PATHS["purelib"])


_FIX = "mend it there; in Python the error's __cause__ is the original one"
_CALL = (
    "make batches that the model takes, (inputs, labels) or dicts of keyword arguments; or call it yourself:"
    ' loss=lambda model, batch: ... with one loss per sample and metric="loss"'
)
_SHOWN = 6  # parts of a tuple, a list or a dict that a message lists


@contextmanager
def users_code(what: str, function: Any, *given: Any, fix: str = _FIX) -> Iterator[None]:
    """An error inside the user's own function is said to be theirs, with the line it came from and what it was given.

    A model may be somebody else's, and is not said to be anybody's.
    """
    try:
        yield
    except (StockpotError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        home = str(getattr(function, "__module__", "")).partition(".")[0]
        ours = home == "stockpot" and not isinstance(function, nn.Module)
        if ours or isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            raise  # the host's allocator has no error of its own
        # The innermost frame that is neither ours nor a library's, or else the innermost.
        frames = traceback.extract_tb(error.__traceback__)
        frame = next((one for one in reversed(frames) if not one.filename.startswith(_LIBRARIES)), frames[-1])
        where = f"\n  in {frame.filename}, line {frame.lineno}: {frame.line}"
        called = f"\n  called with {', '.join(map(sketch, given))}" if given else ""
        raise TaskError.of(
            what if isinstance(function, nn.Module) else f"{what}, which is your own code",
            expected="outputs for a batch" if isinstance(function, nn.Module) else "a value",
            found=f"{type(error).__name__}: {error}{where}{called}",
            fix=fix,
        ) from error


def models_code(model: nn.Module, batch: Any) -> AbstractContextManager[None]:
    """The same for a call of the model."""
    kept = getattr(getattr(model, "config", None), "problem_type", None)  # what transformers took its first labels for
    told = f"; if these labels are right, set model.config.problem_type, which is {kept!r}, to None" if kept else ""
    return users_code(f"model {type(model).__name__}", model, batch, fix=_CALL + told)


def sketch(tree: Any) -> str:
    """Types and shapes of whatever a function is given, such as `(float32 (8, 3), int64 (8,))`."""
    if isinstance(tree, (Tensor, np.ndarray)):
        kind = str(tree.dtype).removeprefix("torch.")
        device = "" if isinstance(tree, np.ndarray) or tree.device.type == "cpu" else f" on {tree.device}"
        return f"{'array ' if isinstance(tree, np.ndarray) else ''}{kind} {tuple(tree.shape)}{device}"
    if isinstance(tree, Mapping):
        parts = [f"{str(key)[:40]}: {sketch(value)}" for key, value in list(tree.items())[:_SHOWN]]
        return "{" + ", ".join(parts) + (", ..." if len(tree) > _SHOWN else "") + "}"
    if isinstance(tree, (tuple, list)):
        more = f", ... {len(tree)} in all" if len(tree) > _SHOWN else ""
        inside = ", ".join(map(sketch, tree[:_SHOWN])) + more
        return f"[{inside}]" if isinstance(tree, list) else f"({inside})"
    return type(tree).__name__


def next_of(iterable: Iterable[Any], what: str, owner: Any) -> Iterator[Any]:
    """What a user's iterable gives, one after the other; its errors are said to be theirs."""
    iterator = iter(iterable)
    while True:
        with users_code(what, owner):
            try:
                found = next(iterator)
            except StopIteration:
                return
        yield found


# Models -------------------------------------------------------------------------------------------


def call(model: nn.Module, batch: Any) -> Any:
    """The model's own output for `(inputs, labels)`, a mapping of keyword arguments, or bare inputs."""
    if isinstance(batch, Mapping):
        # What forward has no parameter for is there for loss and metric.
        left_out = not_taken(model, batch)
        return model(**{key: value for key, value in batch.items() if key not in left_out})
    if isinstance(batch, (tuple, list)):
        if len(batch) > 2:
            raise TaskError.of(
                "batch",
                expected="(inputs, labels) or a dict of the model's keyword arguments",
                found=f"a {type(batch).__name__} of {len(batch)}",
                fix="nest the inputs as ((a, b), labels) or use a dict; or give loss=lambda model, batch: ... with one"
                ' loss per sample and metric="loss"',
            )
        batch = batch[0]
        if isinstance(batch, Mapping):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
    return model(batch)


def not_taken(model: nn.Module, batch: Mapping[str, Any]) -> list[str]:
    """The columns that forward has no parameter for."""
    # A compiled model takes anything; the one inside it says what that must be.
    parameters = inspect.signature(getattr(model, "_orig_mod", model).forward).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return [key for key in batch if key not in parameters and (key in JUDGED or not takes_all)]


def find_labels(batch: Any) -> Any:
    """The second of a pair, or the first of the usual keys; None when there is neither."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) == 2 else None


def find_logits(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    else:
        first = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        found = getattr(outputs, "logits", first)
    return found if isinstance(found, Tensor) else None


def find_loss(outputs: Any) -> Tensor | None:
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return found if isinstance(found, Tensor) else None


def need_logits(outputs: Any, purpose: str) -> Tensor:
    """Logits in at least single precision."""
    logits = find_logits(outputs)
    if logits is None:
        raise TaskError.of(
            f"model output for {purpose}",
            expected="a tensor, an object with .logits, a dict with 'logits', or a tuple of logits first",
            found=type(outputs).__name__,
            fix="give loss=lambda model, batch: ... and metric=lambda outputs, batch: ...",
        )
    return at_least_single(logits)


def at_least_single(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()

"""Batches are trees of tensors; models are called on them, and keep labels, logits and a loss in known places."""

from __future__ import annotations

import copy
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot.errors import StockpotError, TaskError

LABEL_KEYS = ("labels", "label", "y", "target")

# Trees --------------------------------------------------------------------------------------------


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf; containers keep their types where they can be rebuilt."""
    if isinstance(tree, Mapping):
        return _mapping(tree, {key: map_tree(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple):
        mapped = [map_tree(function, value) for value in tree]
        return type(tree)(*mapped) if hasattr(tree, "_fields") else tuple(mapped)
    if isinstance(tree, list):
        return [map_tree(function, value) for value in tree]
    return function(tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return map_tree(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with the Python expression that reaches it, such as `['labels']` or `[0]`."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}[{key!r}]")
    elif isinstance(tree, (tuple, list)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def refill(tree: Any, values: Iterable[Any]) -> Any:
    """The same tree with its leaves replaced, in the order of `leaves`."""
    remaining = iter(values)
    return map_tree(lambda _: next(remaining), tree)


def _mapping(like: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(like) is dict or not isinstance(like, MutableMapping):
        return values
    # A tokenizer's BatchEncoding is read through attributes by user code, so its type must survive.
    rebuilt = copy.copy(like)
    for key, value in values.items():
        rebuilt[key] = value
    return rebuilt


def batch_rows(batch: Any) -> int:
    """How many samples a batch has: the rows of its labels, or else of its first tensor."""
    for _, leaf in (*leaves(find_labels(batch)), *leaves(batch)):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
    return len(batch) if isinstance(batch, Sized) and not isinstance(batch, (Mapping, tuple)) else 1


# The user's functions -----------------------------------------------------------------------------


@contextmanager
def users_code(what: str, function: Any) -> Iterator[None]:
    """An error inside the user's own function is said to be theirs, with the line it came from."""
    if str(getattr(function, "__module__", "")).partition(".")[0] == "stockpot":
        yield
        return
    try:
        yield
    except (StockpotError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error):
            raise  # the host's allocator has no error of its own
        raise TaskError.of(
            f"{what}, which is your own code",
            expected="a value",
            found=f"{type(error).__name__}: {error}\n  {_users_line(error)}",
            fix="mend it there; in Python the error's __cause__ has the whole traceback",
        ) from error


_PATHS = sysconfig.get_paths()
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), _PATHS["stdlib"], _PATHS["purelib"])


def _users_line(error: BaseException) -> str:
    """Where it happened: the innermost frame that is neither ours nor a library's, or else the innermost."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((one for one in reversed(frames) if not one.filename.startswith(_LIBRARIES)), frames[-1])
    return f"in {frame.filename}, line {frame.lineno}: {frame.line}"


# Models -------------------------------------------------------------------------------------------


def call(model: nn.Module, batch: Any) -> Any:
    """The model's own output for `(inputs, labels)`, a mapping of keyword arguments, or bare inputs."""
    if isinstance(batch, Mapping):
        return model(**_accepted(model, batch))
    if isinstance(batch, (tuple, list)):
        if len(batch) > 2:
            raise TaskError.of(
                "batch",
                expected="(inputs, labels) or a dict of the model's keyword arguments",
                found=f"a {type(batch).__name__} of {len(batch)}",
                fix="nest the inputs as ((a, b), labels), use a dict, or give loss= and metric=",
            )
        inputs = batch[0]
        if isinstance(inputs, Mapping):
            return model(**inputs)
        if isinstance(inputs, (tuple, list)):
            return model(*inputs)
        return model(inputs)
    return model(batch)


def _accepted(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch without its labels when the model's forward has no parameter for them."""
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(batch)
    return {key: value for key, value in batch.items() if key in parameters or key not in LABEL_KEYS}


def find_labels(batch: Any) -> Any:
    """The second of a pair, or the first of the usual keys; None when there is neither."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABEL_KEYS if key in batch), None)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[1]
    return None


def with_blank_labels(batch: Any) -> Any:
    """A batch that no model can trip over because of its labels: all of them zero."""
    if isinstance(batch, Mapping):
        return {
            key: map_tensors(torch.zeros_like, value) if key in LABEL_KEYS else value for key, value in batch.items()
        }
    return batch


def find_logits(outputs: Any) -> Tensor | None:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping) and "logits" in outputs:
        found = outputs["logits"]
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, (tuple, list)) and outputs:
        found = outputs[0]
    else:
        found = None
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

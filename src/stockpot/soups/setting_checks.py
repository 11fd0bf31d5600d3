"""Which settings make sense, alone and together, and what is said of those that do not. Knows nothing of tensors."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from stockpot.errors import MethodError, describe

if TYPE_CHECKING:
    from stockpot.soups.settings_before import Settings

StartName = Literal["mean", "greedy", "own-greedy"]
STARTS: tuple[str, ...] = get_args(StartName)


def directions_from_the_mean(chosen: Mapping[str, Any]) -> bool:
    """Whether learning goes by coefficients of directions from the mean, in which any soup can be written."""
    return (
        chosen.get("parametrisation", "hyperplane") == "hyperplane"
        and chosen.get("decentralise", True) is True
        and chosen.get("centre", "mean") == "mean"
        and not chosen.get("reset", False)
    )


def unknown(what: str, given: object, known: Any) -> str:
    close = difflib.get_close_matches(str(given), [str(k) for k in known], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "pick one of them"
    return describe(
        f"{what} {given!r}",
        expected=f"one of {', '.join(sorted(known))}",
        found=f"an unknown {what}",
        fix=hint,
    ).replace("?.", "?")


def check(s: Settings) -> None:
    """Raise for the first setting that makes no sense, alone or beside the others."""

    def need(ok: bool, name: str, expected: str, fix: str) -> None:
        if not ok:
            raise MethodError(
                describe(f"setting {name}", expected=expected, found=repr(getattr(s, name)), fix=fix)
            )

    def one_of(name: str, *words: str) -> None:
        value = getattr(s, name)
        if value not in words:
            raise MethodError(unknown(name, value, words))

    one_of("parametrisation", "hyperplane", "simplex")
    if not callable(s.granularity):
        one_of("granularity", "model", "block", "module", "tensor")
    one_of("optimizer", "adamw", "sgd")
    one_of("schedule", "cosine", "constant")
    one_of("centre", "mean", "soup")
    one_of("start", *STARTS)
    one_of("directions", "auto", "fp64", "fp32", "bf16", "int8")
    need(
        s.memory is None or s.memory > 0, "memory", "more than 0 bytes, or None", "use None for what is free"
    )
    need(
        s.block_size is None
        or s.block_size in ("auto", "fit")
        or (isinstance(s.block_size, int) and s.block_size >= 1),
        "block_size",
        "at least 1 model, 'auto', 'fit', or None for all",
        "raise block_size",
    )
    need(s.passes >= 1, "passes", "at least 1", "raise passes")
    need(s.blocks is None or s.blocks >= 1, "blocks", "at least 1, or None", "raise blocks")
    need(
        (s.steps is None) != (s.epochs is None),
        "steps",
        "exactly one of steps and epochs",
        "set the other one to None",
    )
    need(s.steps is None or s.steps >= 1, "steps", "at least 1", "raise steps")
    need(s.epochs is None or s.epochs > 0, "epochs", "more than 0", "raise epochs")
    need(s.batch_size >= 1, "batch_size", "at least 1", "raise batch_size")
    need(
        1 <= s.accumulate <= s.batch_size,
        "accumulate",
        f"between 1 and batch_size ({s.batch_size})",
        "lower accumulate",
    )
    need(s.lr >= 0, "lr", "0 or more", "use a positive learning rate")
    need(s.weight_decay >= 0, "weight_decay", "0 or more", "use 0 for none")
    need(0 <= s.momentum < 1, "momentum", "in [0, 1)", "lower momentum")
    need(0 <= s.warmup < 1, "warmup", "a share in [0, 1)", "0.2 means the first fifth of the steps")
    need(s.clip is None or s.clip > 0, "clip", "more than 0, or None", "use None for no clipping")
    for name, most in (("lr", 1e30), ("weight_decay", 1e6), ("epochs", 1e9), ("clip", 1e30)):
        value = getattr(s, name)  # beyond these torch cannot even hold a step's numbers
        need(value is None or value <= most, name, f"at most {most:g}", "use the default")
    for name in ("retreat", "smooth", "guard"):
        need(
            not getattr(s, name) or s.folds > 1,
            name,
            "False, or folds of at least 2 to have held-out data",
            "set folds=4",
        )
    need(1 <= s.advance <= 2, "advance", "between 1 and 2", "1.5 means half as fast again; 1 never speeds up")
    need(0 <= s.label_smoothing < 1, "label_smoothing", "in [0, 1)", "0.1 is usual")
    need(s.folds >= 1, "folds", "at least 1", "1 means no cross-fitting")
    need(s.evaluations >= 1, "evaluations", "at least 1", "raise evaluations")
    need(
        s.start == "mean" or directions_from_the_mean(dataclasses.asdict(s)),
        "start",
        "mean, when parametrisation, decentralise, centre or reset are changed",
        "leave those settings alone to change start",
    )
    if s.parametrisation == "simplex":
        need(
            s.decentralise and s.centre == "mean" and not s.unit_norm and not s.reset,
            "parametrisation",
            "hyperplane, when decentralise, centre, unit_norm or reset are changed",
            "leave those settings alone for learned and learned+",
        )
        need(
            s.block_size is None,
            "block_size",
            "None: the softmax couples all models",
            "use a hyperplane method (mehl, mehl+) to learn block by block",
        )
    if not s.decentralise:
        need(
            s.centre == "mean" and not s.unit_norm and not s.reset,
            "decentralise",
            "True, when centre, unit_norm or reset are changed",
            "use preset 'paper' for the ablation",
        )

"""Every choice a method leaves open, and the presets that make them.

The six learned soups of the paper are one learner with three switches (`parametrisation`, `granularity`,
`block_size`); a method name sets the switches, a preset sets the rest, the caller overrides either.
This file knows nothing of tensors, so that recipes and `--help` can read it without loading torch.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stockpot.errors import MethodError, describe

Granularity = Literal["model", "block", "module", "tensor"]


@dataclass(frozen=True)
class Settings:
    """What the learner does; the paper's symbols are in brackets."""

    parametrisation: Literal["hyperplane", "simplex"] = "hyperplane"
    granularity: Granularity | Callable[[str], str] = "tensor"
    # [b] models loaded at a time; auto: at most 18; fit: as many as there is memory for; None: all K
    block_size: int | Literal["auto", "fit"] | None = "auto"
    passes: int = 1  # times every model is visited: T = passes * ceil(K / b)
    blocks: int | None = None  # [T] outer iterations; overrides `passes`
    steps: int | None = 1000  # [J] inner iterations per block; None: use `epochs`
    epochs: float | None = None  # inner iterations as epochs of the fitting data
    batch_size: int = 128
    accumulate: int = 1  # micro-batches a batch is cut into
    optimizer: Literal["adamw", "sgd"] = "adamw"
    momentum: float = 0.0  # of sgd
    lr: float = 0.01  # [eta]
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup: float = 0.0  # share of the inner iterations with linear warm-up
    weight_decay: float = 0.1
    clip: float | None = (
        None  # global norm of the coefficient gradient, with `apart` of both its parts together
    )
    label_smoothing: float = 0.0
    coarse: float = (
        0.0  # share of the inner iterations in which a model's groups move together, before they part
    )
    apart: float | None = (
        None  # a model's groups move together at lr, and each for itself at this share of it
    )
    temperature: bool = False  # learn a factor on the logits (Learned-Soup)
    decentralise: bool = True  # directions theta_k - mean (paper, appendix D); False: theta_k, free weights
    centre: Literal["mean", "soup"] = "mean"  # `soup`: mean of the first block, then the current soup
    unit_norm: bool = False  # scale each direction to norm one per coefficient group
    reset: bool = False  # coefficients start at zero on every visit
    start: Literal["mean", "greedy", "leaders", "turns"] = "mean"  # the soup that learning sets out from
    reach: float = 1.0  # part of the way from there to what was learned that is gone in the end
    folds: int = 1  # > 1: learn once per fold, early-stopped on the fold left out, and average
    evaluations: int = 10  # held-out evaluations per block when folds > 1
    retreat: bool = (
        False  # where held-out loss does not fall: back to the best coefficients, at half the rate
    )
    advance: float = 1.0  # with `retreat`: factor on the rate where held-out loss did fall
    guard: bool = False  # fall back to best / uniform / greedy where held-out data says so beyond chance
    directions: Literal["auto", "fp64", "fp32", "bf16", "int8"] = (
        "auto"  # how loaded models are kept; auto: exact on a CPU
    )
    memory: int | None = None  # bytes of the device that learning may take; None: what is free
    low_memory: bool = False  # project and free gradients one by one, recompute activations
    compile: bool = False  # torch.compile the model while learning: pays for long runs on a GPU
    graphs: bool = True  # capture the inner step as a CUDA graph where the model allows
    greedy_ties: bool = False  # greedy adds an ingredient that leaves the score equal
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)


# What a method name fixes: the three switches of DESIGN.md, and for `crossfit` how it learns and what guards it.
METHODS: Mapping[str, Mapping[str, Any]] = {
    "best": {},
    "uniform": {},
    "greedy": {},
    "ensemble": {},
    "learned": {"parametrisation": "simplex", "granularity": "model", "block_size": None},
    "learned+": {"parametrisation": "simplex", "granularity": "tensor", "block_size": None},
    "hl": {"granularity": "model", "block_size": None},
    "hl+": {"granularity": "tensor", "block_size": None},
    "mehl": {"granularity": "model"},
    "mehl+": {"granularity": "tensor"},
    "crossfit": {
        "granularity": "tensor",
        "block_size": "fit",
        "steps": 150,
        "lr": 0.02,
        "start": "greedy",
        "folds": 4,
        "evaluations": 30,
        "retreat": True,
        "advance": 1.5,
        "guard": True,
    },
}
LEARNED = frozenset(METHODS) - {"best", "uniform", "greedy", "ensemble"}

# The paper's appendix B: lr 0.01 and weight decay 0.1 on the hyperplane, 0.05 and 0 on the simplex.
_PAPER_SIMPLEX = {"lr": 0.05, "weight_decay": 0.0}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {},
    "authors": {
        "centre": "soup",
        "unit_norm": True,
        "reset": True,
        "warmup": 0.2,
        "clip": 1.0,
        "weight_decay": 0.0,
    },
}


PAPER_BLOCK = 18  # the paper's b for ViT-B/32


def block_size_for(settings: Settings, models: int) -> int:
    """b for a pool of K models."""
    if settings.block_size is None or settings.block_size == "fit":
        return models
    if settings.block_size == "auto":
        return min(PAPER_BLOCK, models)
    if settings.block_size > models:
        raise MethodError(
            describe(
                "setting block_size",
                expected=f"at most K = {models}, the number of ingredients",
                found=str(settings.block_size),
                fix="lower block_size, or use None to load all models at once",
            )
        )
    return settings.block_size


def settings_for(method: str, preset: str | None = None, **overrides: Any) -> Settings:
    """Resolve a method name, a preset and the caller's own values, in that order of precedence (last wins)."""
    if method not in METHODS:
        raise MethodError(_unknown("method", method, METHODS))
    if preset is not None and preset not in PRESETS:
        raise MethodError(_unknown("preset", preset, PRESETS))
    known = {f.name for f in dataclasses.fields(Settings)}
    for name in overrides:
        if name not in known:
            raise MethodError(_unknown("setting", name, known))
    switches = METHODS[method]
    if preset == "authors" and switches.get("parametrisation") == "simplex":
        raise MethodError(
            describe(
                f"preset 'authors' with method {method!r}",
                expected="a hyperplane method (hl, hl+, mehl, mehl+, crossfit)",
                found="a softmax method",
                fix="use preset 'paper' for learned and learned+",
            )
        )
    chosen: dict[str, Any] = dict(switches)
    if switches.get("parametrisation") == "simplex":
        chosen.update(_PAPER_SIMPLEX)
    chosen.update(PRESETS[preset or "paper"])
    if overrides.get("epochs") is not None:
        chosen["steps"] = None  # the one asked for replaces the default of the other
    chosen.update(overrides)
    if not _directions_from_the_mean(chosen):
        # A method's own choice gives way to what the caller or the preset asks for.
        chosen.update({key: value for key, value in _FROM_THE_START.items() if key not in overrides})
    return Settings(**chosen)


_FROM_THE_START: Mapping[str, Any] = {"start": "mean", "reach": 1.0}


def _directions_from_the_mean(chosen: Mapping[str, Any]) -> bool:
    """Whether learning goes by coefficients of directions from the mean, in which any soup can be written."""
    return (
        chosen.get("parametrisation", "hyperplane") == "hyperplane"
        and chosen.get("decentralise", True) is True
        and chosen.get("centre", "mean") == "mean"
        and not chosen.get("reset", False)
    )


def _unknown(what: str, given: object, known: Any) -> str:
    close = difflib.get_close_matches(str(given), [str(k) for k in known], n=1)
    hint = f"did you mean {close[0]!r}?" if close else "pick one of them"
    return describe(
        f"{what} {given!r}",
        expected=f"one of {', '.join(sorted(known))}",
        found=f"an unknown {what}",
        fix=hint,
    ).replace("?.", "?")


def _check(s: Settings) -> None:
    def need(ok: bool, name: str, expected: str, fix: str) -> None:
        if not ok:
            raise MethodError(
                describe(f"setting {name}", expected=expected, found=repr(getattr(s, name)), fix=fix)
            )

    def one_of(name: str, *words: str) -> None:
        value = getattr(s, name)
        if value not in words:
            raise MethodError(_unknown(name, value, words))

    one_of("parametrisation", "hyperplane", "simplex")
    if not callable(s.granularity):
        one_of("granularity", "model", "block", "module", "tensor")
    one_of("optimizer", "adamw", "sgd")
    one_of("schedule", "cosine", "constant")
    one_of("centre", "mean", "soup")
    one_of("start", "mean", "greedy", "leaders", "turns")
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
    need(0 <= s.coarse < 1, "coarse", "a share in [0, 1)", "0.5 means the first half of the steps")
    need(
        s.apart is None or 0 < s.apart <= 1,
        "apart",
        "more than 0 and at most 1, or None",
        "0.25 lets groups move a quarter as fast as their model; granularity='model' never lets them part",
    )
    need(
        s.apart is None or s.coarse == 0,
        "apart",
        "None, when coarse keeps groups together first",
        "set one of the two",
    )
    need(
        s.apart is None or (s.granularity != "model" and not s.unit_norm),
        "apart",
        "None, when a model has one coefficient or unit_norm scales its groups",
        "use granularity='tensor' without unit_norm",
    )
    need(
        not s.retreat or s.folds > 1,
        "retreat",
        "False, or folds of at least 2 to have held-out data",
        "set folds=4",
    )
    need(1 <= s.advance <= 2, "advance", "between 1 and 2", "1.5 means half as fast again; 1 never speeds up")
    need(0 <= s.label_smoothing < 1, "label_smoothing", "in [0, 1)", "0.1 is usual")
    need(s.folds >= 1, "folds", "at least 1", "1 means no cross-fitting")
    need(
        not s.guard or s.folds > 1,
        "guard",
        "False, or folds of at least 2 to have held-out data",
        "set folds=4",
    )
    need(
        s.start != "turns" or s.folds > 1,
        "start",
        "mean, greedy or leaders where there are no folds to take turns",
        "set folds=4",
    )
    need(s.evaluations >= 1, "evaluations", "at least 1", "raise evaluations")
    need(0 < s.reach <= 1, "reach", "more than 0 and at most 1", "1 keeps all that was learned")
    for name, plain in _FROM_THE_START.items():
        need(
            getattr(s, name) == plain or _directions_from_the_mean(dataclasses.asdict(s)),
            name,
            f"{plain}, when parametrisation, decentralise, centre or reset are changed",
            f"leave those settings alone to change {name}",
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

"""Every choice a method leaves open, and the presets that make them.

The six learned soups of the paper are one learner with three switches (`parametrisation`, `granularity`,
`block_size`); a method name sets the switches, a preset sets the rest, the caller overrides either.
This file knows nothing of tensors, so that recipes and `--help` can read it without loading torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stockpot.errors import MethodError, describe
from stockpot.soups.setting_checks import (
    StartName,
    check,
    directions_from_the_mean,
    unknown,
)

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
    clip: float | None = None  # global norm of the coefficient gradient
    label_smoothing: float = 0.0
    temperature: bool = False  # learn a factor on the logits (Learned-Soup)
    decentralise: bool = True  # directions theta_k - mean (paper, appendix D); False: theta_k, free weights
    centre: Literal["mean", "soup"] = "mean"  # `soup`: mean of the first block, then the current soup
    unit_norm: bool = False  # scale each direction to norm one per coefficient group
    reset: bool = False  # coefficients start at zero on every visit
    start: StartName = "mean"  # where learning sets out
    folds: int = 1  # > 1: learn once per fold, early-stopped on the fold left out, and average
    evaluations: int = 10  # held-out evaluations per block when folds > 1
    retreat: bool = (
        False  # where held-out loss does not fall: back to the best coefficients, at half the rate
    )
    advance: float = 1.0  # with `retreat`: factor on the rate where held-out loss did fall
    smooth: bool = False  # judge, and keep, the mean of the coefficients since the last held-out evaluation
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
        check(self)


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
        "steps": 300,
        "lr": 0.02,
        "start": "own-greedy",
        "folds": 4,
        "evaluations": 30,
        "retreat": True,
        "advance": 1.5,
        "smooth": True,
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
                fix="lower block_size, or use None (null in a recipe) to load all models at once",
            )
        )
    return settings.block_size


def settings_for(method: str, preset: str | None = None, **overrides: Any) -> Settings:
    """Resolve a method name, a preset and the caller's own values, in that order of precedence (last wins)."""
    if method not in METHODS:
        raise MethodError(unknown("method", method, METHODS))
    if preset is not None and preset not in PRESETS:
        raise MethodError(unknown("preset", preset, PRESETS))
    known = {f.name for f in dataclasses.fields(Settings)}
    for name in overrides:
        if name not in known:
            raise MethodError(unknown("setting", name, known))
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
    if not directions_from_the_mean(chosen):
        # A method's own choice gives way to what the caller or the preset asks for.
        chosen["start"] = overrides.get("start", "mean")
    return Settings(**chosen)

"""What a search will do, decided before any tensor is touched: the spaces, and the trials drawn from them."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stockpot.errors import MethodError

Value = int | float
Space = Value | list[Value] | tuple[Value, ...] | Mapping[str, Any]

# Wide enough that some ingredients are poor: a soup needs them to differ.
SPACES: Mapping[str, Space] = {
    "lr": {"min": 1e-5, "max": 3e-4, "scale": "log"},
    "weight_decay": {"min": 1e-4, "max": 0.5, "scale": "log"},
    "epochs": {"min": 4, "max": 16},
    "label_smoothing": [0.0, 0.05, 0.1, 0.2],
    "augmentation": [0.0, 0.25, 0.5, 1.0],
    "seed": {"min": 0, "max": 2**31 - 1},
}

Bound = tuple[str, Callable[[float], bool]]
_POSITIVE: Bound = ("above 0", lambda value: value > 0)
_FROM_0: Bound = ("of at least 0", lambda value: value >= 0)
_SHARE: Bound = ("from 0 to below 1", lambda value: 0 <= value < 1)
_BOUNDS: Mapping[str, Bound] = {
    **dict.fromkeys(("lr", "epochs", "clip"), _POSITIVE),
    **dict.fromkeys(("weight_decay", "seed", "mixup"), _FROM_0),
    **dict.fromkeys(("label_smoothing", "warmup"), _SHARE),
    "augmentation": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "batch_size": ("of at least 1", lambda value: value >= 1),
}


class Checked:
    """Settings whose numbers are looked at as soon as they are made; `clip` may be None."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in _BOUNDS or isinstance(value, Checked) or (value is None and name == "clip"):
                continue
            bound, fits = _BOUNDS[name]
            if not (_is_number(value) and fits(value)):
                fix = "correct the value, or the space it is drawn from"
                raise _wrong(name, f"a number {bound}", repr(value), fix)


@dataclass(frozen=True)
class Trial(Checked):
    """The hyperparameters of one ingredient."""

    lr: float
    weight_decay: float = 0.0
    epochs: float = 8.0  # a fraction of one is allowed
    label_smoothing: float = 0.0
    augmentation: float = 0.0  # strength, 0 to 1
    seed: int = 0  # of data order, dropout and augmentation


@dataclass(frozen=True)
class Augmentation(Checked):
    """Which changes augmentation may make; a trial's strength says how far they go."""

    flip: bool = False  # images left to right; wrong for digits and text
    shift: bool = True
    erase: bool = True
    jitter: bool = True  # brightness and contrast
    mixup: float = 0.0  # alpha of the Beta distribution at strength 1


@dataclass(frozen=True)
class Probe(Checked):
    """Training of the head alone, before and shared by all trials."""

    epochs: float = 10.0
    lr: float = 1e-3
    weight_decay: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Plan(Checked):
    """The trials of a search and what they have in common."""

    trials: tuple[Trial, ...]
    batch_size: int = 128
    optimizer: Literal["adamw", "sgd"] = "adamw"
    warmup: float = 0.1  # share of the steps with linear warm-up, before the cosine
    clip: float | None = 1.0  # largest norm of the gradient
    probe: Probe | None = field(default_factory=Probe)  # None: the head is kept as given
    head: str | None = None  # name, prefix or pattern of its tensors; None: the last linear layer
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trials:
            raise _wrong("trials", "at least one trial", "none", "ask for 12 or more")
        if self.optimizer not in ("adamw", "sgd"):
            raise _wrong("optimizer", "'adamw' or 'sgd'", repr(self.optimizer), "use 'adamw'")


def draw_trials(
    count: int | None = None,
    *,
    seed: int = 0,
    listed: Sequence[Mapping[str, Value]] | None = None,
    spaces: Mapping[str, Space] | None = None,
) -> tuple[Trial, ...]:
    """Random search, or the `listed` settings with what they leave out drawn at random.

    `spaces` replace those of `SPACES`. Trial n is a pure function of the seed, n and its own spaces.
    """
    for name in [*(spaces or {}), *(name for row in listed or () for name in row)]:
        if name not in SPACES:
            close = difflib.get_close_matches(name, SPACES, n=1)
            fix = f"did you mean {close[0]}" if close else "search over the known ones"
            known = ", ".join(SPACES)
            raise MethodError.of(f"setting {name!r}", expected=f"one of {known}", found="an unknown one", fix=fix)
    if count is None:
        count = len(listed or ())
    if listed is not None and len(listed) != count:
        raise _wrong("trials", f"{count} listed trials", str(len(listed)), "leave count out")
    if count < 1:
        raise _wrong("trials", "at least one trial", str(count), "ask for 12 or more")
    chosen = {**SPACES, **(spaces or {})}
    trials = []
    for n in range(count):
        drawn = {k: draw(space, k, seed=seed, number=n, whole=k == "seed") for k, space in chosen.items()}
        values: dict[str, Any] = {**drawn, **(listed[n] if listed is not None else {})}
        if values["seed"] != int(values["seed"]):
            raise _wrong("seed", "a whole number", repr(values["seed"]), "use 0, 1, 2, ...")
        trials.append(Trial(**{**values, "seed": int(values["seed"])}))
    return tuple(trials)


def draw(space: Space, name: str, *, seed: int, number: int, whole: bool = False) -> Value:
    """One value of `0.1` (fixed), `[0, 0.1]` (choices) or `{"min", "max", "scale": "log" | "linear"}` (a range).

    It depends on the seed, the trial's number and the name alone, so searching one more thing changes no other.
    """
    source = random.Random(f"{seed}/{number}/{name}")
    try:
        known = checked(space)
    except ValueError as error:
        fix = 'give a number, a list of numbers, or {"min": 1e-5, "max": 1e-3, "scale": "log"}'
        raise MethodError(f"space of {name}: {error}.\n  Fix: {fix}.") from error
    if isinstance(known, tuple):
        return source.choice(known)
    low, high = known["min"], known["max"]
    if known["scale"] == "log":
        value: Value = math.exp(source.uniform(math.log(low), math.log(high)))
        value = min(max(value, low), high)  # exp(log(x)) may miss x by one rounding, and the ends are promises
        return round(value) if whole else value
    return source.randint(math.ceil(low), math.floor(high)) if whole else source.uniform(low, high)


def checked(space: Any) -> tuple[Value, ...] | dict[str, Any]:
    """A space written out, as its choices or as the range with its scale."""
    if not isinstance(space, Mapping):
        choices = tuple(space) if isinstance(space, (list, tuple)) else (space,)
        if not choices:
            raise ValueError("expected at least one choice, found an empty list")
        return tuple(map(number, choices))
    if not {"min", "max"} <= set(space) <= {"min", "max", "scale"}:
        found = ", ".join(map(str, space)) or "an empty mapping"
        raise ValueError(f"expected a range with min, max and perhaps scale, found {found}")
    low, high, scale = number(space["min"]), number(space["max"]), space.get("scale", "linear")
    if scale not in ("log", "linear"):
        raise ValueError(f"expected scale 'log' or 'linear', found {scale!r}")
    if low > high:
        raise ValueError(f"expected min <= max, found {low} > {high}")
    if scale == "log" and low <= 0:
        raise ValueError(f"expected min > 0 for a log range, found {low}")
    return {"min": low, "max": high, "scale": scale}


def number(value: Any) -> Any:
    if not _is_number(value) or value < 0:
        raise ValueError(f"expected a number of at least 0, found {value!r}")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _wrong(name: str, expected: str, found: str, fix: str) -> MethodError:
    return MethodError.of(f"fine-tuning setting {name}", expected=expected, found=found, fix=fix)

"""What a search will do, decided before any tensor is touched: the spaces, and the trials drawn from them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from stockpot.errors import MethodError
from stockpot.soups.settings import Declared, Setting, unknown

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


@dataclass(frozen=True)
class Trial(Declared):
    """The hyperparameters of one ingredient."""

    lr: Annotated[float, Setting("Learning rate.", above=0)]
    weight_decay: Annotated[float, Setting("Weight decay.", at_least=0)] = 0.0
    epochs: Annotated[float, Setting("Epochs; a fraction of one is allowed.", above=0)] = 8.0
    label_smoothing: Annotated[float, Setting("Label smoothing.", at_least=0, at_most=1)] = 0.0
    augmentation: Annotated[
        float, Setting("Strength of image augmentation, up to 1; 0: none.", at_least=0, at_most=1)
    ] = 0.0
    seed: Annotated[int, Setting("Seed of data order, dropout and augmentation.", at_least=0)] = 0


@dataclass(frozen=True)
class Augmentation(Declared):
    """Which changes augmentation may make; a trial's strength says how far they go."""

    flip: Annotated[bool, Setting("Augmentation may mirror images left to right; wrong for digits and text.")] = False
    shift: bool = True
    erase: bool = True
    jitter: bool = True  # brightness and contrast
    mixup: Annotated[
        float,
        Setting(
            "Alpha of mixup at augmentation strength 1, and in proportion below; 0: none. Not for token ids or a loss"
            " of your own.",
            at_least=0,
        ),
    ] = 0.0


@dataclass(frozen=True)
class Probe(Declared):
    """Training of the head alone, before and shared by all trials."""

    epochs: Annotated[float, Setting("Epochs of the head alone.", above=0)] = 10.0
    lr: Annotated[float, Setting("Learning rate of the head alone.", above=0)] = 1e-3
    weight_decay: Annotated[float, Setting("Weight decay of the head alone.", at_least=0)] = 0.0
    seed: Annotated[int, Setting("Seed of data order, dropout and augmentation.", at_least=0)] = 0


@dataclass(frozen=True)
class Plan(Declared):
    """The trials of a search and what they have in common."""

    trials: tuple[Trial, ...]
    batch_size: Annotated[int, Setting("Samples per step.", at_least=1)] = 128
    optimizer: Annotated[Literal["adamw", "sgd"], Setting("Which optimiser trains.")] = "adamw"
    warmup: Annotated[float, Setting("Share of the steps with linear warm-up.", at_least=0, at_most=1)] = 0.1
    clip: Annotated[float | None, Setting("Largest norm of the gradient. none: no limit.", above=0)] = 1.0
    probe: Probe | None = field(default_factory=Probe)  # None: the head is kept as given
    head: Annotated[
        str | None, Setting("Name, prefix or pattern of the head's tensors. Default: the model's last linear layer.")
    ] = None
    augmentation: Augmentation = field(default_factory=Augmentation)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trials:
            raise _too_few("none")


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
            raise MethodError(unknown("setting", name, SPACES))
    if count is None:
        count = len(listed or ())
    if listed is not None and len(listed) != count:
        raise MethodError.of("trials", f"{count} listed trials", str(len(listed)), "leave count out")
    if count < 1:
        raise _too_few(str(count))
    chosen = {**SPACES, **(spaces or {})}
    trials = []
    for n in range(count):
        drawn = {k: draw(space, k, seed=seed, number=n, whole=k == "seed") for k, space in chosen.items()}
        values: dict[str, Any] = {**drawn, **(listed[n] if listed is not None else {})}
        trials.append(Trial(**values))
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
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise ValueError(f"expected a number of at least 0, found {value!r}")
    return value


def _too_few(found: str) -> MethodError:
    return MethodError.of("trials", expected="at least one trial", found=found, fix="ask for 12 or more")

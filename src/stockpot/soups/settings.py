"""Every choice a learned soup leaves open, declared once.

A field's annotation says what it means and which values make sense. Python, recipes, the schema and the
reference page read this declaration. The file knows nothing of tensors, so that none of them loads torch for it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from stockpot.errors import MethodError, describe

PAPER_BLOCK = 18  # the paper's b for ViT-B/32


@dataclass(frozen=True)
class Setting:
    """What a field means and may be."""

    help: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    unit: str = ""  # "bytes", "seconds": sizes such as 8GiB and times such as 10min are understood in recipes


class Declared:
    """A dataclass whose annotations hold a `Setting` for each field that is checked as soon as it is made."""

    def __post_init__(self) -> None:
        own: Any = type(self)  # which mypy does not take for hashable
        for name, (kind, setting) in declared(own).items():
            _check(name, getattr(self, name), kind, setting)


Granularity = Literal["model", "block", "module", "tensor"]


@dataclass(frozen=True)
class Settings(Declared):
    """How coefficients are learned; the paper's symbols are in brackets."""

    granularity: Annotated[
        Granularity | Callable[[str], str],
        Setting("One coefficient per model, block, module or tensor; or a function from tensor name to group."),
    ] = "tensor"
    block_size: Annotated[
        int | Literal["auto", "fit"] | None,
        Setting("Models loaded at a time [b]. auto: at most 18; fit: as many as memory allows; none: all.", at_least=1),
    ] = "auto"
    passes: Annotated[int, Setting("How often every model is loaded: T = passes * ceil(K / b).", at_least=1)] = 1
    blocks: Annotated[int | None, Setting("Blocks in all [T], instead of whole passes.", at_least=1)] = None
    steps: Annotated[
        int | None, Setting("Steps per block [J]. none: as many as `epochs` says.", at_least=1, at_most=10**9)
    ] = 1000
    epochs: Annotated[
        float | None, Setting("Steps per block, as epochs of the fitting data.", above=0, at_most=1e9)
    ] = None
    batch_size: Annotated[int, Setting("Samples per step.", at_least=1)] = 128
    accumulate: Annotated[
        int,
        Setting(
            "Pieces that a batch is cut into, to save memory. The result is the same, unless samples of a batch see"
            " each other (batch normalisation, contrastive losses).",
            at_least=1,
        ),
    ] = 1
    lr: Annotated[
        float,
        Setting(
            "Learning rate of the coefficients [eta]; with folds, where the search for one begins.",
            at_least=0,
            at_most=1e30,
        ),
    ] = 0.01
    weight_decay: Annotated[float, Setting("Weight decay of the coefficients.", at_least=0, at_most=1e6)] = 0.1
    beta: Annotated[
        bool, Setting("Also learn a factor on the logits [beta], as Learned-Soup's published code does.")
    ] = False
    folds: Annotated[
        int, Setting("More than 1: learn once per fold, stop on the fold left out, average.", at_least=1)
    ] = 1
    ties: Annotated[bool, Setting("Greedy also adds a model that leaves the score equal.")] = False
    budget: Annotated[
        float | str | None,
        Setting(
            "Seconds that a method may take. When they are over, learning and greedy end with the best so far; how far"
            " they get differs from run to run. A continued run has them anew. Or samples, as text (`200k samples`): as"
            " many are learned from, all steps of all blocks and folds together, and greedy scores its candidates on as"
            " many; scoring the ingredients and judging come on top, and every run gets as far. none: no limit.",
            above=0,
            unit="seconds",
        ),
    ] = None
    directions: Annotated[
        Literal["auto", "fp64", "fp32", "bf16", "int8"],
        Setting("How loaded models are kept while learning; the result is always exact."),
    ] = "auto"
    memory: Annotated[
        int | None,
        Setting(
            "Bytes of the device that learning may take. none: what a GPU has free; on other devices half of the"
            " machine's memory for block_size auto and fit, and no limit otherwise.",
            at_least=1,
            unit="bytes",
        ),
    ] = None
    low_memory: Annotated[
        bool, Setting("Free gradients one by one and recompute activations: slower, least memory.")
    ] = False
    compile: Annotated[bool, Setting("Compile the model with torch.compile: pays for long runs on a GPU.")] = False
    graphs: Annotated[bool, Setting("Capture the step as a CUDA graph where the model allows.")] = True
    parallel: Annotated[
        Literal["auto", "data", "folds", "shards"],
        Setting(
            "How the ranks of torchrun or srun share the learning; the soup is the same. data: each takes a part of"
            " every batch; folds: each learns whole folds, where the method has some; shards: each holds a part of the"
            " model and of the loaded ingredients, too; auto: folds where that keeps all ranks busy, else data."
        ),
    ] = "auto"
    shards: Annotated[
        int | None, Setting("Ranks that hold the model together under parallel: shards; none: all.", at_least=1)
    ] = None
    seed: Annotated[int, Setting("Order of data and models.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _need(
            (self.steps is None) != (self.epochs is None),
            "steps",
            "exactly one of steps and epochs",
            self.steps,
            "set the other one to None",
        )
        _need(
            self.accumulate <= self.batch_size,
            "accumulate",
            f"between 1 and batch_size ({self.batch_size})",
            self.accumulate,
            "lower accumulate",
        )
        _need(
            self.shards is None or self.parallel == "shards",
            "shards",
            "parallel: shards beside it",
            f"parallel: {self.parallel}",
            "set parallel to 'shards', or leave shards out",
        )
        _need(
            not isinstance(self.budget, str) or samples_in(self.budget) is not None,
            "budget",
            "a number of seconds, or samples such as '200k samples'",
            self.budget,
            "give seconds as a number; 10min is understood in recipes",
        )

    @property
    def seconds(self) -> float:
        """What the budget is in time."""
        return self.budget if isinstance(self.budget, (int, float)) else math.inf

    @property
    def samples(self) -> float:
        """What the budget is in samples."""
        return math.inf if not isinstance(self.budget, str) else samples_in(self.budget) or 0


def samples_in(text: str) -> int | None:
    """The number in `200k samples` or `1.5M samples`; None where that is none."""
    found = re.fullmatch(r"([0-9]*\.?[0-9]+) ?([kKmM]?) samples", text.strip())
    return None if found is None else round(float(found[1]) * {"": 1, "k": 1000, "m": 10**6}[found[2].lower()]) or None


@cache
def declared(of: type = Settings) -> dict[str, tuple[Any, Setting]]:
    """Every declared field's type and what its declaration says of it."""
    hints = get_type_hints(of, include_extras=True).items()
    pairs = {name: get_args(hint) for name, hint in hints if get_origin(hint) is Annotated}
    return {name: (kind, setting) for name, (kind, setting) in pairs.items()}


def _check(name: str, value: object, kind: Any, setting: Setting) -> None:
    """Refuse a value that has another type than declared, or lies outside its bounds."""
    options = get_args(kind) if get_origin(kind) in (Union, type(int | str)) else (kind,)
    words = [word for option in options for word in _words(option)]
    if isinstance(value, str) and words and value not in words:
        raise MethodError(unknown(name, value, words))
    if not any(_is(value, option) for option in options):
        known = {int: "a whole number", float: "a number", bool: "True or False", str: "text", type(None): "None"}
        expected = [known.get(option) or ", ".join(map(repr, _words(option))) or "a function" for option in options]
        raise MethodError.of(f"setting {name}", " or ".join(expected), repr(value), "use one of these")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low = setting.at_least is None or value >= setting.at_least
        low &= setting.above is None or value > setting.above
        high = setting.at_most is None or value <= setting.at_most
        _need(low and high and math.isfinite(value), name, bounds(setting), value, "use the default, or a value within")


def _words(option: Any) -> tuple[str, ...]:
    """The words of a Literal; none for other types."""
    return get_args(option) if get_origin(option) is Literal else ()


def _is(value: object, option: Any) -> bool:
    """Whether a value is of a declared type; whole numbers are numbers, True and False are not."""
    if option is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    origin = get_origin(option)  # asked first: for Python 3.10, Callable[...] is a type too
    if origin is Literal:
        return isinstance(value, str) and value in get_args(option)
    return callable(value) if origin is not None else type(value) is option


def bounds(setting: Setting) -> str:
    """Which numbers a setting may be, in words."""
    parts = []
    if setting.at_least is not None:
        parts.append(f"at least {setting.at_least:g}")
    if setting.above is not None:
        parts.append(f"more than {setting.above:g}")
    if setting.at_most is not None:
        parts.append(f"at most {setting.at_most:g}")
    return " and ".join(parts) or "a finite number"


def _need(ok: bool, name: str, expected: str, found: object, fix: str) -> None:
    if not ok:
        raise MethodError.of(f"setting {name}", expected=expected, found=repr(found), fix=fix)


def unknown(what: str, given: object, known: Iterable[str]) -> str:
    """The message for a word that nobody knows, with the nearest one that somebody does."""
    words = sorted(map(str, known))
    close = difflib.get_close_matches(str(given), words, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "pick one of them"
    return describe(
        f"{what} {given!r}", expected=f"one of {', '.join(words)}", found=f"an unknown {what}", fix=hint
    ).replace("?.", "?")


def as_json(settings: Settings) -> dict[str, Any]:
    """The settings as records hold them; a function of the user's own is called custom."""
    value = dataclasses.asdict(settings)
    if callable(value["granularity"]):
        value["granularity"] = "custom"
    return value


def block_size_for(settings: Settings, models: int) -> int:
    """b for a pool of K models."""
    if settings.block_size is None or settings.block_size == "fit":
        return models
    if settings.block_size == "auto":
        return min(PAPER_BLOCK, models)
    _need(
        settings.block_size <= models,
        "block_size",
        f"at most K = {models}, the number of ingredients",
        settings.block_size,
        "lower block_size, or use None (null in a recipe) to load all models at once",
    )
    return settings.block_size


def steps_for(settings: Settings, *samples: int, blocks: int = 1) -> int:
    """J, given or as epochs of the data, as far as a budget in samples allows. `samples`: of every fold."""
    batches = [min(settings.batch_size, n) for n in samples]
    if settings.steps is not None:
        J = settings.steps
    else:
        assert settings.epochs is not None
        J = max(1, round(settings.epochs * samples[0] / batches[0]))
    return J if settings.samples == math.inf else min(J, int(settings.samples) // (blocks * sum(batches)))

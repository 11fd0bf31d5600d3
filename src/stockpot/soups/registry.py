"""Every method: its name, what it is, what decides its mixing weights and what it costs. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from stockpot.errors import MethodError
from stockpot.soups.settings import Granularity, Settings, block_size_for, declared, unknown

DEFAULT = "crossfit"


@dataclass(frozen=True)
class Method:
    """One way to decide mixing weights."""

    name: str
    summary: str  # one line for people who have read no paper
    decides: str  # module:function in stockpot.soups, (problem, method, settings, store) -> Decision
    defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that differ from those of `Settings`
    soup: bool = True  # False: its decision has no W
    learned: bool = False
    simplex: bool = False  # a softmax over the models; all of them are loaded at once
    blockwise: bool = False  # a block size can be chosen
    scores_ingredients: bool = False  # every ingredient is evaluated on the fitting data on the way
    vectors: int = 3  # of P numbers held at a time, for methods that do not learn
    # How many checkpoints are read of K, with the soup built once to be scored and once to be reported.
    reads: Callable[[int], int] = lambda K: 4 * K
    own: frozenset[str] = frozenset()  # settings that a comparison's common settings do not reach

    def granularity(self, settings: Settings) -> Granularity | Callable[[str], str] | None:
        """What W has a column for: the model, unless the defaults name something finer; None where there is no W."""
        if not self.soup:
            return None
        return settings.granularity if "granularity" in self.defaults else "model"


# The paper's appendix B: lr 0.01 and weight decay 0.1 on the hyperplane, 0.05 and 0 on the simplex.
_SIMPLEX = {"lr": 0.05, "weight_decay": 0.0, "block_size": None, "beta": True}
_SCHEDULE = frozenset({"steps", "epochs", "block_size", "passes", "blocks", "lr", "weight_decay"})

METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("best", "the single best model: what one would take without a soup", "baselines:best",
               scores_ingredients=True, reads=lambda K: K + 2),
        Method("uniform", "the plain average of all models", "baselines:uniform", reads=lambda K: 2 * K),
        Method("greedy", "the average of the models that helped when added one by one", "baselines:greedy_soup",
               scores_ingredients=True, vectors=5),
        Method("ensemble", "averages the outputs of all models: no soup, and as slow as all of them together",
               "baselines:ensemble", soup=False, reads=lambda K: 2 * K),
        Method("learned", "one learned weight per model, between 0 and 1", "learn:learned_soup",
               {**_SIMPLEX, "granularity": "model"}, learned=True, simplex=True),
        Method("learned+", "learned weights per part of the model, between 0 and 1", "learn:learned_soup",
               {**_SIMPLEX, "granularity": "tensor"}, learned=True, simplex=True),
        Method("hl", "one learned weight per model, free to extrapolate", "learn:learned_soup",
               {"granularity": "model", "block_size": None}, learned=True),
        Method("hl+", "learned weights per part of the model, free to extrapolate", "learn:learned_soup",
               {"granularity": "tensor", "block_size": None}, learned=True),
        Method("mehl", "like hl, but holds only a few models in memory at a time", "learn:learned_soup",
               {"granularity": "model"}, learned=True, blockwise=True),
        Method("mehl+", "like hl+, but holds only a few models in memory at a time", "learn:learned_soup",
               {"granularity": "tensor"}, learned=True, blockwise=True),
        Method("crossfit",
               "like hl+, but on several folds, all stopped together on data they did not see, then averaged",
               "crossfit:crossfit_soup",
               {"granularity": "tensor", "block_size": "fit", "steps": 1000, "lr": 0.02, "folds": 4},
               # The mean, the block, the soup; every ingredient is scored, and so are means of half, a quarter, ...
               reads=lambda K: 10 * K,
               learned=True, blockwise=True, scores_ingredients=True, own=_SCHEDULE | {"folds"}),
    )
}  # fmt: skip
LEARNED = frozenset(name for name, method in METHODS.items() if method.learned)

PRESETS: Mapping[str, str] = {
    "paper": "the paper's text",
    "authors": "what the authors' released code does instead, in a file of its own (hl, hl+, mehl, mehl+)",
}
AUTHORS = ("hl", "hl+", "mehl", "mehl+")
# What soups/authors.py reads: it has none of the engine's settings, and none of what is added to the paper.
_OF_AUTHORS = frozenset(
    {"granularity", "block_size", "passes", "blocks", "steps", "epochs", "batch_size", "accumulate", "lr",
     "weight_decay", "ties", "seed"}
)  # fmt: skip


def decides(method: Method, preset: str | None = None) -> Any:
    """The function that decides mixing weights; its module, and torch, are imported now."""
    module, function = ("authors:authors_soup" if preset == "authors" else method.decides).split(":")
    return getattr(import_module(f"stockpot.soups.{module}"), function)


def preset_for(name: str, preset: str | None) -> str | None:
    """The preset as far as this method has it; the paper's text is what methods do without one."""
    return preset if preset == "authors" and name in AUTHORS else None


def method_named(name: str) -> Method:
    """The method of that name; another word is refused with the nearest name."""
    if name not in METHODS:
        raise MethodError(unknown("method", name, METHODS))
    return METHODS[name]


def settings_for(method: str, preset: str | None = None, **given: Any) -> Settings:
    """A method's settings: those of `Settings`, then the method's own, then what the caller gives."""
    chosen = dict(method_named(method).defaults)
    if preset is not None and preset not in PRESETS:
        raise MethodError(unknown("preset", preset, PRESETS))
    for name in given:
        if name not in declared():
            raise MethodError(unknown("setting", name, declared()))
    if preset == "authors":
        if method not in AUTHORS:
            raise MethodError.of(
                f"preset 'authors' with method {method!r}",
                expected=f"one of {', '.join(AUTHORS)}",
                found="a method that their code does not have",
                fix="use preset 'paper', or leave it out",
            )
        chosen["weight_decay"] = 0.0
        for name in given.keys() - _OF_AUTHORS:
            raise MethodError.of(
                f"setting {name} with preset 'authors'",
                expected="a setting that the released code has",
                found=repr(given[name]),
                fix=f"leave {name} out, or leave the preset out",
            )
        if given.get("block_size") == 1:
            raise MethodError.of(
                "setting block_size with preset 'authors'",
                expected="at least 2: a first block of one model has no direction from its own mean",
                found="1",
                fix="use a larger block_size, or leave the preset out",
            )
    if given.get("epochs") is not None:
        chosen["steps"] = None  # the one asked for replaces the default of the other
    chosen.update(given)
    settings = Settings(**chosen)
    if METHODS[method].simplex and settings.block_size is not None:
        raise MethodError.of(
            "setting block_size",
            expected="None: the softmax couples all models",
            found=repr(settings.block_size),
            fix="use a hyperplane method (mehl, mehl+) to learn block by block",
        )
    return settings


def settings_in_comparison(
    name: str, preset: str | None, common: Mapping[str, Any], each: Mapping[str, Mapping[str, Any]]
) -> Settings:
    """A method's settings beside others: what is set for all of them, as far as it concerns this one, and its own.

    A preset or a block size reaches the methods that have one. `crossfit` takes its schedule and its folds from
    `each` alone: they are part of it, and numbers meant for the paper's methods would make it another method.
    """
    method = method_named(name)
    reach = {key: value for key, value in common.items() if key not in method.own}
    if not method.blockwise:
        reach.pop("block_size", None)
    if not method.learned:
        reach.pop("folds", None)
    if method.defaults.get("granularity") == "model":
        reach.pop("granularity", None)  # it tells hl from hl+
    own = each.get(name, {})
    if preset == "authors" and name not in AUTHORS:
        preset = None
    elif preset == "authors":
        reach = {key: value for key, value in reach.items() if key in _OF_AUTHORS}
    if own.get("epochs") is not None:
        reach.pop("steps", None)  # the one that is set for this method replaces the other one set for all
    if own.get("steps") is not None:
        reach.pop("epochs", None)
    return settings_for(name, preset, **{**reach, **own})


def repetitions(chosen: Mapping[str, Settings], preset: str | None, models: int) -> dict[str, str]:
    """Methods that would do what one before them does: those that hold a few models at a time, where that is all."""
    kept: dict[tuple[Any, ...], str] = {}
    found = {}
    for name, settings in chosen.items():
        method = METHODS[name]
        if not method.learned:
            continue
        whole = replace(settings, block_size=block_size_for(settings, models))
        first = kept.setdefault((method.decides, method.simplex, preset_for(name, preset), whole), name)
        if first != name:
            found[name] = f"it is the same as {first} where all {models} models are loaded at once"
    return found

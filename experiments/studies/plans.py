"""The studies: which runs of `stockpot compare` answer which question of the paper and of ours.

A run is the zoo's recipe with a few values replaced. What `main` already has is not run again: a study over
learning rates leaves out the rate that `main` learned with, and the tables take that point from there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockpot.errors import RunError
from stockpot.soups.registry import LEARNED
from studies.zoo import Zoo, read_object

DEFAULT, PAPER = "crossfit", "mehl+"  # ours with no setting changed, and the paper's best
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5, 6, 7, 8, 9)  # of the default alone
MAIN = "main-0"
RATES = (0.005, 0.01, 0.02, 0.05)
EXACT = "fp32"  # directions that are not rounded


@dataclass(frozen=True)
class Planned:
    """One run. `after`: a run whose scores rank the ingredients, and must have come so far."""

    name: str
    methods: tuple[str, ...] = ()  # empty: the recipe's
    values: tuple[tuple[str, object], ...] = ()  # recipe keys and what replaces them
    after: str | None = None
    without_best: int = 0  # ingredients left out, best first
    first: int | None = None  # only so many ingredients, in search order

    @property
    def study(self) -> str:
        return self.name.split("-")[0]

    @property
    def stated(self) -> list[str]:
        """As `--set` takes them, without the list of ingredients."""
        pairs = [f"{key}={json.dumps(value)}" for key, value in self.values]
        return [*pairs, *([f"method.methods={json.dumps(list(self.methods))}"] if self.methods else [])]

    def overrides(self, zoo: Zoo) -> list[str]:
        if self.without_best:
            return [*self.stated, f"pool.path={json.dumps(_without_best(zoo, self.without_best))}"]
        if self.first is not None:
            return [*self.stated, f"pool.path={json.dumps(list(zoo.checkpoints[: self.first]))}"]
        return self.stated

    def models(self, zoo: Zoo) -> int:
        return self.first if self.first is not None else zoo.models - self.without_best


def main(zoo: Zoo) -> list[Planned]:
    """Tables 1 and 2: every method; those that a seed can change with every seed."""
    learned = tuple(method for method in zoo.recipe().method.compared if method in LEARNED)
    return [Planned(f"main-{seed}", learned if seed else (), (("output.seed", seed),)) for seed in SEEDS]


def seeds(zoo: Zoo) -> list[Planned]:
    """The default again and again: what is claimed of it should not hang on three draws of the folds."""
    del zoo
    return [Planned(f"seeds-{seed}", (DEFAULT,), _values(seed)) for seed in MORE_SEEDS]


def rates(zoo: Zoo) -> list[Planned]:
    """Sensitivity to the learning rate: ours with every seed, and the paper's beside it."""
    return [
        Planned(f"rates-{_word(method)}-{rate}{_of_seed(seed)}", (method,), _values(seed, method, lr=rate))
        for method in (DEFAULT, PAPER)
        for seed in _seeds(method)
        for rate in RATES
        if rate != zoo.settings(method).lr
    ]


def steps_per_block(zoo: Zoo) -> list[Planned]:
    """Sensitivity to the number of steps: half and double of what the method itself takes."""
    wanted = {method: _own_steps(zoo, method) for method in (DEFAULT, PAPER)}
    return [
        _steps_run("steps", method, max(1, round(part * own)), seed)
        for method, own in wanted.items()
        for seed in _seeds(method)
        for part in (1 / 2, 2)
    ]


def presets(zoo: Zoo) -> list[Planned]:
    """What the authors' released code does instead of the paper's text, which is in `main`."""
    del zoo
    return [Planned(f"presets-authors-{seed}", ("hl+", PAPER), _values(seed, preset="authors")) for seed in SEEDS]


def removed(zoo: Zoo) -> list[Planned]:
    """Table 3: the best 2, 22 and 42 of 72 left out, or as many in proportion."""
    counts = sorted({max(1, round(zoo.models * part / 72)) for part in (2, 22, 42)})
    return [
        Planned(f"removed-{n}", ("best", "uniform", "greedy", PAPER, DEFAULT), _values(0), MAIN, n)
        for n in counts
        if zoo.models - n >= 2
    ]


def cost(zoo: Zoo) -> list[Planned]:
    """Accuracy against what fine-tuning cost: the first n ingredients in search order."""
    counts = sorted({max(2, round(zoo.models * part)) for part in (1 / 8, 1 / 4, 1 / 2, 3 / 4)})
    methods = ("best", "uniform", "greedy", PAPER, DEFAULT)
    return [Planned(f"cost-{n}", methods, _values(0), first=n) for n in counts if n < zoo.models]


def blocks(zoo: Zoo) -> list[Planned]:
    """The paper's b; b = K is `hl+` of `main`."""
    wanted = [b for b in (4, 9, 18, 36) if b < zoo.models]
    own = zoo.settings(PAPER).block_size
    own = min(18, zoo.models) if own == "auto" else own
    return [Planned(f"blocks-{b}", (PAPER,), _values(0, PAPER, block_size=b)) for b in wanted if b != own]


def visits(zoo: Zoo) -> list[Planned]:
    """The paper's T; one pass over the models is in `main`."""
    own = blocks_of(vars(zoo.settings(PAPER)), zoo.models)
    return [
        Planned(f"visits-{t}", (PAPER,), _values(0, PAPER, blocks=t)) for t in sorted({1, 2, 4, 8, 2 * own}) if t != own
    ]


def inner(zoo: Zoo) -> list[Planned]:
    """The paper's J, three and four times as many; `main` and `steps` have the rest."""
    own = _own_steps(zoo, PAPER)
    return [_steps_run("inner", PAPER, times * own) for times in (3, 4)]


def statistics(zoo: Zoo) -> list[Planned]:
    """Networks with BatchNorm: averaged and copied statistics; measured again is in `main`."""
    if zoo.batch_norm is False:
        return []
    methods = ("uniform", "greedy", PAPER, DEFAULT)
    return [
        Planned(f"statistics-{kind}", methods, (("output.seed", 0), ("model.statistics", kind)))
        for kind in ("average", "copy")
    ]


def directions(zoo: Zoo) -> list[Planned]:
    """Models kept exactly, and rounded further than `main` does on a GPU (bf16)."""
    del zoo
    return [
        Planned(f"directions-{kind}-{seed}", ("hl+", PAPER, DEFAULT), _values(seed, directions=kind))
        for seed in SEEDS
        for kind in (EXACT, "int8")
    ]


# In the order in which they are worth their time.
STUDIES: dict[str, Callable[[Zoo], list[Planned]]] = {
    "main": main,
    "seeds": seeds,
    "rates": rates,
    "steps": steps_per_block,
    "presets": presets,
    "removed": removed,
    "cost": cost,
    "statistics": statistics,
    "directions": directions,
    "blocks": blocks,
    "visits": visits,
    "inner": inner,
}


def plan(zoo: Zoo, only: Iterable[str] | None = None) -> list[Planned]:
    """All runs, or those of the studies and runs that are named, in the order of their names."""
    return [run for _, run in plan_all([zoo], only)]


def plan_all(zoos: Sequence[Zoo], only: Iterable[str] | None = None) -> list[tuple[Zoo, Planned]]:
    """The same for several zoos: the first study of all of them, then the second. `ZOO/NAME` is of one zoo."""
    every = [(zoo, run) for make in STUDIES.values() for zoo in zoos for run in make(zoo)]
    if only is None:
        return every
    names = [zoo.name for zoo in zoos]
    chosen: dict[tuple[str, str], tuple[Zoo, Planned]] = {}
    unknown = []
    for word in only:
        owner, slash, name = word.rpartition("/")
        found = [(zoo, run) for zoo, run in every if name in (run.name, run.study) and (not slash or owner == zoo.name)]
        # A study may have no run here, such as that of BatchNorm.
        if not found and (name not in STUDIES or (slash and owner not in names)):
            unknown.append(word)
        chosen.update({(zoo.name, run.name): (zoo, run) for zoo, run in found})  # in the place it had, if any
    if unknown:
        raise RunError.of(
            f"--only {' '.join(unknown)}",
            expected=f"studies or their runs: {', '.join(STUDIES)}; before a slash one of {', '.join(names)}",
            found="unknown names",
            fix="see the names with --dry-run",
        )
    return list(chosen.values())


def block_size(settings: Mapping[str, Any], models: int) -> int:
    """The paper's b."""
    stated = settings["block_size"]
    if stated in (None, "fit"):  # all models
        return models
    return min(models, 18 if stated == "auto" else int(stated))


def blocks_of(settings: Mapping[str, Any], models: int) -> int:
    """The paper's T: how many blocks are learned, one after the other."""
    if settings["blocks"] is not None:
        return int(settings["blocks"])
    return int(settings["passes"] * -(-models // block_size(settings, models)))


def planned_steps(method: str, settings: Mapping[str, Any], models: int) -> int:
    """Optimiser steps of all folds and blocks."""
    return int(settings["folds"] * blocks_of(settings, models) * settings["steps"]) if method in LEARNED else 0


def _values(seed: int, method: str | None = None, **settings: object) -> tuple[tuple[str, object], ...]:
    """Recipe keys for a seed and settings: of every method, or of one alone."""
    section = "method" if method is None else f"method.each.{method}"
    return (("output.seed", seed), *((f"{section}.{key}", value) for key, value in settings.items()))


def _seeds(method: str) -> tuple[int, ...]:
    """One seed says little of a range: the default's is that of the mean over all of them."""
    return SEEDS if method == DEFAULT else SEEDS[:1]


def _of_seed(seed: int) -> str:
    return f"-seed-{seed}" if seed else ""


def _steps_run(study: str, method: str, count: int, seed: int = 0) -> Planned:
    return Planned(f"{study}-{_word(method)}-{count}{_of_seed(seed)}", (method,), _values(seed, method, steps=count))


def _own_steps(zoo: Zoo, method: str) -> int:
    """The paper's J; the zoos' recipes count in steps, not in epochs."""
    steps = zoo.settings(method).steps
    assert steps is not None, f"{zoo.recipe_file} counts in epochs"
    return steps


def _word(method: str) -> str:
    return method.replace("+", "-plus")


def ranked(zoo: Zoo) -> bool:
    """Whether the ingredients have their scores yet."""
    return bool(_scored(zoo))


def _scored(zoo: Zoo) -> list[dict[str, Any]]:
    """The ingredients with their scores, or nothing where one has none."""
    found: list[dict[str, Any]] = read_object(zoo.runs / MAIN / "pool.json").get("ingredients", [])
    return [] if any(one["fit"] is None for one in found) else found


def _without_best(zoo: Zoo, count: int) -> list[str]:
    file = zoo.runs / MAIN / "pool.json"
    ingredients = _scored(zoo)
    if not ingredients:
        raise RunError.of(
            f"the ranking of the ingredients of {zoo.name}",
            expected=f"{_shown(file, zoo)} with a score for each",
            found="none yet",
            fix=f"run {MAIN} first",
        )
    ranking = sorted(range(len(ingredients)), key=lambda k: (-ingredients[k]["fit"]["value"], k))
    gone = set(ranking[:count])
    by_name = {Path(path).name: path for path in zoo.checkpoints}
    if missing := [one["path"] for one in ingredients if Path(one["path"]).name not in by_name]:
        raise RunError.of(
            f"the ranking of the ingredients of {zoo.name}",
            expected="checkpoints that are in its pool",
            found=f"{missing[0]}, which is not",
            fix=f"remove {_shown(file.parent, zoo)} and run {MAIN} again",
        )
    return [by_name[Path(one["path"]).name] for k, one in enumerate(ingredients) if k not in gone]


def _shown(path: Path, zoo: Zoo) -> str:
    return path.relative_to(zoo.home).as_posix()

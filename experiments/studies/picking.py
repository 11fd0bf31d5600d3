"""Which of the planned runs are asked for, and runs that only try something out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stockpot.errors import RunError, describe
from stockpot.recipe.yaml_text import parse
from studies.plans import DEFAULT, DEV, STUDIES, TRY, Planned
from studies.zoo import Zoo


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
        found = [
            (zoo, run)
            for zoo, run in every
            if name in (run.name, run.study) and (not slash or owner == zoo.name)
        ]
        # A study may have no run here, such as that of BatchNorm.
        if not found and (name not in STUDIES or (slash and owner not in names)):
            unknown.append(word)
        chosen.update({(zoo.name, run.name): (zoo, run) for zoo, run in found})  # in the place it had, if any
    if unknown:
        raise RunError(
            describe(
                f"--only {' '.join(unknown)}",
                expected=f"studies or their runs: {', '.join(STUDIES)}; before a slash one of {', '.join(names)}",
                found="unknown names",
                fix="see the names with --dry-run",
            )
        )
    return list(chosen.values())


def attempt(name: str, pairs: Sequence[str]) -> Planned:
    """A run to try something out: on the dev split, our default alone unless it says otherwise."""
    given = dict(pair.partition("=")[::2] for pair in pairs)
    broken = [pair for pair in pairs if "=" not in pair]
    if broken:
        raise RunError(
            describe(
                f"--try {name}",
                expected="KEY=VALUE, such as method.lr=0.02",
                found=" ".join(broken),
                fix="write the key as in a recipe",
            )
        )
    values = {key: parse(text, text) for key, text in given.items()}
    values.setdefault("data.report", DEV)
    methods = () if "method.methods" in values else (DEFAULT,)
    return Planned(f"{TRY}-{name}", methods, tuple(values.items()))

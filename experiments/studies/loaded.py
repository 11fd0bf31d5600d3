"""A zoo's gathered results, and the questions that tables and figures ask of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from studies.plans import PAPER

EARLIER = "earlier"  # folders 1, 2, ... of results that newer ones have not replaced altogether
ORDER = ("cifar10-efficientnet", "fashion-vit", "imdb-minilm")


@dataclass(frozen=True)
class Point:
    """One method with one value of a setting: the run of seed 0, and what other seeds found."""

    x: float
    record: Mapping[str, Any]
    run: Mapping[str, Any]
    others: tuple[float, ...] = ()  # accuracies of other seeds

    @property
    def accuracy(self) -> float:
        """The mean over the seeds."""
        found = (float(self.record["report"]["mean"]), *self.others)
        return sum(found) / len(found)


def allowed_steps(record: Mapping[str, Any]) -> int:
    """J as the settings say it; a learner that stops early takes fewer."""
    return int(record["settings"]["steps"])


class Results:
    def __init__(self, value: Mapping[str, Any], earlier: Results | None = None) -> None:
        """`earlier`: of the same zoo, fine-tuned another time; it may have studies that were not repeated."""
        self.value, self.earlier = value, earlier
        self.is_earlier = False  # newer results of the zoo stand before these
        self.zoo = str(value["zoo"])
        # What was tried out is no result.
        self.runs: Mapping[str, Any] = {name: run for name, run in value["runs"].items() if not name.startswith("try-")}

    @staticmethod
    def read(path: Path) -> Results:
        before = path.parent.glob(f"{EARLIER}/*/{path.name}")
        found: Results | None = None
        for place in [*sorted(before, key=lambda one: int(one.parent.name)), path]:
            if found is not None:
                found.is_earlier = True
            found = Results(json.loads(place.read_text("utf-8")), found)
        assert found is not None
        return found

    def with_most_of(self, studies: Iterable[str]) -> Results:
        """These results, or the latest of the earlier ones that have more of the studies."""
        wanted = set(studies)
        found, other = self, self.earlier
        while other is not None:
            if len(wanted & other.studies) > len(wanted & found.studies):
                found = other
            other = other.earlier
        return found

    def with_curve(self, of: Callable[[Results], Sequence[Point]]) -> Results:
        """These results, or the latest of the earlier ones, that have more than one point of a curve."""
        found: Results | None = self
        while found is not None and len(of(found)) < 2:
            found = found.earlier
        return self if found is None else found

    @cached_property
    def studies(self) -> set[str]:
        return {name.split("-")[0] for name in self.runs}

    @cached_property
    def main(self) -> Mapping[str, Any] | None:
        """Seed 0 of the main study, which everything else is compared with."""
        return self.runs.get("main-0")

    @property
    def models(self) -> int:
        return 0 if self.main is None else int(self.main["models"])

    def over_seeds(self, method: str) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = self.value["over_seeds"].get(method)
        return found

    @property
    def own_test(self) -> Mapping[str, Any]:
        """As `over_seeds` of every method, on the data set's own test samples alone; empty where it has none."""
        found: Mapping[str, Any] = self.value.get("own_test", {})
        return found

    def of_main(self, method: str) -> Mapping[str, Any] | None:
        found = (self.main or {}).get("methods", {}).get(method)
        return found if found is not None and found["report"] is not None else None

    def steps_of(self, method: str) -> float:
        """Gradient steps it took, mean over the seeds; a learner that stops early takes as many as it needs."""
        runs = [*self.study("main").values(), *self.study("seeds").values()]
        found = [run["methods"][method]["steps"] for run in runs if method in run["methods"]]
        return float(sum(found) / len(found))

    def study(self, name: str) -> dict[str, Mapping[str, Any]]:
        """Its runs on the data that `main` reports on."""
        data = (self.main or {}).get("data")
        return {key: run for key, run in self.runs.items() if key.split("-")[0] == name and run["data"] == data}

    def points(self, method: str, x: Callable[[Mapping[str, Any]], float], free: Iterable[str]) -> list[Point]:
        """Every run on the whole pool whose settings are those of `main`, save those in `free`.

        The means are over the seeds that have every value: a range of means over different seeds would mean little.
        """
        first = self._of_seed(self.main, method, x, free)
        others = [
            found
            for run in self.study("main").values()
            if run is not self.main and set(found := self._of_seed(run, method, x, free)) >= set(first)
        ]
        return [
            dataclasses.replace(first[value], others=tuple(found[value].accuracy for found in others))
            for value in sorted(first)
        ]

    def _of_seed(
        self, main: Mapping[str, Any] | None, method: str, x: Callable[[Mapping[str, Any]], float], free: Iterable[str]
    ) -> dict[float, Point]:
        own = (main or {}).get("methods", {}).get(method)
        if main is None or own is None or own["report"] is None:
            return {}
        found: dict[float, Point] = {}
        for run in [main, *self.runs.values()]:
            if any(run[key] != main[key] for key in ("data", "models", "seed", "statistics")):
                continue
            record = run["methods"].get(method)
            if record is not None and record["report"] is not None and _same(record, own, free):
                point = Point(x(record), record, run)
                found.setdefault(point.x, point)
        return found

    def rates(self, method: str) -> list[Point]:
        return self.points(method, lambda record: record["settings"]["lr"], ["lr"])

    def steps(self, method: str) -> list[Point]:
        return self.points(method, allowed_steps, ["steps", "epochs"])

    def visits(self) -> list[Point]:
        return self.points(PAPER, lambda record: record["T"], ["blocks", "passes"])

    def blocks(self) -> list[Point]:
        """b = K is the paper's HL-Soup+."""
        found = {point.x: point for point in self.points(PAPER, lambda record: record["b"], ["block_size"])}
        whole, own = self.of_main("hl+"), self.of_main(PAPER)
        if whole is not None and own is not None and self.main and _same(whole, own, ["block_size"]):
            found.setdefault(whole["b"], Point(whole["b"], whole, self.main))
        return sorted(found.values(), key=lambda point: point.x)

    def smaller_pools(self, study: str) -> list[Mapping[str, Any]]:
        """Runs on a part of the pool, smallest first, and `main` at the end."""
        if self.main is None:
            return []
        return [*sorted(self.study(study).values(), key=lambda run: run["models"]), self.main]


def read_all(folder: Path) -> list[Results]:
    found = [Results.read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda one: (ORDER.index(one.zoo) if one.zoo in ORDER else len(ORDER), one.zoo))


def _same(one: Mapping[str, Any], other: Mapping[str, Any], free: Iterable[str]) -> bool:
    left, right = one["settings"], other["settings"]
    return all(left.get(key) == right.get(key) for key in {*left, *right} - set(free))

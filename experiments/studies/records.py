"""Run directories as the studies look at them: every method with its scores sample by sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stockpot.run.record import MethodRecord, read_run


@dataclass(frozen=True, eq=False)
class Method:
    name: str
    result: Mapping[str, Any]
    W: NDArray[np.float64] | None  # (K, G)
    values: Mapping[str, NDArray[np.float64]]  # by kind of data, each (n,): the zoos' metrics are means over samples

    @staticmethod
    def of(record: MethodRecord) -> Method:
        values = {kind: table[:, 0] for kind, table in record.tables.items()}
        return Method(record.name, record.result, record.W, values)

    @property
    def groups(self) -> list[str]:
        return list(self.result["groups"])

    @property
    def notes(self) -> list[str]:
        return list(self.result["notes"])


@dataclass(frozen=True, eq=False)
class Run:
    path: Path
    about: Mapping[str, Any]
    pool: Mapping[str, Any]
    results: Mapping[str, Any]
    recipe: str
    methods: tuple[Method, ...]

    @property
    def ingredients(self) -> Sequence[Mapping[str, Any]]:
        return list(self.pool.get("ingredients", []))

    def method(self, name: str) -> Method | None:
        return next((method for method in self.methods if method.name == name), None)


def read(path: Path) -> Run:
    found = read_run(path, tables=True)
    methods = tuple(Method.of(one) for one in found.methods)
    return Run(path, found.about, found.pool, found.results, found.recipe, methods)

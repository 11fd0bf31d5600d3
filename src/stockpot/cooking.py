"""The one way in: from a pool and a task to a soup by one method, or to a comparison of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stockpot.errors import MethodError, describe
from stockpot.events import Listener, ignore
from stockpot.pool import Pool
from stockpot.soups.problem import Problem
from stockpot.soups.registry import DEFAULT, METHODS, preset_for, settings_for, settings_in_comparison
from stockpot.soups.result import Result, decided, report_on
from stockpot.soups.settings import Settings, block_size_for
from stockpot.task import Task


class Comparison(dict[str, Result]):
    """Results by method, and which of them to take."""

    recommended: str | None = None  # the soup with the highest score on held-out data, if there is one
    verdict: str = ""
    failed: Mapping[str, str] = {}
    reused: tuple[str, ...] = ()
    path: Path | None = None
    soup: Path | None = None


def cook(
    pool: Pool,
    task: Task,
    method: str = DEFAULT,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    preset: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    listen: Listener = ignore,
    recipe: Any = None,
    **settings: Any,
) -> Result:
    """Find mixing weights by one method and score the soup; the report data is touched once, at the end.

    `settings` are fields of `Settings`. `preset="authors"` learns as the paper's released code does. `include`,
    `exclude` and `donor` are those of `Layout.of`. Afterwards `task.model` holds the soup's weights.
    """
    _check_runs(run, overwrite, recipe)
    _check_pool(pool)
    chosen = settings_for(method, preset, **settings)
    _check_fits({method: chosen}, pool, task)
    problem = Problem(pool, task, include=include, exclude=exclude, donor=donor, listen=listen)
    result = decided(problem, method, chosen, preset_for(method, preset))
    return dict(report_on(problem, {method: result}))[method] if task.has_report else result


def compare(
    pool: Pool,
    task: Task,
    methods: Iterable[str] | None = None,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    growth: bool = False,
    preset: str | None = None,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    listen: Listener = ignore,
    recipe: Any = None,
    **settings: Any,
) -> Comparison:
    """Every method on the same pool and data; all decisions are made before the report data is touched.

    `each={"mehl+": {"steps": 500}}` are settings of one method; the others reach every method they concern.
    """
    _check_runs(run, overwrite or growth, recipe)
    _check_pool(pool)
    names = list(METHODS) if methods is None else list(methods)
    chosen = {name: settings_in_comparison(name, preset, settings, each or {}) for name in names}
    _check_fits(chosen, pool, task)
    problem = Problem(pool, task, include=include, exclude=exclude, donor=donor, listen=listen)
    results = {name: decided(problem, name, one, preset_for(name, preset)) for name, one in chosen.items()}
    # What the guard of one method found out about others, it found out on held-out data.
    for name, scores in problem.held_out.items():
        if name in results and results[name].held_out is None:
            results[name] = replace(results[name], held_out=scores)
    comparison = Comparison(report_on(problem, results) if task.has_report else results)
    comparison.recommended = _recommended(comparison)
    return comparison


def _recommended(results: Mapping[str, Result]) -> str | None:
    """The soup that did best on data that nothing was fitted on; none where there was no such data."""
    values = {
        name: one.held_out.value
        for name, one in results.items()
        if one.soup is not None and one.held_out is not None and math.isfinite(one.held_out.value)
    }
    return max(values, key=lambda name: values[name], default=None)


def _check_runs(run: object, others: object, recipe: object) -> None:
    if run is not None or others or recipe is not None:
        raise MethodError(
            describe(
                "run=",
                expected="None, for now",
                found=repr(run),
                fix="save the result: result.soup.save(path)",
            )
        )


def _check_fits(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> None:
    """Before anything is read: block sizes the pool can have, folds the data can be cut into."""
    for name, settings in chosen.items():
        if METHODS[name].learned:
            block_size_for(settings, len(pool))
            if settings.folds > 1:
                task.fit.folds(settings.folds, settings.seed)


def _check_pool(pool: object) -> None:
    if not isinstance(pool, Pool):
        raise MethodError(
            describe(
                "pool",
                expected="a Pool",
                found=f"{type(pool).__name__} {str(pool)[:60]!r}",
                fix="open the checkpoints first: Pool.open(folder)",
            )
        )

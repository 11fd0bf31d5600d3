"""From a pool and a task to a soup, by any method."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stockpot.engine import PeakMemory
from stockpot.errors import LearningError, MethodError, describe
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.soup import Soup, weights
from stockpot.soups import crossfit
from stockpot.soups.greedy import greedy
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.remarks import remarks
from stockpot.soups.reporting import about, decision, report_on
from stockpot.soups.result import Result
from stockpot.soups.settings_before import LEARNED, METHODS, Settings, block_size_for, settings_for
from stockpot.soups.state import StateStore
from stockpot.task import Task

DEFAULT = "crossfit"


def cook(
    pool: Pool,
    task: Task,
    method: str = DEFAULT,
    *,
    preset: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    listen: Listener = ignore,
    store: StateStore | None = None,
    **settings: Any,
) -> Result:
    """Find mixing weights by one method and score the soup; the report data is touched once, at the end.

    `settings` are fields of `Settings` and override the preset (`paper` or `authors`). `include`, `exclude` and
    `donor` are those of `Layout.of`. Afterwards `task.model` holds the soup's weights.
    """
    _check_pool(pool)
    chosen = settings_for(method, preset, **settings)
    block_size_for(chosen, len(pool))  # before anything is read
    kitchen = Kitchen(
        pool, task,
        include=include, exclude=exclude, donor=donor, listen=listen, directions=kept({method: chosen}),
    )  # fmt: skip
    result = prepare(kitchen, method, chosen, store)
    return reported(kitchen, {method: result})[method]


def compare(
    pool: Pool,
    task: Task,
    methods: Iterable[str] | None = None,
    *,
    preset: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    listen: Listener = ignore,
    **settings: Any,
) -> dict[str, Result]:
    """Every method on the same pool and data; all decisions are made before the report data is touched."""
    _check_pool(pool)
    names = list(METHODS) if methods is None else list(methods)
    chosen = {name: _compared(name, preset, settings) for name in names}
    for one in chosen.values():
        block_size_for(one, len(pool))  # before anything is read
    kitchen = Kitchen(
        pool, task,
        include=include, exclude=exclude, donor=donor, listen=listen, directions=kept(chosen),
    )  # fmt: skip
    return reported(kitchen, {name: prepare(kitchen, name, chosen[name], None) for name in names})


def kept(methods: Mapping[str, Settings]) -> list[str]:
    """How those of the methods that learn keep loaded models."""
    return [settings.directions for name, settings in methods.items() if name in LEARNED]


def _compared(name: str, preset: str | None, settings: Mapping[str, Any]) -> Settings:
    """A preset or a block size for the whole comparison reaches those methods that have one."""
    switches = METHODS.get(name, {})
    own = {
        key: value
        for key, value in settings.items()
        if key != "block_size" or switches.get(key, 0) is not None
    }
    return settings_for(name, None if switches.get("parametrisation") == "simplex" else preset, **own)


@dataclasses.dataclass(frozen=True)
class Order:
    method: str
    settings: Settings
    store: StateStore | None = None


def prepare(kitchen: Kitchen, method: str, settings: Settings, store: StateStore | None) -> Result:
    """Everything up to, and without, the report data; refused once that has been looked at."""
    kitchen.task.check_may_decide(_decision(kitchen, method, settings))
    kitchen.listen(Event("method", {"method": method}))
    known_before = kitchen.individual_seconds
    began = time.perf_counter()
    with PeakMemory(kitchen.task.device) as peak:
        result = _COOKS[method](kitchen, Order(method, settings, store))
    seconds = time.perf_counter() - began
    if method in ("best", "greedy", DEFAULT) and known_before:
        seconds += known_before  # scored for an earlier method, but this one needs it too
    result = dataclasses.replace(
        result,
        seconds=seconds,
        peak_host=peak.host,
        peak_device=peak.device,
        notes=(*result.notes, *remarks(kitchen.pool, kitchen.task)),
        metric=kitchen.task.metric if isinstance(kitchen.task.metric, str) else "score",
    )
    kitchen.listen(Event("cooked", {"method": method, "seconds": seconds, "models_used": result.models_used}))
    return result


def reported(kitchen: Kitchen, results: dict[str, Result]) -> dict[str, Result]:
    """The same results with their scores on the report data, where there is some."""
    return dict(report_on(kitchen, results)) if kitchen.task.has_report else results


def _decision(kitchen: Kitchen, method: str, settings: Settings) -> str:
    digests, layout = kitchen.facts.digests, None
    if method != "ensemble":
        layout = kitchen.layout(settings.granularity if method in LEARNED else "model")
    return decision(about(method, settings), digests, layout)


def _best(kitchen: Kitchen, order: Order) -> Result:
    layout = kitchen.layout("model")
    winner = int(kitchen.individual_values().mean(dim=1).argmax())  # the first of equals
    W = weights.chosen(len(kitchen.pool), len(layout), [winner])
    soup, scores = kitchen.finish(layout, W, _about(order))
    note = f"the best ingredient on the fitting data is {kitchen.pool.names[winner]}"
    return Result(order.method, order.settings, soup, scores, models_used=1, notes=(note,))


def _uniform(kitchen: Kitchen, order: Order) -> Result:
    layout = kitchen.layout("model")
    soup, scores = kitchen.finish(layout, weights.uniform(len(kitchen.pool), len(layout)), _about(order))
    return Result(order.method, order.settings, soup, scores, models_used=len(kitchen.pool))


def _greedy(kitchen: Kitchen, order: Order) -> Result:
    layout = kitchen.layout("model")
    with kitchen.live(layout) as live:
        found = greedy(kitchen, live, ties=order.settings.greedy_ties)
    soup, scores = kitchen.finish(layout, found.W, _about(order))
    return Result(
        order.method, order.settings, soup, scores, history=found.history, models_used=len(found.chosen)
    )


def _ensemble(kitchen: Kitchen, order: Order) -> Result:
    scores = kitchen.task.ensemble_scores(kitchen.members(), listen=kitchen.listen)
    note = "averages the outputs of all models: a baseline that costs K times as much to serve, not a soup"
    return Result(order.method, order.settings, None, scores, models_used=len(kitchen.pool), notes=(note,))


def _learned(kitchen: Kitchen, order: Order) -> Result:
    layout = kitchen.layout(order.settings.granularity)
    free = not order.settings.decentralise
    how = _about(order)
    try:
        with kitchen.live(layout) as live:
            found = crossfit.learn(kitchen, live, order.settings, order.store)
    except LearningError as error:
        if isinstance(error.best, torch.Tensor):
            error.best = Soup(
                kitchen.pool, layout, error.best, free=free, about={**how, "stopped": str(error)}
            )
        raise
    soup, scores = kitchen.finish(layout, found.W, how, temperature=found.temperature, free=free)
    used = int((found.W != 0).any(dim=1).sum())
    history: tuple[Any, ...] = found.history
    return Result(
        order.method,
        order.settings,
        soup,
        scores,
        found.held_out,
        history=history,
        models_used=used,
        notes=found.notes,
    )


_COOKS: Mapping[str, Callable[[Kitchen, Order], Result]] = {
    "best": _best,
    "uniform": _uniform,
    "greedy": _greedy,
    "ensemble": _ensemble,
    **dict.fromkeys(sorted(LEARNED), _learned),
}


def _about(order: Order) -> dict[str, Any]:
    return about(order.method, order.settings)


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

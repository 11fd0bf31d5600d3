"""Stand-in for the lead's cook and compare, on top of the old code; replaced at the merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from stockpot.events import Listener, ignore
from stockpot.pool import Pool
from stockpot.run.directory import Identity, RecipeFacts, RunDirectory
from stockpot.run.environment import environment
from stockpot.run.room import require_room
from stockpot.run.work import Job, run_job
from stockpot.soups import settings_before as before
from stockpot.soups.registry import METHODS, method_named, settings_for, settings_in_comparison
from stockpot.soups.settings import Settings, block_size_for
from stockpot.task import Task

_FIXED = {
    "start": "own-greedy", "evaluations": 30, "retreat": True, "advance": 1.5, "smooth": True, "guard": True,
}  # fmt: skip


class Comparison(dict[str, Any]):
    recommended: str | None = None
    verdict: str = ""
    failed: Mapping[str, str] = {}
    reused: tuple[str, ...] = ()
    path: Path | None = None
    soup: Path | None = None


def cook(
    pool: Pool,
    task: Task,
    method: str = "crossfit",
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    preset: str | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    listen: Listener = ignore,
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Any:
    assert run is not None
    chosen = settings_for(method, preset, **settings)
    block_size_for(chosen, len(pool))
    if chosen.folds > 1 and METHODS[method].learned:
        task.fit.folds(chosen.folds, chosen.seed)
    names = ("best", method) if method in ("greedy", "crossfit") else (method,)
    every = {name: chosen if name == method else settings_for(name) for name in names}
    layout = {"include": include, "exclude": exclude, "donor": donor}
    return _run(pool, task, every, preset, run, overwrite, layout, listen, recipe, method, False)


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
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Comparison:
    assert run is not None
    names = list(METHODS) if methods is None else list(methods)
    every = {name: settings_in_comparison(name, preset, settings, each or {}) for name in names}
    layout = {"include": include, "exclude": exclude, "donor": donor}
    return _run(pool, task, every, preset, run, overwrite, layout, listen, recipe, None, growth)


def _run(
    pool: Pool, task: Task, every: Mapping[str, Settings], preset: str | None, run: str | Path, overwrite: bool,
    layout: Mapping[str, Any], listen: Listener, recipe: RecipeFacts | None, wanted: str | None, growth: bool,
) -> Comparison:  # fmt: skip
    facts = recipe or RecipeFacts("", "compare" if wanted is None else "cook")
    metric = task.metric if isinstance(task.metric, str) else "score"
    seed = next(iter(every.values())).seed
    identity = Identity(facts.kind, facts.title, seed, metric, facts.resolved, facts.digest, tuple(facts.command))
    old = {name: _old(name, preset, settings) for name, settings in every.items()}
    claimed: AbstractContextManager[RunDirectory] = RunDirectory.claim(run, identity, overwrite=overwrite)
    with claimed as directory:
        job = Job(pool, task, old, layout, growth, wanted, facts.max_shard, code=facts.code)
        require_room(Path(run), job)
        directory.begin(environment(str(task.device)))
        outcome = run_job(directory, job, listen)
    result = Comparison({name: None for name in outcome.methods})
    result.__dict__.update(dataclasses.asdict(outcome))
    return result


def _old(name: str, preset: str | None, settings: Settings) -> before.Settings:
    method = method_named(name)
    value = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)}
    value["temperature"], value["greedy_ties"] = False, value.pop("ties")
    del value["beta"]
    if method.simplex:
        value["parametrisation"] = "simplex"
    if name == "crossfit":
        value.update(_FIXED if settings.folds > 1 else {})
    if preset == "authors" and name in ("hl", "hl+", "mehl", "mehl+"):
        value = {**before.PRESETS["authors"], **value}
    return before.Settings(**value)

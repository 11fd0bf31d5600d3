"""Cook one method or compare several in a run directory.

All methods decide before the report data is touched, also over interruptions: what a method decided is on disk, and
the report data is scored only when nothing is left to decide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stockpot.engine.threads import threads_for
from stockpot.errors import ChangedError, MethodError, StockpotError, WriteError
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.run import growth, records
from stockpot.run.directory import RESULTS, RunDirectory
from stockpot.run.ingredients import keep_scores, restore_scores, write_pool
from stockpot.run.records import MethodRecord
from stockpot.run.sameness import same_code, same_fit_data, same_report_data, same_settings
from stockpot.run.state import INTERVAL, DiskStore
from stockpot.run.verdict import BASELINE, recommended, verdict
from stockpot.soup.files import MAX_SHARD
from stockpot.soups.blocks import blocks_for
from stockpot.soups.cooking import kept, prepare
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.reporting import report_on
from stockpot.soups.result import Result
from stockpot.soups.settings_before import LEARNED, Settings
from stockpot.soups.track import steps_for
from stockpot.task import Task

# Events at which the ingredients' files are looked at again: a block is loaded, a method begins or ends.
_LOOK = ("method", "block", "built", "cooked", "report")


@dataclass(frozen=True)
class Job:
    """What is cooked, of what."""

    pool: Pool
    task: Task
    settings: Mapping[str, Settings]  # by method, in the order of the table
    layout: Mapping[str, Any] = field(default_factory=dict)  # include, exclude, donor
    growth: bool = False
    wanted: str | None = None  # the method to recommend whatever the scores say (cook)
    max_shard: int = MAX_SHARD
    save_every: float = INTERVAL  # seconds
    code: Mapping[str, str] = field(default_factory=dict)  # digests of the user's own files, by name


@dataclass(frozen=True)
class Outcome:
    path: Path
    methods: tuple[str, ...]
    recommended: str
    verdict: str
    soup: Path | None  # None when nothing but the ensemble was cooked
    failed: Mapping[str, str]  # method -> why
    reused: tuple[str, ...]  # finished in an earlier process


def run_job(directory: RunDirectory, job: Job, listen: Listener = ignore) -> Outcome:
    """Do what is left to do, and leave a complete record."""
    parameters = sum(spec.numel for spec in job.pool.specs.values())
    with threads_for(parameters, job.task.device):
        return _run_job(directory, job, listen)


def _run_job(directory: RunDirectory, job: Job, listen: Listener) -> Outcome:
    def tell(event: Event) -> None:
        directory.journal(event)
        listen(event)
        if event.kind in _LOOK:
            job.pool.verify_unchanged()

    same_code(directory, job.code)
    same_settings(directory, job.settings)
    same_fit_data(directory, job.task)
    kitchen = Kitchen(job.pool, job.task, listen=tell, directions=kept(job.settings), **job.layout)
    write_pool(directory, job.pool, kitchen.layout("model"), tell)
    restore_scores(directory, kitchen)
    tell(Event("start", _outlook(job)))
    done: dict[str, MethodRecord] = {}
    failed: dict[str, StockpotError] = {}
    reused = []
    for name, settings in job.settings.items():
        folder = directory.method(name)
        earlier = records.read(folder)
        if earlier is not None:
            reused.append(name)
            done[name] = earlier
            DiskStore(folder).clear()  # a kill may have come between the record and this
            tell(Event("reused", {"method": name}))
            continue
        try:
            done[name] = _decide(kitchen, name, settings, folder, job, directory)
        except (WriteError, ChangedError):
            raise  # not the method's fault, and nothing after it could go better
        except StockpotError as error:
            job.pool.verify_unchanged()
            # One method that cannot be cooked must not cost the others.
            failed[name] = error
            tell(Event("failed", {"method": name, "error": str(error)}))
    if not done or job.wanted in failed:
        raise next(iter(failed.values())) if job.wanted is None else failed[job.wanted]
    points = _grow(directory, job, kitchen, done, tell) if job.growth else {}
    if job.task.has_report:
        same_report_data(directory, job.task)
        done, points = _report(kitchen, job.pool, done, points)
    choice = job.wanted if job.wanted is not None else recommended(done)
    sentence = verdict(done, choice, str(directory.run["metric"]), len(job.pool))
    soup = _save(done[choice], job, tell)
    errors = {name: str(error) for name, error in failed.items()}
    directory.write_json(
        RESULTS,
        {
            "methods": list(done),
            "recommended": choice,
            "verdict": sentence,
            "baseline": BASELINE if BASELINE in done else None,
            "growth": _growth_json(points, done, len(job.pool)) if job.growth else None,
            "failed": errors,
        },
    )
    directory.set_status("done")
    return Outcome(directory.path, tuple(done), choice, sentence, soup, errors, tuple(reused))


def _outlook(job: Job) -> dict[str, dict[str, int]]:
    """For progress: how many steps, blocks and folds each method has."""
    return {
        "methods": {name: steps(job, name, s) for name, s in job.settings.items()},
        "blocks": {name: blocks(job, name, s) for name, s in job.settings.items()},
        "folds": {name: s.folds for name, s in job.settings.items()},
    }


def _decide(
    kitchen: Kitchen,
    name: str,
    settings: Settings,
    folder: Path,
    job: Job,
    directory: RunDirectory | None = None,
) -> MethodRecord:
    """The method's decisions, on disk; and first, in `directory`, the ingredients' scores if it asked for them."""
    store = DiskStore(folder, job.save_every)
    result = prepare(kitchen, name, settings, store)
    result = dataclasses.replace(result, seconds=result.seconds + store.earlier)
    if directory is not None:
        keep_scores(directory, kitchen)  # before the record: a method with a record does not score them again
    record = records.write(folder, result, job.max_shard)
    store.clear()
    return record


def _report(
    kitchen: Kitchen,
    pool: Pool,
    done: Mapping[str, MethodRecord],
    points: Mapping[tuple[str, int], MethodRecord],
) -> tuple[dict[str, MethodRecord], dict[tuple[str, int], MethodRecord]]:
    """Score what is not scored yet. All decisions are recorded by now, and the task makes no other one after this."""
    every = {(name, len(pool)): record for name, record in done.items()} | dict(points)
    waiting = {
        (name, n): Result(
            name, Settings(), records.restore_soup(record, pool.subset(range(n))), record.scores("fit")
        )
        for (name, n), record in every.items()
        if not record.reported
    }
    for place, result in report_on(kitchen, waiting) if waiting else ():
        assert result.report is not None
        every[place] = records.write_report(every[place], result.report)
    return {name: every[name, len(pool)] for name in done}, {place: every[place] for place in points}


def _save(record: MethodRecord, job: Job, listen: Listener) -> Path | None:
    soup = records.restore_soup(record, job.pool)
    if soup is None:
        return None
    path = record.folder / "soup"
    if not path.exists():
        soup.save(path, max_shard=job.max_shard, listen=listen)
    return path


def _grow(
    directory: RunDirectory, job: Job, kitchen: Kitchen, done: Mapping[str, MethodRecord], listen: Listener
) -> dict[tuple[str, int], MethodRecord]:
    """Decisions on the first n ingredients; the whole pool's are already there."""
    points = {}
    for n in growth.sizes(len(job.pool))[:-1]:
        try:
            smaller = Kitchen(job.pool.subset(range(n)), job.task, listen=listen, **job.layout)
        except StockpotError as error:  # the first few are all alike, or the donor is not among them
            listen(Event("failed", {"method": f"growth with {n} models", "error": str(error)}))
            continue
        if kitchen.known is not None:
            smaller.remember(kitchen.known[:n], kitchen.individual_seconds * n / len(job.pool))
        for name in growth.methods(done):
            folder = directory.growth(name, n)
            listen(Event("growth", {"method": name, "models": n}))
            settings = job.settings[name]
            if isinstance(settings.block_size, int):
                settings = dataclasses.replace(settings, block_size=min(settings.block_size, n))
            points[name, n] = records.read(folder) or _decide(smaller, name, settings, folder, job)
    return points


def _growth_json(
    points: Mapping[tuple[str, int], MethodRecord], done: Mapping[str, MethodRecord], models: int
) -> dict[str, list[dict[str, Any]]]:
    every = {**points, **{(name, models): done[name] for name in growth.methods(done)}}
    out: dict[str, list[dict[str, Any]]] = {}
    for (name, n), record in every.items():
        out.setdefault(name, []).append({"models": n, "report": record.value["report"]})
    return out


def steps(job: Job, method: str, settings: Settings) -> int:
    """How many optimiser steps a method takes in all, for progress; 0 for those that do not learn."""
    samples = len(job.task.fit)
    inside = samples if settings.folds == 1 else samples - samples // settings.folds
    return settings.folds * blocks(job, method, settings) * steps_for(settings, inside)


def blocks(job: Job, method: str, settings: Settings) -> int:
    """How many blocks a method visits; 0 for those that do not learn."""
    if method not in LEARNED:
        return 0
    try:
        return len(blocks_for(settings, len(job.pool)))
    except MethodError:
        return 0  # said properly when the method's turn comes

"""The one way in: from a pool and a task to a soup by one method, or to a comparison of several.

With `run=` everything is recorded in a directory, and the same call goes on where an earlier one was stopped. All
methods decide before the report data is touched, also over interruptions: what a method decided is on disk, and the
report data is scored only when nothing is left to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stockpot import files
from stockpot.engine.resources import threads_for
from stockpot.errors import ChangedError, LinkError, MethodError, StockpotError, WriteError, describe
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.run.directory import Identity, RecipeFacts, RunDirectory
from stockpot.run.environment import environment
from stockpot.run.record import (
    POOL,
    RESULTS,
    SOUP,
    MethodRecord,
    describe_pool,
    read_ingredient_scores,
    read_method,
    record_of,
    result_of,
    with_report,
    write_ingredient_scores,
    write_method,
    write_report_scores,
)
from stockpot.run.state import DiskStore
from stockpot.run.verdict import BASELINE, compared_on, differences, held_out, recommended, verdict
from stockpot.soup.build import MAX_SHARD
from stockpot.soups.mehl import schedule
from stockpot.soups.problem import Problem
from stockpot.soups.registry import DEFAULT, METHODS, preset_for, settings_for, settings_in_comparison
from stockpot.soups.result import Result, decided, report_on
from stockpot.soups.settings import Settings, as_json, block_size_for, steps_for
from stockpot.task import Task
from stockpot.task.data import fingerprint

# Events at which the ingredients' files are looked at again: a block is loaded, a method begins or ends.
_LOOK = ("method", "block", "built", "cooked", "report")
GROWN = ("uniform", "greedy", "crossfit")  # methods whose growth with the pool is worth its time
# What a run writes, in bytes, so that a full disk is found before the work: one mixing weight as float64 and in decimal
# digits, one step in events.jsonl and in the saved state while that is replaced, one sample's scores.
_WEIGHT, _STEP, _SAMPLE = 40, 400, 32

Place = tuple[str, int]  # a method, and the number of ingredients it was given


class Comparison(dict[str, Result]):
    """Results by method, and which of them to take."""

    recommended: str | None = None  # the soup with the highest score on held-out data, if there is one
    verdict: str = ""
    failed: Mapping[str, str] = {}  # method -> why
    reused: tuple[str, ...] = ()  # finished by an earlier call
    path: Path | None = None  # the run directory
    soup: Path | None = None  # the saved soup in it


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
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Result:
    """Find mixing weights by one method and score the soup; the report data is touched once, at the end.

    `settings` are fields of `Settings`. `preset="authors"` learns as the paper's released code does. `include`,
    `exclude` and `donor` are those of `Layout.of`. Afterwards `task.model` holds the soup's weights. `run` is a
    directory for records, soup and whatever is needed to go on after an interruption; `overwrite` replaces an earlier
    run there.
    """
    chosen = settings_for(method, preset, **settings)
    _check_fits({method: chosen}, pool, task)
    if run is None:
        problem = Problem(pool, task, include=include, exclude=exclude, donor=donor, listen=listen)
        result = decided(problem, method, chosen, preset_for(method, preset))
        return dict(report_on(problem, {method: result}))[method] if task.has_report else result
    every = {method: chosen}
    if METHODS[method].scores_ingredients:
        # The best ingredient can be shown beside it for nothing.
        every = {BASELINE: settings_for(BASELINE, seed=chosen.seed), **every}
    job = _Job(pool, task, every, preset, _layout(include, exclude, donor), listen, wanted=method)
    return job.cooked(run, overwrite, recipe or RecipeFacts(kind="cook"))[method]


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
    """Every method on the same pool and data; all decisions are made before the report data is touched.

    `each={"mehl+": {"steps": 500}}` are settings of one method; the others reach every method they concern. A method
    that fails does not cost the others: it is in `failed`. `growth` also cooks with the first half, quarter and eighth
    of the ingredients, for the report of a run.
    """
    names = list(METHODS) if methods is None else list(methods)
    chosen = {name: settings_in_comparison(name, preset, settings, each or {}) for name in names}
    _check_fits(chosen, pool, task)
    if growth and run is None:
        raise MethodError(
            describe("growth", expected="a run directory to write to", found="run=None", fix="give run='DIR'")
        )
    job = _Job(pool, task, chosen, preset, _layout(include, exclude, donor), listen, growth=growth)
    return job.cooked(run, overwrite, recipe or RecipeFacts(kind="compare"))


def _layout(include: Iterable[str] | None, exclude: Iterable[str] | None, donor: int | str) -> dict[str, Any]:
    """Choices of `Layout.of` as values that can be used twice and written down."""

    def patterns(given: Iterable[str] | None) -> Any:
        return given if given is None or isinstance(given, str) else list(given)

    return {"include": patterns(include), "exclude": patterns(exclude), "donor": donor}


@dataclass
class _Job:
    """What is cooked, of what. `directory` is None where nothing is recorded."""

    pool: Pool
    task: Task
    chosen: Mapping[str, Settings]  # by method, in the order of the table
    preset: str | None
    layout: Mapping[str, Any]
    listen: Listener
    growth: bool = False
    wanted: str | None = None  # the method that was asked for by name
    directory: RunDirectory | None = None
    max_shard: int = MAX_SHARD

    def cooked(self, run: str | Path | None, overwrite: bool, recipe: RecipeFacts) -> Comparison:
        """Do what is left to do, and leave a complete record."""
        parameters = sum(spec.numel for spec in self.pool.specs.values())
        with ExitStack() as stack:
            if run is not None:
                identity = self._identity(Path(run), recipe)
                claimed = RunDirectory.claim(run, identity, overwrite=overwrite)
                # Claimed, not begun: what is there stays until all that the run needs is known to be in order.
                self.directory = stack.enter_context(claimed)
                files.require_space(Path(run), self._space(), "the soup and its record")
                self.directory.begin(environment(str(self.task.device)))
                self.max_shard = recipe.max_shard or MAX_SHARD
            stack.enter_context(threads_for(parameters, self.task.device))
            return self._cooked()

    def _cooked(self) -> Comparison:
        problem = Problem(self.pool, self.task, listen=self._tell, **self.layout)
        self._describe_pool(problem)
        self._tell(Event("start", self._outlook()))
        results, records, failed, reused = self._decide_all(problem)
        if not records or self.wanted in failed:
            raise failed[self.wanted] if self.wanted is not None else next(iter(failed.values()))
        self._grow(problem, results, records)
        self._report(problem, results, records)
        K = len(self.pool)
        table = {name: records[name, K] for name in self.chosen if (name, K) in records}
        evidence = held_out(table)
        choice = self.wanted if self.wanted is not None else recommended(evidence)
        comparison = Comparison({name: results[name, K] for name in table})
        comparison.recommended = choice
        comparison.verdict = verdict(table, choice, self.task.metric, K)
        comparison.failed = {name: str(error) for name, error in failed.items()}
        comparison.reused = tuple(reused)
        # What the guard of one method found out about others, it found out on held-out data.
        for name, scores in problem.held_out.items():
            if name in table and comparison[name].held_out is None:
                comparison[name] = replace(comparison[name], held_out=scores)
        if self.directory is not None:
            comparison.path = self.directory.path
            comparison.soup = self._save(table[choice], comparison[choice]) if choice is not None else None
            kind = compared_on(table)
            value = {
                "methods": list(table),
                "recommended": choice,
                "verdict": comparison.verdict,
                "baseline": BASELINE if BASELINE in table else None,
                "compared_on": kind,
                "differences": differences(table, kind, self.task.metric),
                "held_out": evidence,
                "growth": self._growth_points(records) if self.growth else None,
                "failed": comparison.failed,
            }
            files.write_json(self.directory.path / RESULTS, value, self.directory.path)
            self.directory.note(status="done")
        return comparison

    # ---- before anything is read

    def _identity(self, run: Path, recipe: RecipeFacts) -> Identity:
        settings = {}
        for name, one in self.chosen.items():
            preset = preset_for(name, self.preset)
            settings[name] = {**as_json(one), **({} if preset is None else {"preset": preset})}
        return Identity(
            kind=recipe.kind,
            title=recipe.title or run.absolute().name,
            metric=self.task.metric.name,
            percent=self.task.metric.percent,
            seed=next((one.seed for one in self.chosen.values()), 0),
            settings=settings,
            layout={**self.layout, "statistics": self.task.statistics},
            fit_digest=fingerprint(self.task.fit),
            report_digest=self.task.report_fingerprint(),
            recipe=recipe,
        )

    def _space(self) -> int:
        """Bytes, rather too many: the soup, and for every method its weights, scores and history."""
        models, tensors, samples = len(self.pool), len(self.pool.specs), len(self.task.fit)
        cooked = len(self.chosen)
        if self.growth:
            cooked += len(self._grown(self.chosen)) * (len(sizes(models)) - 1)
        record = models * tensors * _WEIGHT + samples * _SAMPLE
        steps = sum(self._steps(name, one) for name, one in self.chosen.items())
        return self.pool.nbytes + cooked * record + models * samples * 8 + (1 + self.growth) * steps * _STEP

    def _blocks(self, name: str, settings: Settings) -> int:
        """How many blocks a method learns; 0 for those that do not."""
        if not METHODS[name].learned:
            return 0
        K, size = len(self.pool), block_size_for(settings, len(self.pool))
        return len(schedule(K, size, passes=settings.passes, blocks=settings.blocks, seed=settings.seed))

    def _steps(self, name: str, settings: Settings) -> int:
        """How many optimiser steps a method takes in all."""
        samples = len(self.task.fit)
        inside = samples if settings.folds == 1 else samples - samples // settings.folds
        return settings.folds * self._blocks(name, settings) * steps_for(settings, inside)

    def _outlook(self) -> dict[str, dict[str, int]]:
        """For progress: how many steps, blocks and folds each method has."""
        return {
            "methods": {name: self._steps(name, one) for name, one in self.chosen.items()},
            "blocks": {name: self._blocks(name, one) for name, one in self.chosen.items()},
            "folds": {name: one.folds for name, one in self.chosen.items()},
        }

    # ---- deciding

    def _tell(self, event: Event) -> None:
        if self.directory is not None:
            self.directory.journal(event)
        self.listen(event)
        if event.kind in _LOOK:
            self.pool.verify_unchanged()

    def _describe_pool(self, problem: Problem) -> None:
        """pool.json of a new run; for a continued one, proof that the ingredients are the same."""
        if self.directory is None:
            return
        root = self.directory.path
        if not self.directory.same_pool(self.pool.names, problem.facts.digests):
            files.write_json(root / POOL, describe_pool(self.pool, problem.facts), root)
        known = read_ingredient_scores(root, self.task.metric, len(self.pool))
        if known is not None:
            problem.known, problem.known_seconds = known

    def _decide_all(
        self, problem: Problem
    ) -> tuple[dict[Place, Result], dict[Place, MethodRecord], dict[str, StockpotError], list[str]]:
        results: dict[Place, Result] = {}
        records: dict[Place, MethodRecord] = {}
        failed: dict[str, StockpotError] = {}
        reused: list[str] = []
        K = len(self.pool)
        for name, settings in self.chosen.items():
            try:
                folder = Path() if self.directory is None else self.directory.method(name)
                results[name, K], records[name, K], earlier = self._decide(problem, name, settings, folder)
                if earlier:
                    reused.append(name)
                    self._tell(Event("reused", {"method": name}))
            except (WriteError, ChangedError, LinkError):
                raise  # not the method's fault, and nothing after it could go better
            except StockpotError as error:
                self.pool.verify_unchanged()
                failed[name] = error
                self._tell(Event("failed", {"method": name, "error": str(error)}))
        return results, records, failed, reused

    def _decide(
        self, problem: Problem, name: str, settings: Settings, folder: Path
    ) -> tuple[Result, MethodRecord, bool]:
        """A method's decisions, on disk where there is a directory, and whether an earlier process made them."""
        preset = preset_for(name, self.preset)
        if self.directory is None:
            result = decided(problem, name, settings, preset)
            return result, record_of(result), False
        root = self.directory.path
        store = DiskStore(folder, root)
        record = read_method(folder, root, name)
        if record is not None:
            store.clear()  # a kill may have come between the record and this
            return result_of(record, root, problem.pool, settings, self.task.metric), record, True
        result = decided(problem, name, settings, preset, store)
        seconds, host, device = store.earlier
        result = replace(
            result,
            seconds=result.seconds + seconds,
            peak_host=max(result.peak_host, host),
            peak_device=max(result.peak_device, device),
        )
        if problem.known is not None and problem.pool is self.pool:
            # Before the record: a method that has one does not score the ingredients again.
            write_ingredient_scores(root, problem.known, problem.known_seconds)
        record = record_of(result, folder)
        write_method(root, record, result.soup, self.max_shard)
        store.clear()
        return result, record, False

    def _grow(
        self, problem: Problem, results: dict[Place, Result], records: dict[Place, MethodRecord]
    ) -> None:
        """Decisions on the first n ingredients; those on the whole pool are already there."""
        if not self.growth or self.directory is None:
            return
        K = len(self.pool)
        for n in sizes(K)[:-1]:
            try:
                smaller = Problem(self.pool.subset(range(n)), self.task, listen=self._tell, **self.layout)
                if problem.known is not None:
                    smaller.known, smaller.known_seconds = problem.known[:n], problem.known_seconds * n / K
                for name in self._grown(name for name, _ in results):
                    self._tell(Event("growth", {"method": name, "models": n}))
                    settings = self.chosen[name]
                    if isinstance(settings.block_size, int):
                        settings = replace(settings, block_size=min(settings.block_size, n))
                    folder = self.directory.growth(name, n)
                    results[name, n], records[name, n], _ = self._decide(smaller, name, settings, folder)
            except (WriteError, ChangedError, LinkError):
                raise
            except StockpotError as error:  # the donor may not be among the first few
                self._tell(Event("failed", {"method": f"growth with {n} models", "error": str(error)}))

    @staticmethod
    def _grown(names: Iterable[str]) -> list[str]:
        given = set(names)
        return [name for name in GROWN if name in given]

    # ---- reporting

    def _report(
        self, problem: Problem, results: dict[Place, Result], records: dict[Place, MethodRecord]
    ) -> None:
        """Score what is not scored yet. All is decided by now, and the task makes no other decision after this."""
        waiting = {place: result for place, result in results.items() if result.report is None}
        if not self.task.has_report or not waiting:
            return
        for place, result in report_on(problem, waiting):
            assert result.report is not None
            results[place] = result
            records[place] = with_report(records[place], result.report)
            if self.directory is not None:
                write_report_scores(self.directory.path, records[place])

    def _save(self, record: MethodRecord, result: Result) -> Path | None:
        if result.soup is None or self.directory is None:
            return None
        path = files.check_inside(self.directory.path, record.folder / SOUP)
        if not path.exists():
            result.soup.save(path, max_shard=self.max_shard, listen=self._tell, root=self.directory.path)
        return path

    def _growth_points(self, records: Mapping[Place, MethodRecord]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for name, n in sorted(records, key=lambda place: place[1]):
            if name in GROWN:
                report = records[name, n].result["report"]
                found.setdefault(name, []).append({"models": n, "report": report})
        return found


def sizes(models: int) -> list[int]:
    """At most four: the whole pool, its first half, quarter and eighth, as long as there are two to mix."""
    out = [models]
    while out[0] // 2 >= 2 and len(out) < 4:
        out.insert(0, out[0] // 2)
    return out


def _check_fits(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> None:
    """Before anything is read: a pool, block sizes that it can have, folds that the data can be cut into."""
    if not isinstance(pool, Pool):
        raise MethodError(
            describe(
                "pool",
                expected="a Pool",
                found=f"{type(pool).__name__} {str(pool)[:60]!r}",
                fix="open the checkpoints first: Pool.open(folder)",
            )
        )
    for name, settings in chosen.items():
        if METHODS[name].learned:
            block_size_for(settings, len(pool))
            if settings.folds > 1:
                task.fit.folds(settings.folds, settings.seed)

"""The one way in: from a pool and a task to a soup by one method, or to a comparison of several.

With `run=` everything is recorded in a directory, and the same call goes on where an earlier one was stopped. All
methods decide before the report data is touched, also over interruptions: what a method decided is on disk, and the
report data is scored only when nothing is left to decide.

Under torchrun or srun every rank makes the same calls. The first one claims the directory, hashes and writes; the
others read it, and are told the rest (`ranks.py`).
"""

from __future__ import annotations

import html
import webbrowser
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stockpot import files, ranks, table, words
from stockpot._version import __version__
from stockpot.adapters.trackers import Track, check_tracker, tracking
from stockpot.engine.resources import threads_for
from stockpot.errors import ChangedError, EnsembleError, LinkError, MethodError, RunError, StockpotError, WriteError
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.pool.facts import strangers_of
from stockpot.progress import shown
from stockpot.run import record
from stockpot.run.directory import RecipeFacts, RunDirectory, environment
from stockpot.run.shapes import flat
from stockpot.run.state import DiskStore
from stockpot.run.verdict import BASELINE, advised, compared_on, differences, held_out, recommended, verdict
from stockpot.soup import record as soup_record
from stockpot.soup.adapter import Form
from stockpot.soup.build import MAX_SHARD
from stockpot.soups.arrangement import described, shard_if_asked
from stockpot.soups.mehl import schedule
from stockpot.soups.problem import Problem
from stockpot.soups.registry import DEFAULT, METHODS, preset_for, repetitions, settings_for, settings_in_comparison
from stockpot.soups.result import Result, decided, report_on
from stockpot.soups.settings import Settings, as_json, block_size_for, steps_for
from stockpot.task import Task
from stockpot.task.data import fingerprint

# Events at which the ingredients' files are looked at again: a block is loaded, a method begins or ends.
_LOOK = ("method", "block", "built", "cooked", "report")
# Not the method's fault, and nothing after it could go better.
_FATAL = (WriteError, ChangedError, LinkError, RunError)
# What a run writes, in bytes, so that a full disk is found before the work: one mixing weight as float64 and in decimal
# digits, one step in events.jsonl and in the saved state while that is replaced, one sample's scores.
_WEIGHT, _STEP, _SAMPLE = 40, 400, 32


class Comparison(dict[str, Result]):
    """Results by method, and which of them to take. Shown, it is a table with the verdict under it."""

    recommended: str | None = None  # the soup with the highest score on held-out data, if there is one
    verdict: str = ""
    failed: Mapping[str, str] = {}  # method -> why
    absent: Mapping[str, str] = {}  # method that was left out, or has no meaning for this task -> why
    reused: tuple[str, ...] = ()  # finished by an earlier call
    path: Path | None = None  # the run directory
    soup: Path | None = None  # the saved soup in it

    @property
    def best(self) -> Result | None:
        """The result of the recommended method."""
        return None if self.recommended is None else self[self.recommended]

    def rows(self) -> list[table.Row]:
        kind = compared_on(self)
        known = differences(self, kind)
        return [
            result.row(
                kind, known.get(name), chosen=name == self.recommended, baseline=name == BASELINE,
                recommended=name == self.recommended and advised(self.verdict),
            )
            for name, result in self.items()
        ]  # fmt: skip

    def table(self) -> list[dict[str, Any]]:
        """Plain numbers, one dict per method and set of data: `pandas.DataFrame(comparison.table())`."""
        return table.as_numbers(self.rows())

    def report(self, show: bool = False) -> Path:
        """Write the report of the run and return the page's path; `show` opens it in a browser."""
        if self.path is None:
            fix = 'give the comparison a directory, compare(..., run="run"), or print it'
            raise RunError.of("report of a comparison", expected="a run directory", found="none", fix=fix)
        from stockpot.report import write_report

        page = write_report(self.path)
        if show:
            webbrowser.open(page.absolute().as_uri())
        return page

    def _more(self) -> list[str]:
        missing = [f"{name} failed: {why}" for name, why in self.failed.items()]
        return [*self.verdict.splitlines(), *(f"{name}: {why}" for name, why in self.absent.items()), *missing]

    def __repr__(self) -> str:
        return "\n".join([*table.as_text(self.rows()), "", *map(words.harmless, self._more())]) if self else "{}"

    def _repr_html_(self) -> str:
        more = "".join(f"<p>{html.escape(words.harmless(line))}</p>" for line in self._more())
        return table.as_html(self.rows()) + more if self else "{}"


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
    form: Form = "auto",
    progress: bool | None = None,
    track: Track | None = None,
    listen: Listener = ignore,
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Result:
    """Find mixing weights by one method and score the soup; the report data is touched once, at the end.

    `settings` are fields of `Settings`. `preset="authors"` learns as the paper's released code does. `include`,
    `exclude` and `donor` are those of `Layout.of`, `form` that of `Soup.save`. Afterwards `task.model` holds the soup's
    weights. `run` is a directory for records, soup and whatever is needed to go on after an interruption; `overwrite`
    replaces an earlier run there. More than two seconds of work show a bar in a terminal or a notebook;
    `progress=True` shows it anywhere, `progress=False` nowhere. `track` is tensorboard, mlflow or wandb.
    """
    chosen = settings_for(method, preset, **settings)
    _check_fits({method: chosen}, pool, task)
    ranks.join()
    if run is None and track is None and not ranks.active():
        choices: dict[str, Any] = {"include": include, "exclude": exclude, "donor": donor, "form": form}
        with shown(progress, listen) as tell, _threads(pool, task):
            problem = Problem(pool, task, listen=_watching(pool, tell), **choices)
            _name_strangers(pool, tell)
            tell(Event("start", _outlook({method: chosen}, pool, task)))
            result = decided(problem, method, chosen, preset_for(method, preset))
            return dict(report_on(problem, {method: result}))[method] if task.has_report else result
    every = {method: chosen}
    if run is not None and METHODS[method].scores_ingredients:
        # The best ingredient can be shown beside it for nothing.
        every = {BASELINE: settings_for(BASELINE, seed=chosen.seed), **every}
    layout = _layout(include, exclude, donor)
    job = _Job(pool, task, every, preset, layout, listen, progress=progress, track=track, form=form, wanted=method)
    return job.cooked(run, overwrite, recipe or RecipeFacts(kind="cook"))[method]


def compare(
    pool: Pool,
    task: Task,
    methods: Iterable[str] | None = None,
    *,
    run: str | Path | None = None,
    overwrite: bool = False,
    preset: str | None = None,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    donor: int | str = 0,
    form: Form = "auto",
    progress: bool | None = None,
    track: Track | None = None,
    listen: Listener = ignore,
    recipe: RecipeFacts | None = None,
    **settings: Any,
) -> Comparison:
    """Every method on the same pool and data; all decisions are made before the report data is touched.

    `each={"mehl+": {"steps": 500}}` are settings of one method; the others reach every method they concern. Where no
    `methods` are named, one that would do the same as another is left out, such as `mehl` with all models in one block.
    A method that fails does not cost the others: it is in `failed`. `run`, `progress` and the rest are as for `cook`.
    """
    names = list(METHODS) if methods is None else list(methods)
    chosen = {name: settings_in_comparison(name, preset, settings, each or {}) for name in names}
    _check_fits(chosen, pool, task)
    layout = _layout(include, exclude, donor)
    absent = repetitions(chosen, preset, len(pool)) if methods is None else {}
    chosen = {name: one for name, one in chosen.items() if name not in absent}
    job = _Job(pool, task, chosen, preset, layout, listen, progress=progress, track=track, form=form, absent=absent)
    return job.cooked(run, overwrite, recipe or RecipeFacts(kind="compare"))


def _layout(include: Iterable[str] | None, exclude: Iterable[str] | None, donor: int | str) -> dict[str, Any]:
    """Choices of `Layout.of` as values that can be used twice and written down."""

    include, exclude = (x if x is None or isinstance(x, str) else list(x) for x in (include, exclude))
    return {"include": include, "exclude": exclude, "donor": donor}


@dataclass
class _Job:
    """What is cooked, of what. `directory` is None where nothing is recorded."""

    pool: Pool
    task: Task
    chosen: Mapping[str, Settings]  # by method, in the order of the table
    preset: str | None
    layout: Mapping[str, Any]
    listen: Listener
    progress: bool | None = None
    track: Track | None = None
    form: Form = "auto"
    wanted: str | None = None  # the method that was asked for by name
    absent: Mapping[str, str] = field(default_factory=dict)  # methods that were left out beforehand, and why
    path: Path | None = None  # of the run; None where nothing is recorded
    directory: RunDirectory | None = None  # the same on the rank that writes
    max_shard: int = MAX_SHARD
    results: dict[str, Result] = field(default_factory=dict)

    def cooked(self, run: str | Path | None, overwrite: bool, recipe: RecipeFacts) -> Comparison:
        """Do what is left to do, and leave a complete record."""
        ranks.join()
        with ranks.watched(), ExitStack() as stack:
            check_tracker(self.track, None if run is None else Path(run))
            self._meet(recipe)
            self.listen = stack.enter_context(shown(self.progress, self.listen))
            if run is not None:
                self.path, self.max_shard = Path(run), recipe.max_shard or MAX_SHARD
                ranks.on_first(lambda: self._begin(stack, overwrite, recipe))
            if ranks.first():
                title = recipe.title or ("stockpot" if self.path is None else self.path.absolute().name)
                named = {name: as_json(one) for name, one in self.chosen.items()}
                self.listen = stack.enter_context(tracking(self.track, self.path, title, named, self.listen))
            stack.enter_context(_threads(self.pool, self.task))
            self._scan()
            shard_if_asked(self.chosen, self.task)
            problem = Problem(self.pool, self.task, listen=self._tell, form=self.form, **self.layout)
            self._describe_pool(problem)
            learned = {name: one for name, one in self.chosen.items() if METHODS[name].learned}
            ranks.announce(self.listen, self.task.device, described(learned, self.task))
            self._tell(Event("start", _outlook(self.chosen, self.pool, self.task)))
            comparison = self._decide_all(problem)
            self._report(problem)
            return self._concluded(comparison, problem)

    # ---- before anything is read

    def _meet(self, recipe: RecipeFacts) -> None:
        """With several ranks: all of them must be about to do the same; the first one shows it."""
        if not ranks.active():
            return
        if not ranks.first():
            self.listen = ignore
        files_of = {f"ingredient {name}": digest for name, digest in self.pool.sampled().items()}
        versions = {"stockpot": __version__, "torch": torch.__version__}
        facts = self._facts(Path(), recipe)
        own = ("metric", "settings", "layout", "fit_digest", "report_digests")
        ranks.check_same({**versions, **files_of, **flat({name: facts[name] for name in own})})

    def _begin(self, stack: ExitStack, overwrite: bool, recipe: RecipeFacts) -> None:
        """Claim the directory. What is there stays until all that the run needs is known to be in order."""
        assert self.path is not None
        claimed = RunDirectory(self.path, self._facts(self.path, recipe), recipe, overwrite=overwrite)
        self.directory = stack.enter_context(claimed)
        files.require_space(self.path, self._space(), "the soup and its record")
        self.directory.begin(environment(str(self.task.device)))

    def _scan(self) -> None:
        """Hash the ingredients, for a record with distances; several ranks do that once."""
        if self.path is not None or ranks.active():
            found = ranks.on_first(lambda: self.pool.scanned(self._tell, measured=self.path is not None))
            if not ranks.first():
                self.pool.adopt(found)
        _name_strangers(self.pool, self._tell if self.path is not None or self.listen is not ignore else ignore)

    def _facts(self, run: Path, recipe: RecipeFacts) -> dict[str, Any]:
        """What makes this run what it is."""
        presets = {name: preset_for(name, self.preset) for name in self.chosen}
        form = {} if self.form == "auto" else {"form": self.form}
        metrics = self.task.report_metrics.items()
        own = {name: {"metric": one.name, "unit": one.unit} for name, one in metrics if one != self.task.metric}
        named = {name: {"preset": preset} for name, preset in presets.items() if preset is not None}
        return {
            "kind": recipe.kind,
            "title": recipe.title or run.absolute().name,
            "metric": self.task.metric.name,
            "unit": self.task.metric.unit,
            "seed": next((one.seed for one in self.chosen.values()), 0),
            "settings": {name: {**as_json(one), **named.get(name, {})} for name, one in self.chosen.items()},
            "layout": {**self.layout, "statistics": self.task.statistics, **form},
            "fit_digest": fingerprint(self.task.fit),
            "report_digests": self.task.report_fingerprints(),
            **({"report_metrics": own} if own else {}),
        }

    def _space(self) -> int:
        """Bytes, rather too many: the soup, and for every method its weights, scores and history."""
        models, tensors, samples = len(self.pool), len(self.pool.specs), len(self.task.fit)
        each = models * tensors * _WEIGHT + samples * _SAMPLE
        steps = sum(_outlook(self.chosen, self.pool, self.task)["methods"].values())
        return self.pool.nbytes + len(self.chosen) * each + models * samples * 8 + steps * _STEP

    # ---- deciding

    def _tell(self, event: Event) -> None:
        if self.directory is not None:
            self.directory.journal(event)
        _watching(self.pool, self.listen)(event)

    def _describe_pool(self, problem: Problem) -> None:
        """pool.json of a new run; for a continued one, proof that the ingredients are the same."""
        if self.path is None:
            return

        def describe() -> None:
            assert self.directory is not None
            if not self.directory.same_pool(self.pool.names, problem.facts.digests):
                self.directory.write(record.POOL, record.describe_pool(self.pool, problem.facts))

        ranks.on_first(describe)
        known = record.read_ingredient_scores(self.path, self.task.metric, len(self.pool))
        self._all_see("the ingredients' scores", known is not None)
        if known is not None:
            problem.known, problem.known_seconds = known

    def _decide_all(self, problem: Problem) -> Comparison:
        """What all methods decided. One that fails must not cost the others."""
        reused, failed, absent, comparison = [], {}, dict(self.absent), Comparison()
        for name, settings in self.chosen.items():
            try:
                if self._decide(problem, name, settings):
                    reused.append(name)
                    self._tell(Event("reused", {"method": name}))
            except _FATAL:
                raise
            except EnsembleError as error:
                if len(self.chosen) == 1 or name == self.wanted:
                    raise
                absent[name] = error.reason
            except StockpotError as error:
                self.pool.verify_unchanged()
                if not ranks.all_here():
                    raise  # it failed on some ranks only: the others are somewhere else by now
                failed[name] = error
                self._tell(Event("failed", {"method": name, "error": str(error)}))
        if not self.results or self.wanted in failed:
            raise next(iter(failed.values())) if self.wanted is None else failed[self.wanted]
        comparison.reused = tuple(reused)
        comparison.failed = {name: str(error) for name, error in failed.items()}
        comparison.absent = absent
        return comparison

    def _decide(self, problem: Problem, name: str, settings: Settings) -> bool:
        """A method's decisions, on disk where there is a directory; whether an earlier process made them."""
        preset = preset_for(name, self.preset)
        if self.path is None:
            self.results[name] = decided(problem, name, settings, preset)
            return False
        root, folder = self.path, self.path / record.METHODS / record.slug(name)
        store = DiskStore(folder, root)
        earlier = record.read_result(root, folder, name, problem.pool, settings, self.task)
        self._all_see(f"what {name} decided", earlier is not None)
        if earlier is not None:
            self.results[name] = earlier
            store.clear()  # a kill may have come between the record and this
            return True
        try:
            result = decided(problem, name, settings, preset, store)
        except KeyboardInterrupt as error:
            self._keep(folder, error)
            raise
        seconds, host, device = store.earlier
        host, device = max(host, result.peak_host), max(device, result.peak_device)
        result = replace(result, seconds=result.seconds + seconds, peak_host=host, peak_device=device)
        if self.directory is not None:
            if problem.known is not None:
                # Before the record: a method that has one does not score the ingredients again.
                record.write_ingredient_scores(root, problem.known, problem.known_seconds)
            record.write_method(root, folder, result, self.max_shard)
            store.clear()
        self.results[name] = result
        return False

    def _keep(self, folder: Path, error: KeyboardInterrupt) -> None:
        """The record of the best soup so far, from which it can be built without going on."""
        best = getattr(error, "best", None)
        if best is not None and self.directory is not None:
            files.make_directory(folder, self.directory.path)
            soup_record.write(folder, best, self.max_shard, root=self.directory.path)
            error.kept = folder  # type: ignore[attr-defined]

    def _all_see(self, what: str, there: bool) -> None:
        """All ranks go on from the same record, or none does."""
        if len(set(ranks.gathered(there))) > 1:
            raise RunError.of(
                f"run directory {self.path}",
                expected=f"one folder that all ranks see, with {what}",
                found="some ranks that see it and some that do not",
                fix="put it on a file system that all hosts share",
            )

    # ---- reporting

    def _report(self, problem: Problem) -> None:
        """Score what is not scored yet. All is decided by now, and the task makes no other decision after this."""
        sets = self.task.report_names
        waiting = {name: result for name, result in self.results.items() if list(result.reports) != sets}
        if not sets or not waiting:
            return
        for name, result in report_on(problem, waiting):
            self.results[name] = result
            if self.directory is not None:
                record.write_report_scores(self.directory.path, self.directory.method(name), result.reports)

    def _concluded(self, comparison: Comparison, problem: Problem) -> Comparison:
        """Which soup to take; written and saved where there is a directory."""
        comparison.update(self.results)
        evidence, kind = held_out(comparison), compared_on(comparison)
        choice = self.wanted if self.wanted is not None else recommended(evidence, comparison)
        comparison.recommended, comparison.verdict = choice, verdict(comparison, choice, self.pool.names)
        if self.path is not None:
            comparison.path = self.path
            if choice is not None and comparison[choice].soup is not None:
                comparison.soup = self.path / record.METHODS / record.slug(choice) / record.SOUP
            results = {
                "methods": list(comparison),
                "recommended": choice,
                "verdict": comparison.verdict,
                "baseline": BASELINE if BASELINE in comparison else None,
                "compared_on": kind,
                "differences": differences(comparison, kind),
                "held_out": evidence,
                "failed": comparison.failed,
                "absent": comparison.absent,
            }
            ranks.on_first(lambda: self._finish(comparison, results))
        # What the guard of one method found out about others, it found out on held-out data.
        for name, scores in problem.held_out.items():
            if name in comparison and comparison[name].held_out is None:
                comparison[name] = replace(comparison[name], held_out=scores)
        return comparison

    def _finish(self, comparison: Comparison, results: Mapping[str, Any]) -> None:
        assert self.directory is not None
        if comparison.recommended is not None and comparison.soup is not None:
            files.check_inside(self.directory.path, comparison.soup)
            soup = comparison[comparison.recommended].soup
            if soup is not None and not comparison.soup.exists():
                root = self.directory.path
                soup.save(comparison.soup, max_shard=self.max_shard, listen=self._tell, root=root)
        self.directory.write(record.RESULTS, results)
        self.directory.note(status="done")


def _outlook(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> dict[str, dict[str, int]]:
    """How many steps, blocks and folds each method has in all, for progress; 0 for those that do not learn."""
    K, samples = len(pool), len(task.fit)
    steps, blocks = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    for name, one in chosen.items():
        if METHODS[name].learned:
            size, inside = block_size_for(one, K), samples - (samples // one.folds if one.folds > 1 else 0)
            blocks[name] = len(schedule(K, size, passes=one.passes, blocks=one.blocks, seed=one.seed))
            steps[name] = one.folds * blocks[name] * steps_for(one, inside)
    return {"methods": steps, "blocks": blocks, "folds": {name: one.folds for name, one in chosen.items()}}


def _watching(pool: Pool, listen: Listener) -> Listener:
    """The listener, and a look at the ingredients' files whenever something begins or ends."""

    def tell(event: Event) -> None:
        listen(event)
        if event.kind in _LOOK:
            pool.verify_unchanged()

    return tell


def _name_strangers(pool: Pool, listen: Listener) -> None:
    """Say which ingredients cannot be fine-tunes of the model that the others are; nothing where nobody listens."""
    if listen is ignore:
        return
    known = pool.measured
    strangers = strangers_of(pool.checkpoints, pool.specs) if known is None else known.strangers()
    if strangers:
        listen(Event("strangers", {"names": [pool.names[k] for k in strangers]}))


def _threads(pool: Pool, task: Task) -> AbstractContextManager[None]:
    return threads_for(sum(spec.numel for spec in pool.specs.values()), task.device)


def _check_fits(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> None:
    """Before anything is read: a pool, block sizes that it can have, folds that the data can be cut into."""
    if not isinstance(pool, Pool):
        raise MethodError.of(
            "pool",
            expected="a Pool",
            found=f"{type(pool).__name__} {str(pool)[:60]!r}",
            fix="open the checkpoints first: Pool.open(folder)",
        )
    for name, settings in chosen.items():
        if METHODS[name].learned:
            block_size_for(settings, len(pool))
            if settings.folds > 1:
                task.fit.folds(settings.folds, settings.seed)

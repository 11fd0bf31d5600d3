"""What `cook` and `compare` do: every method decides, then the report data is scored, then one soup is recommended.

With a directory everything is recorded there, and the same call goes on where an earlier one was stopped. All methods
decide before the report data is touched, also over interruptions: what a method decided is on disk, and the report
data is scored only when nothing is left to decide.

Under torchrun or srun every rank makes the same calls. The first one claims the directory, hashes and writes; the
others read it, and are told the rest (`ranks.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from stockpot import files, ranks
from stockpot._version import __version__
from stockpot.adapters.trackers import Track, check_tracker, tracking
from stockpot.errors import ChangedError, EnsembleError, LinkError, RunError, StockpotError, WriteError
from stockpot.events import Event, Listener, ignore
from stockpot.pool import Pool
from stockpot.pool.facts import strangers_of
from stockpot.progress import shown
from stockpot.run import record
from stockpot.run.directory import RecipeFacts, RunDirectory, environment
from stockpot.run.shapes import flat
from stockpot.run.state import DiskStore
from stockpot.run.verdict import BASELINE, compared_on, differences, held_out, recommended, verdict
from stockpot.soup.adapter import Form
from stockpot.soup.contents import MAX_SHARD
from stockpot.soups.arrangement import described, shard_if_asked
from stockpot.soups.mehl import schedule
from stockpot.soups.problem import Problem
from stockpot.soups.registry import METHODS, preset_for
from stockpot.soups.result import Result, decided, report_on
from stockpot.soups.settings import Settings, as_json, block_size_for, steps_for
from stockpot.task import Task
from stockpot.task.data import fingerprint

SMALL = 300_000  # parameters; below, an operation is over before a second thread has woken up
# Events at which the ingredients' files are looked at again: a block is loaded, a method begins or ends.
_LOOK = ("method", "block", "built", "cooked", "report")
# Not the method's fault, and nothing after it could go better.
_FATAL = (WriteError, ChangedError, LinkError, RunError)
# What a run writes, in bytes, so that a full disk is found before the work: one mixing weight as float64 and in decimal
# digits, one step in events.jsonl and in the saved state while that is replaced, one sample's scores.
_WEIGHT, _STEP, _SAMPLE = 40, 400, 32


@dataclass
class Job:
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
    absent: dict[str, str] = field(default_factory=dict)  # methods that were left out beforehand, and why
    path: Path | None = None  # of the run; None where nothing is recorded
    directory: RunDirectory | None = None  # the same on the rank that writes
    max_shard: int = MAX_SHARD
    results: dict[str, Result] = field(default_factory=dict)

    def cooked(self, run: str | Path | None, overwrite: bool, recipe: RecipeFacts) -> dict[str, Any]:
        """Do what is left to do, and leave a complete record. `results` holds what came of it; returned is what is said
        of all of them together."""
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
            stack.enter_context(threads_for(self.pool, self.task))
            self._scan()
            shard_if_asked(self.chosen, self.task)
            problem = Problem(self.pool, self.task, listen=self._tell, form=self.form, **self.layout)
            self._describe_pool(problem)
            learned = {name: one for name, one in self.chosen.items() if METHODS[name].learned}
            ranks.announce(self.listen, self.task.device, described(learned, self.task))
            self._tell(Event("start", outlook(self.chosen, self.pool, self.task)))
            reused, failed = self._decide_all(problem)
            self._report(problem)
            found = self._concluded(problem, {"failed": failed, "absent": self.absent})
            return {**found, "reused": reused}

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
        name_strangers(self.pool, self._tell if self.path is not None or self.listen is not ignore else ignore)

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
        steps = sum(outlook(self.chosen, self.pool, self.task)["methods"].values())
        return self.pool.nbytes + len(self.chosen) * each + models * samples * 8 + steps * _STEP

    # ---- deciding

    def _tell(self, event: Event) -> None:
        if self.directory is not None:
            self.directory.journal(event)
        watching(self.pool, self.listen)(event)

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

    def _decide_all(self, problem: Problem) -> tuple[tuple[str, ...], dict[str, str]]:
        """What all methods decided. One that fails must not cost the others. Returns those that an earlier process has
        finished, and why others failed."""
        reused: list[str] = []
        failed: dict[str, StockpotError] = {}
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
                self.absent[name] = error.reason
            except StockpotError as error:
                self.pool.verify_unchanged()
                if not ranks.all_here():
                    raise  # it failed on some ranks only: the others are somewhere else by now
                failed[name] = error
                self._tell(Event("failed", {"method": name, "error": str(error)}))
        if not self.results or self.wanted in failed:
            raise next(iter(failed.values())) if self.wanted is None else failed[self.wanted]
        return tuple(reused), {name: str(error) for name, error in failed.items()}

    def _decide(self, problem: Problem, name: str, settings: Settings) -> bool:
        """A method's decisions, on disk where there is a directory; whether an earlier process made them."""
        preset = preset_for(name, self.preset)
        if self.path is None:
            self.results[name] = decided(problem, name, settings, preset)
            return False
        root, folder = self.path, self.path / record.METHODS / record.slug(name)
        store = DiskStore(folder, root, self.max_shard)
        earlier = record.read_result(root, folder, name, problem.pool, settings, self.task)
        self._all_see(f"what {name} decided", earlier is not None)
        if earlier is not None:
            self.results[name] = earlier
            store.clear()  # a kill may have come between the record and this
            return True
        problem.keep = store.keep
        try:
            result = decided(problem, name, settings, preset, store)
        except KeyboardInterrupt as error:
            if (best := getattr(error, "best", None)) is not None:
                error.kept = store.keep(best)  # type: ignore[attr-defined]
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

    def _concluded(self, problem: Problem, missing: Mapping[str, Any]) -> dict[str, Any]:
        """Which soup to take; written and saved where there is a directory."""
        results, soup = self.results, None
        evidence, kind = held_out(results), compared_on(results)
        choice = self.wanted if self.wanted is not None else recommended(evidence, results)
        found = {"recommended": choice, "verdict": verdict(results, choice, self.pool.names), **missing}
        if self.path is not None:
            if choice is not None and results[choice].soup is not None:
                soup = self.path / record.METHODS / record.slug(choice) / record.SOUP
            written = {
                **found,
                "methods": list(results),
                "baseline": BASELINE if BASELINE in results else None,
                "compared_on": kind,
                "differences": differences(results, kind),
                "held_out": evidence,
            }
            ranks.on_first(lambda: self._finish(soup, choice, written))
        # What the guard of one method found out about others, it found out on held-out data.
        for name, scores in problem.held_out.items():
            if name in results and results[name].held_out is None:
                results[name] = replace(results[name], held_out=scores)
        return {**found, "path": self.path, "soup": soup}

    def _finish(self, place: Path | None, choice: str | None, results: Mapping[str, Any]) -> None:
        assert self.directory is not None
        root = self.directory.path
        if place is not None and choice is not None:
            files.check_inside(root, place)
            soup = self.results[choice].soup
            if soup is not None and not place.exists():
                soup.save(place, max_shard=self.max_shard, listen=self._tell, root=root)
        self.directory.write(record.RESULTS, results)
        self.directory.note(status="done")


def outlook(chosen: Mapping[str, Settings], pool: Pool, task: Task) -> dict[str, dict[str, int]]:
    """How many steps, blocks and folds each method has in all, for progress; 0 for those that do not learn."""
    K, samples = len(pool), len(task.fit)
    steps, blocks = dict.fromkeys(chosen, 0), dict.fromkeys(chosen, 0)
    for name, one in chosen.items():
        if METHODS[name].learned:
            size, inside = block_size_for(one, K), samples - (samples // one.folds if one.folds > 1 else 0)
            blocks[name] = len(schedule(K, size, passes=one.passes, blocks=one.blocks, seed=one.seed))
            steps[name] = one.folds * blocks[name] * steps_for(one, *[inside] * one.folds, blocks=blocks[name])
    return {"methods": steps, "blocks": blocks, "folds": {name: one.folds for name, one in chosen.items()}}


def watching(pool: Pool, listen: Listener) -> Listener:
    """The listener, and a look at the ingredients' files whenever something begins or ends."""

    def tell(event: Event) -> None:
        listen(event)
        if event.kind in _LOOK:
            pool.verify_unchanged()

    return tell


def name_strangers(pool: Pool, listen: Listener) -> None:
    """Say which ingredients cannot be fine-tunes of the model that the others are; nothing where nobody listens."""
    if listen is ignore:
        return
    if strangers := strangers_of(pool.checkpoints, pool.specs):
        listen(Event("strangers", {"names": [pool.names[k] for k in strangers]}))


@contextmanager
def threads_for(pool: Pool, task: Task) -> Iterator[None]:
    """One thread for a small model: on a busy machine the threads of tiny operations mostly wait for each other.

    The rule is fixed, so that the numbers do not depend on what else the machine does.
    """
    before = torch.get_num_threads()
    if task.device.type == "cpu" and sum(spec.numel for spec in pool.specs.values()) < SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

"""From what a method decided to what a caller gets: the soup, its scores, what it cost.

The report data is opened here and nowhere else: finished decisions go in, their scores come out. A decision is known by
what it was asked for: the method, its settings, the ingredients and the groups. Learning is deterministic, so the same
question asked again (a run that is continued) is the same decision, and allowed; any other question is refused by the
task from the first look on.
"""

from __future__ import annotations

import hashlib
import html
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from stockpot import ranks, table, words
from stockpot.errors import LearningError, SoupError
from stockpot.events import Event, Listener, ignore
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.pool.source import listed
from stockpot.soup import Soup
from stockpot.soup.adapter import described
from stockpot.soup.card import add_results
from stockpot.soups.problem import Problem, StateStore
from stockpot.soups.registry import decides, method_named
from stockpot.soups.settings import Settings, as_json
from stockpot.task import Data, Scores, Task
from stockpot.task.checks import REPORT
from stockpot.task.metric import Benchmark
from stockpot.task.scores import worded
from stockpot.task.task import open_report

_STATUS = Path("/proc/self/status")
Key = TypeVar("Key")
Changes = Mapping[str, Sequence[float | None]]  # by set of data: difference, low, high


@dataclass(frozen=True, eq=False)
class Result:
    """A cooked soup, how it scores, what it cost, and every decision on the way."""

    method: str
    settings: Settings
    soup: Soup | None  # None for the ensemble, which is no soup
    fit: Scores | None  # on the data the soup was made with
    # Each sample scored by coefficients that were not fitted on it (folds). A little too good: when to stop was chosen
    # on the same samples.
    held_out: Scores | None = None
    reports: Mapping[str, Scores] = field(default_factory=dict)  # on every set of report data, all touched once
    history: tuple[Mapping[str, Any], ...] = ()  # decisions, steps and evaluations, in order
    models_used: int = 0
    seconds: float = 0.0
    peak_host: int = 0  # bytes, without file-backed pages
    peak_device: int = 0  # bytes
    notes: tuple[str, ...] = ()

    @property
    def report(self) -> Scores | None:
        """On the first set of report data, the one that counts."""
        return next(iter(self.reports.values()), None)

    @property
    def score(self) -> Scores:
        """The most honest score there is: report data, else held-out, else the fitting data."""
        best = self.report or self.held_out or self.fit
        assert best is not None
        return best

    def row(self, kind: str | None = None, changes: Changes | None = None, **what: bool) -> table.Row:
        """The method's row in a table: its scores on one kind of data, and what `changes` from the best model."""
        kind = kind or next(one for one in table.DATA if getattr(self, one) is not None)
        sets = self.reports if kind == "report" else {kind: getattr(self, kind)}
        cells = {
            name: table.Cell(scores.metric.shown, _score(scores), _known(changes, name))
            for name, scores in sets.items()
        }
        known = {"chosen": False, "recommended": False, "baseline": False, **what}
        return table.Row(
            self.method, kind, cells, self.seconds, self.peak_host, self.peak_device, self.models_used,
            **known, servable=self.soup is not None,
        )  # fmt: skip

    def table(self) -> list[dict[str, Any]]:
        """Plain numbers, one dict per set of data."""
        return table.as_numbers([self.row()])

    def save(self, path: str | Path, **options: Any) -> Path:
        """Write the soup as `Soup.save` does (`form`, `dtype`, `max_shard`, `overwrite`), its scores in its card."""
        if self.soup is None:
            fix = "save another method's result, such as comparison.best; an ensemble needs all of its models"
            raise SoupError.of(f"result of {self.method}", "a soup", "the ensemble, which is no single model", fix)
        place = self.soup.save(path, **options)
        add_results(place, "\n".join(table.as_markdown([self.row()])), options.get("root"))
        return place

    def __repr__(self) -> str:
        return "\n".join([*table.as_text([self.row()]), *self.notes])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(words.harmless(note))}</p>" for note in self.notes)
        return table.as_html([self.row()]) + notes

    def __str__(self) -> str:
        where = "report" if self.report else "held-out" if self.held_out else "fitting"
        models = f"{self.models_used} model{'s' if self.models_used != 1 else ''}"
        line = f"{self.method}: {worded(self.score)} on {where} data, {models}, {self.seconds:.1f} s"
        more = [f"  on {name}: {worded(scores)}" for name, scores in list(self.reports.items())[1:]]
        return "\n".join([line, *more, *(f"  {note}" for note in self.notes)])


def _known(changes: Changes | None, name: str) -> tuple[float, float, float] | None:
    found = [end for end in (changes or {}).get(name, ()) if end is not None]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def _score(scores: Scores) -> table.Score | None:
    value, (low, high) = scores.value, scores.interval()
    low, high = (end if math.isfinite(end) else value for end in (low, high))
    return table.Score(value, low, high, scores.n) if math.isfinite(value) else None


def decided(
    problem: Problem, name: str, settings: Settings, preset: str | None = None, store: StateStore | None = None
) -> Result:
    """One method up to, and without, the report data; refused once that has been looked at."""
    method, how = method_named(name), about(name, settings, preset)
    granularity = method.granularity(settings)
    layout = None if granularity is None else problem.layout(granularity)
    problem.task.check_may_decide(decision(how, problem.facts.digests, layout))
    problem.listen(Event("method", {"method": name}))
    known_before, began = problem.known_seconds, time.perf_counter()
    problem.deadline = time.monotonic() + settings.seconds
    # Ranks must see the same numbers, and what one device has free is not what another has.
    fast = settings.memory is None and not ranks.active() and not problem.task.sharded
    with PeakMemory(problem.task.device) as peak, problem.task.evaluator.fast(fast):
        if store is not None:
            store.peaks = peak.so_far
        try:
            found = decides(method, preset)(problem, method, settings, store)
        except (LearningError, KeyboardInterrupt) as error:
            best = getattr(error, "best", None)
            if isinstance(best, torch.Tensor) and layout is not None:
                why = str(error) or "interrupted"
                error.best = Soup(problem.pool, layout, best, about={**how, "stopped": why})  # type: ignore[union-attr]
            raise
        soup, scores = None, found.scores
        if found.W is not None and found.layout is not None:
            how |= {} if found.beta is None else {"beta": found.beta}
            soup = problem.build(found.layout, found.W, how)
            scores = problem.task.score()
    seconds = time.perf_counter() - began
    if method.scores_ingredients:
        seconds += known_before  # scored for an earlier method, but this one needs it too
    used = len(problem.pool) if found.W is None else int((found.W != 0).any(dim=1).sum())
    notes = (*found.notes, *problem.notes, *_notes(problem.pool, problem.task, soup))
    problem.listen(Event("cooked", {"method": name, "seconds": seconds, "models_used": used}))
    return Result(
        name, settings, soup, scores, found.held_out,
        history=found.history, models_used=used, seconds=seconds,
        peak_host=peak.host, peak_device=peak.device, notes=notes,
    )  # fmt: skip


def about(method: str, settings: Settings, preset: str | None = None) -> dict[str, Any]:
    """What a soup's record says of how it was decided."""
    named = {} if preset is None else {"preset": preset}
    return {"method": method, **named, "settings": as_json(settings)}


def decision(how: Mapping[str, Any], digests: Iterable[str], layout: Layout | None) -> str:
    """The name of a decision; `how` is what `about` gives. The ensemble has no layout and no settings."""
    what = {"method": how["method"], "ingredients": list(digests)}
    if layout is not None:
        what |= {"preset": how.get("preset"), "settings": how["settings"], "layout": layout.to_json()}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


# The report data -----------------------------------------------------------------------------------------


def report_on(problem: Problem, results: Mapping[Key, Result]) -> Iterator[tuple[Key, Result]]:
    """The same results with their scores on all sets of report data, one after the other.

    All of them must be given at once: from the first look on, the task takes part in no other decision.
    """
    listen = problem.listen
    problem.last_block.clear()  # nothing is learned any more
    sets = open_report(problem.task, [_decision_of(problem, result) for result in results.values()])
    samples = {name: len(data) for name, data in sets.items()}
    listen(Event("unsealed", {"decisions": len(results), "samples": samples}))
    for key, result in results.items():
        with problem.task.evaluator.fast(
            result.soup is None and not ranks.active() and not problem.task.sharded
        ):  # all models are scored for the ensemble
            reports = _report_scores(problem, result, sets)
        for name, scores in reports.items():
            listen(Event("report", {"method": result.method, "set": name, "value": scores.value, "n": scores.n}))
        yield key, replace(result, reports=reports)


def report_weights(task: Task, listen: Listener = ignore) -> dict[str, Scores]:
    """The weights that are in the model now, decided elsewhere: those of a file. On every set of report data."""
    sets = open_report(task, [weights_digest(task)])
    return {name: task.score_report(one, listen) for name, one in sets.items()}


def weights_digest(task: Task) -> str:
    """SHA-256 of what is in the model now."""
    total = hashlib.sha256()
    for name, tensor in task.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            flat = ranks.local(tensor).detach().cpu().contiguous().reshape(-1)
            total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return " ".join(ranks.gathered(total.hexdigest())) if task.sharded else total.hexdigest()


def _report_scores(problem: Problem, result: Result, sets: Mapping[str, Data | Benchmark]) -> dict[str, Scores]:
    task, listen = problem.task, problem.listen
    if result.soup is None:
        every = {name: data for name, data in sets.items() if isinstance(data, Data)}  # with a benchmark it is absent
        return {name: task.ensemble_scores(problem.members(), data, listen=listen) for name, data in every.items()}
    problem.put(result.soup)
    return {name: task.score_report(one, listen) for name, one in sets.items()}


def _decision_of(problem: Problem, result: Result) -> str:
    if result.soup is None:
        return decision({"method": result.method}, problem.facts.digests, None)
    return decision(result.soup.about, result.soup.pool.digests(), result.soup.layout)


# What a reader of any result must know about the pool and the data ---------------------------------------


def _notes(pool: Pool, task: Task, soup: Soup | None) -> tuple[str, ...]:
    found = [] if soup is None or soup.factored is None else [described(soup.factored, soup.written_as)]
    if pool.dropped:
        found.append(f"left out, because their weights are not finite: {listed(pool.dropped)}")
    labels = task.fit.labels
    if labels is not None:
        labels = labels[labels >= 0]
        if len(labels) and bool((labels == labels[0]).all()):
            found.append(
                f"all {len(labels)} labels of the fitting data are {int(labels[0])}: whatever always says so is right"
            )
    for name in task.reports_on_fit:
        which = "" if name == REPORT else f" {name!r}"
        found.append(
            f"the report data{which} is the fitting data: its scores are too good to be true, and say nothing of new"
            " data"
        )
    return tuple(found)


# What it took ----------------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Resident memory that is not backed by a file; memory-mapped checkpoints do not count. 0 where unknown."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


class PeakMemory:
    """Sample while a block of work runs. `host` counts everything the process holds, not only what was added."""

    def __init__(self, device: torch.device, interval: float = 0.02) -> None:
        self.host = 0
        self.device = 0
        self._cuda = device if device.type == "cuda" else None
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.host = anonymous_bytes()
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self.host, self.device = self.so_far()

    def so_far(self) -> tuple[int, int]:
        """Bytes of host and device at most, until now."""
        device = 0 if self._cuda is None else torch.cuda.max_memory_allocated(self._cuda)
        return max(self.host, anonymous_bytes()), device

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            self.host = max(self.host, anonymous_bytes())

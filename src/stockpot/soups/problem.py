"""One pool and one task: checked against each other once, with what several methods need kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from stockpot import ranks
from stockpot.engine import Live
from stockpot.engine.factored import FactoredLive, check_no_codes, hold, release
from stockpot.engine.loader import LastBlock, reading_ahead
from stockpot.engine.memory import host_memory
from stockpot.engine.wide import Wide, wide_modules
from stockpot.errors import LearningError
from stockpot.events import Event, Listener, ignore, progress
from stockpot.layout import INTEGER, STATISTIC, Layout
from stockpot.names import left_out, quantised_weights
from stockpot.pool import Pool, PoolFacts
from stockpot.pool.source import listed
from stockpot.soup import Soup
from stockpot.soup.adapter import Form, resolve
from stockpot.soup.weights import chosen, kept_tensor, single
from stockpot.soups.mehl import schedule
from stockpot.soups.settings import Settings, block_size_for
from stockpot.task import Scores, Task
from stockpot.task.scores import odd

AFTERWARDS = 3  # times that scoring one model on all fitting data takes, kept of a budget for the end
HELD = 16  # soups that wait for the report take this part of memory at most


def finite(value: float) -> float | None:
    """What JSON can hold."""
    return value if math.isfinite(value) else None


class StateStore(Protocol):
    """Keeps the newest state of one unfinished method. A run directory has one; None where nothing is kept.

    A rank that learns apart from the others saves a `part` of its own; `load` gives all parts as one.
    """

    interval: float  # seconds between saves inside a block
    peaks: Callable[[], tuple[int, int]]  # bytes of host and device in this process so far; set by whoever measures

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any], part: int | None = None) -> None: ...


@dataclass(frozen=True)
class Decision:
    """What a method decided: mixing weights, and what there is to know about them."""

    W: Tensor | None  # (K, G); None for the ensemble, which is no soup
    layout: Layout | None = None
    beta: float | None = None  # learned factor on the logits
    scores: Scores | None = None  # on the fitting data, where the method knows them already
    held_out: Scores | None = None  # each sample scored by coefficients that were not fitted on it
    history: tuple[Any, ...] = ()  # decisions, steps and evaluations, in order
    notes: tuple[str, ...] = ()


class Problem:
    """What methods work on."""

    def __init__(
        self,
        pool: Pool,
        task: Task,
        *,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        donor: int | str = 0,
        form: Form = "auto",
        listen: Listener = ignore,
    ) -> None:
        statistics = task.has_statistics and task.statistics == "recalibrate"
        resolve(form, None if pool.adapters is None else 0, statistics=statistics)  # refused now, not after learning
        release(task.model)
        # A quantised model has adapters beside its weights, and keeps those.
        self._quantised = frozenset() if pool.adapters is None else quantised_weights(task.model, pool.specs)
        # Before everything is read for its facts.
        task.check_names(pool.specs, without=self._quantised, spare=pool.spare)
        self.pool = pool
        self.task = task
        self.listen = listen
        self.form: Form = form  # of the soup, where the ingredients are adapters
        self.facts: PoolFacts = pool.facts(listen, measured=False)
        absent = left_out(task.model, pool.spare)
        self._layout_choices: dict[str, Any] = {
            "include": include, "exclude": exclude, "donor": donor, "absent": absent,
        }  # fmt: skip
        self._layouts: dict[Any, Layout] = {}
        self._open: Live | None = None
        self._theta_bar: tuple[object, Tensor] | None = None
        self.last_block = LastBlock()
        self._made: WeakKeyDictionary[Soup, list[Tensor]] = WeakKeyDictionary()  # on the host, for the report
        self.known: list[Scores] | None = None  # the ingredients' scores, once somebody has asked for them
        self.known_seconds = 0.0
        self.keep: Callable[[Soup], Path] | None = None  # writes the record of a soup that is to be had meanwhile
        self.deadline = math.inf  # when the budget of the method under way is over, by time.monotonic
        self.seconds_each: float | None = None  # that scoring one ingredient on all fitting data takes, once measured
        self._sampled: tuple[Tensor, list[Scores]] | None = None  # sorted samples, and the ingredients' scores on them
        self.held_out: dict[str, Scores] = {}  # of other methods, as a guard found them on the way
        self.notes: tuple[str, ...] = ()  # what a reader of any result must know
        self._wide: Mapping[str, Wide] | None = None  # where the ingredients are adapters: learned with as factors
        if pool.adapters is not None:
            self._wide, self.notes = wide_modules(task, pool.adapters)
            if absent:
                some = listed(absent, 3)
                self.notes += (f"left out is what the base has, the model lacks and no adapter changes: {some}",)
        with self._live(self.layout("model")) as live:
            live.load_ingredient(0)
            task.check_loss()
            live.check_bound()
            _ = task.loss_adds_up  # tried while the model holds an ingredient

    def layout(self, granularity: str | Callable[[str], str]) -> Layout:
        if granularity not in self._layouts:
            self._layouts[granularity] = Layout.of(self.pool, granularity, facts=self.facts, **self._layout_choices)
        return self._layouts[granularity]

    def blocks(self, settings: Settings) -> list[list[int]]:
        """K_1 to K_T. Who is loaded with whom goes by content, not by place in the pool: a permuted pool gives a
        permuted W."""
        K = len(self.pool)
        ranked = sorted(range(K), key=self.facts.digests.__getitem__)
        size = block_size_for(settings, K)
        drawn = schedule(K, size, passes=settings.passes, blocks=settings.blocks, seed=settings.seed)
        return [sorted(ranked[i] for i in block) for block in drawn]

    def _live(self, layout: Layout, *, factored: bool = True, wide: Mapping[str, Wide] | None = None) -> Live:
        release(self.task.model)
        self.task.evaluator.forget()  # its graphs know nothing of adapters, or of those that were in the model before
        if self._wide is not None and factored:
            return FactoredLive(self.task, self.pool, layout, wide or self._wide, self._quantised)
        check_no_codes(self._quantised)
        return Live(self.task, self.pool, layout)

    @contextmanager
    def live(self, layout: Layout, *, factored: bool = True) -> Iterator[Live]:
        """The task's model with its mixed tensors in one vector, laid out for these groups.

        `factored=False` makes full weights of adapters.
        """
        # Two at a time would take the model's tensors from each other, and scores would be those of neither.
        assert self._open is None, "the model is in use"
        with self._live(layout, factored=factored) as live:
            self._open = live
            try:
                yield live
            finally:
                self._open = None
                self.task.evaluator.forget()  # its graphs read the model where it lies now

    def theta_bar(self, live: Live) -> Tensor | None:
        """The mean of all ingredients as a vector of this layout, if it was computed before. (P,)"""
        return self._theta_bar[1] if self._theta_bar is not None and self._theta_bar[0] == live.places else None

    def remember_theta_bar(self, live: Live, theta_bar: Tensor) -> None:
        self._theta_bar = (live.places, theta_bar)

    # Scores of the ingredients ------------------------------------------------------------------------

    def members(self, some: Iterable[int] | None = None) -> Iterator[int]:
        """Load one ingredient after the other into the model, all or some of them."""
        order = list(range(len(self.pool)) if some is None else some)
        model = nullcontext(self._open) if self._open else self.live(self.layout("model"))
        with model as live, reading_ahead(live, order) as read:
            for k in order:
                live.load_ingredient(k, read)
                yield k
                live.check_bound()

    def individual(self) -> list[Scores]:
        """Every ingredient on the fitting data; evaluated once, whoever asks."""
        if self.known is None:
            began = time.perf_counter()
            self.known = self._each()
            self.known_seconds = time.perf_counter() - began
        return self.known

    def sample(self, rows: Tensor, put: Callable[[Sequence[int]], None] | None = None) -> None:
        """Until all ingredients are known on all fitting data, these samples of it will do.

        `put` makes the model the mean of some ingredients; None: they are read from their files.
        """
        if len(rows) == len(self.task.fit):
            self.individual()
        elif self.known is None and (self._sampled is None or not torch.equal(self._sampled[0], rows)):
            self._sampled = rows, self._each(rows, put)

    def individual_on(self, indices: Tensor) -> list[Scores]:
        """Every ingredient on these samples of the fitting data."""
        if self.known is None and self._sampled is not None:
            rows, scores = self._sampled
            places = torch.searchsorted(rows, indices).clamp(max=len(rows) - 1)
            if torch.equal(rows[places], indices):
                return [one.rows(places) for one in scores]
        return [one.rows(indices) for one in self.individual()]

    def one_on(self, k: int, indices: Tensor, put: Callable[[Sequence[int]], None] | None = None) -> Scores:
        """Ingredient k on these samples of the fitting data."""
        return self.known[k].rows(indices) if self.known is not None else next(self._scored([k], indices, put))

    def _scored(
        self, members: Iterable[int], rows: Tensor | None, put: Callable[[Sequence[int]], None] | None
    ) -> Iterator[Scores]:
        if put is None:
            for _ in self.members(members):
                yield self.task.score(indices=rows)
            return
        live = self._open
        assert live is not None
        for k in members:
            put([k])
            W = chosen(len(self.pool), len(live.layout), [k])
            yield self.score_live(live, W, indices=rows, with_loss=False)

    def _each(self, rows: Tensor | None = None, put: Callable[[Sequence[int]], None] | None = None) -> list[Scores]:
        scores: list[Scores] = []
        began = time.perf_counter()
        for k, found in enumerate(self._scored(range(len(self.pool)), rows, put)):
            scores.append(found)
            if rows is None:
                value = finite(scores[-1].value)
                self.listen(Event("ingredient", {"name": self.pool.names[k], "index": k, "fit": value}))
            progress(self.listen, "scoring the ingredients", k + 1, len(self.pool), "models")
        if all(math.isnan(one.value) for one in scores):
            raise LearningError.of(
                "scores of the ingredients",
                expected="a number for at least one",
                found=f"NaN for all of them: {odd(scores[0])} in the fitting data",
                fix="give what has no score the score 0, or leave such samples out of the data",
            )
        samples = len(scores) * scores[0].n
        self.seconds_each = (time.perf_counter() - began) * len(self.task.fit) / samples
        return scores

    def ranked(self, scores: Sequence[float], *, by_content: bool = False) -> list[int]:
        """Ingredients by score, highest first; one without a score (NaN) comes last.

        Equals stand in the pool's order or, `by_content`, in that of their digests, so that a permuted pool gives the
        same choice.
        """
        order = self.facts.digests if by_content else [""] * len(scores)
        return sorted(range(len(scores)), key=lambda k: (scores[k] != scores[k], -scores[k], order[k], k))

    def best_on(self, indices: Tensor | None = None, *, by_content: bool = False) -> int:
        """The ingredient that scores highest on these samples of the fitting data (default: all)."""
        parts = self.individual() if indices is None else self.individual_on(indices)
        return self.ranked([one.value for one in parts], by_content=by_content)[0]

    def late(self, seconds: float) -> bool:
        """Whether what takes so long, and building and scoring the soup afterwards, would go beyond the budget."""
        if self.deadline == math.inf:
            return False
        last = AFTERWARDS * (self.seconds_each or 0.0)
        return ranks.decided_once(lambda: time.monotonic() + seconds + last > self.deadline)

    # Scores of soups ----------------------------------------------------------------------------------

    @property
    def recalibrates(self) -> bool:
        return self.task.has_statistics and self.task.statistics == "recalibrate"

    def score_live(self, live: Live, W: Tensor, *, calibration: int | None = None, **options: Any) -> Scores:
        """Score live.theta, which must hold the soup of weights W, on fitting data.

        `calibration`: samples that running statistics are estimated from, at most.
        """
        live.push()
        for name, reason in live.layout.kept.items():
            if reason in (STATISTIC, INTEGER):
                live.put(name, kept_tensor(self.pool, live.layout, W, name, self.task.statistics))
        if self.recalibrates and single(W) is None:
            self.task.recalibrate(self.listen, calibration)
        scores = self.task.score(**options)
        live.check_bound()
        return scores

    def put(self, soup: Soup) -> None:
        """Make the model this soup: its weights or, where those are quantised, the adapters beside them."""
        if (made := self._made.get(soup)) is not None:
            for own, kept in zip(self._tensors(), made, strict=True):
                own.copy_(kept)
        elif self.task.sharded and self._wide is None:
            with self._live(soup.layout) as live:  # each rank mixes its own rows
                self._put(soup, live)
        elif self._quantised:
            self._put(soup, hold(self._live(soup.layout, wide=self._cut(soup))))
        else:
            soup.load_into(self.task.model)

    def _put(self, soup: Soup, live: Live) -> None:
        live.theta.copy_(live.mixed(soup.W))
        if isinstance(live, FactoredLive) and isinstance(soup.written_as, int):
            live.count_once()
        for slot in live.plan.slots if live.sharded else ():  # as its file has it
            part, spec = live.theta[slot.start : slot.stop], self.pool.specs[slot.names[0]]
            part.copy_(part.to(spec.dtype))
        live.push()
        for name, reason in soup.layout.kept.items():
            if reason in (STATISTIC, INTEGER):
                own = (soup.statistics or {}).get(name)
                live.put(name, kept_tensor(self.pool, soup.layout, soup.W, name, "average") if own is None else own)

    def _cut(self, soup: Soup) -> Mapping[str, Wide] | None:
        """Modules with the soup's own factors in place of all adapters', where it is written with fewer ranks."""
        if self._wide is None or soup.factored is None or not isinstance(soup.written_as, int):
            return None
        found = {name: soup.factored.part(name) for name in soup.factored.names if name in self._wide}
        nothing = {name: replace(one, scale=one.scale * 0) for name, one in self._wide.items() if name not in found}
        return {**{name: self._wide[name].alone(part.A, part.B) for name, part in found.items()}, **nothing}

    def build(self, layout: Layout, W: Tensor, about: dict[str, Any]) -> Soup:
        """The exact soup, as its file will hold it, left in the model."""
        rule = self.task.statistics
        soup = Soup(self.pool, layout, W, statistics_rule=rule, about=about, form=self.form)
        self.put(soup)
        self.listen(Event("built", {"method": str(about.get("method"))}))
        if self.recalibrates and single(W) is None:
            statistics = self.task.recalibrate(self.listen)
            soup = Soup(self.pool, layout, W, statistics, statistics_rule=rule, about=about, form=self.form)
        if self.task.has_report and not self.task.sharded and not self._quantised:
            # The report is scored after all decisions: what fits into a small part of memory is not read again for it.
            held = sum(tensor.nbytes for made in self._made.values() for tensor in made)
            if held + sum(tensor.nbytes for tensor in self._tensors()) <= (host_memory() or 0) // HELD:
                self._made[soup] = [tensor.to("cpu", copy=True) for tensor in self._tensors()]
        return soup

    def _tensors(self) -> list[Tensor]:
        """All that the model holds."""
        return [tensor.detach() for tensor in (*self.task.model.parameters(), *self.task.model.buffers())]

"""One pool and one task: checked against each other once, with what several methods need kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from stockpot.engine import Live
from stockpot.engine.factored import FactoredLive
from stockpot.engine.loader import LastBlock
from stockpot.engine.wide import Wide, wide_modules
from stockpot.errors import LearningError
from stockpot.events import Event, Listener, ignore, progress
from stockpot.layout import INTEGER, STATISTIC, Layout
from stockpot.pool import Pool, PoolFacts
from stockpot.soup import Soup
from stockpot.soup.adapter import Form, resolve
from stockpot.soup.mix import kept_tensor
from stockpot.soup.weights import single
from stockpot.task import Scores, Task


def finite(value: float) -> float | None:
    """What JSON can hold."""
    return value if math.isfinite(value) else None


class StateStore(Protocol):
    """Keeps the newest state of one unfinished method. A run directory has one; None where nothing is kept."""

    interval: float  # seconds between saves inside a block
    peaks: Callable[[], tuple[int, int]]  # bytes of host and device in this process so far; set by whoever measures

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Decision:
    """What a method decided: mixing weights, and what there is to know about them."""

    W: Tensor | None  # (K, G); None for the ensemble, which is no soup
    layout: Layout | None = None
    beta: float | None = None  # learned factor on the logits
    scores: Scores | None = None  # on the fitting data, where the method knows them already
    held_out: Scores | None = None  # each sample scored by coefficients that were not fitted on it
    history: tuple[Any, ...] = ()  # decisions, steps and evaluations, in order
    models_used: int = 0
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
        task.check_names(pool.specs)  # before everything is read for its facts
        self.pool = pool
        self.task = task
        self.listen = listen
        self.form: Form = form  # of the soup, where the ingredients are adapters
        self.facts: PoolFacts = pool.facts(listen, measured=False)
        self._layout_choices: dict[str, Any] = {"include": include, "exclude": exclude, "donor": donor}
        self._layouts: dict[Any, Layout] = {}
        self._open: Live | None = None
        self._theta_bar: tuple[object, Tensor] | None = None
        self.last_block = LastBlock()
        self.known: list[Scores] | None = None  # the ingredients' scores, once somebody has asked for them
        self.known_seconds = 0.0
        self.held_out: dict[str, Scores] = {}  # of other methods, as a guard found them on the way
        self.notes: tuple[str, ...] = ()  # what a reader of any result must know
        self._wide: Mapping[str, Wide] | None = None  # where the ingredients are adapters: learned with as factors
        if pool.adapters is not None:
            self._wide, self.notes = wide_modules(task, pool.adapters)
        with self._live(self.layout("model")) as live:
            live.load_ingredient(0)
            task.check_loss()
            live.check_bound()
            _ = task.loss_adds_up  # tried while the model holds an ingredient

    def layout(self, granularity: str | Callable[[str], str]) -> Layout:
        if granularity not in self._layouts:
            self._layouts[granularity] = Layout.of(self.pool, granularity, facts=self.facts, **self._layout_choices)
        return self._layouts[granularity]

    def _live(self, layout: Layout, *, factored: bool = True) -> Live:
        if self._wide and factored:
            return FactoredLive(self.task, self.pool, layout, self._wide)
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

    def theta_bar(self, live: Live) -> Tensor | None:
        """The mean of all ingredients as a vector of this layout, if it was computed before. (P,)"""
        return self._theta_bar[1] if self._theta_bar is not None and self._theta_bar[0] == live.places else None

    def remember_theta_bar(self, live: Live, theta_bar: Tensor) -> None:
        self._theta_bar = (live.places, theta_bar)

    # Scores of the ingredients ------------------------------------------------------------------------

    def members(self) -> Iterator[int]:
        """Load one ingredient after the other into the model."""
        with nullcontext(self._open) if self._open else self.live(self.layout("model")) as live:
            for k in range(len(self.pool)):
                live.load_ingredient(k)
                yield k
                live.check_bound()

    def individual(self) -> list[Scores]:
        """Every ingredient on the fitting data; evaluated once, whoever asks."""
        if self.known is None:
            began = time.perf_counter()
            scores = []
            for k in self.members():
                scores.append(self.task.score())
                value = finite(scores[-1].value)
                self.listen(Event("ingredient", {"name": self.pool.names[k], "index": k, "fit": value}))
                progress(self.listen, "scoring the ingredients", k + 1, len(self.pool), "models")
            if all(math.isnan(one.value) for one in scores):
                raise LearningError.of(
                    "scores of the ingredients",
                    expected="a number for at least one",
                    found="NaN for all of them",
                    fix=f"look at what the metric {self.task.metric.name} gives for the fitting data",
                )
            self.known, self.known_seconds = scores, time.perf_counter() - began
        return self.known

    def ranked(self, scores: Sequence[float], *, by_content: bool = False) -> list[int]:
        """Ingredients by score, highest first; one without a score (NaN) comes last.

        Equals stand in the pool's order or, `by_content`, in that of their digests, so that a permuted pool gives the
        same choice.
        """
        order = self.facts.digests if by_content else [""] * len(scores)
        return sorted(range(len(scores)), key=lambda k: (scores[k] != scores[k], -scores[k], order[k], k))

    def best_on(self, indices: Tensor | None = None, *, by_content: bool = False) -> int:
        """The ingredient that scores highest on these samples of the fitting data (default: all)."""
        own = self.individual()
        parts = own if indices is None else [one.rows(indices) for one in own]
        return self.ranked([one.value for one in parts], by_content=by_content)[0]

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

    def build(self, layout: Layout, W: Tensor, about: dict[str, Any]) -> Soup:
        """The exact soup, as its file will hold it, left in the model."""
        rule = self.task.statistics
        soup = Soup(self.pool, layout, W, statistics_rule=rule, about=about, form=self.form)
        soup.load_into(self.task.model)
        self.listen(Event("built", {"method": str(about.get("method"))}))
        if self.recalibrates and single(W) is None:
            statistics = self.task.recalibrate(self.listen)
            soup = Soup(self.pool, layout, W, statistics, statistics_rule=rule, about=about, form=self.form)
        return soup

"""What the methods share while they work on one pool and one task."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live, ahead
from stockpot.events import Event, Listener, ignore, progress
from stockpot.layout import INTEGER, STATISTIC, Layout
from stockpot.pool import Pool, PoolFacts
from stockpot.soup import Soup
from stockpot.soup.mix import mix_statistic
from stockpot.soup.weights import heaviest, single
from stockpot.task import Scores, Task


class Kitchen:
    """Checks pool and task against each other once, and keeps what several methods need."""

    def __init__(
        self,
        pool: Pool,
        task: Task,
        *,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        donor: int | str = 0,
        listen: Listener = ignore,
        directions: Iterable[str] = (),
    ) -> None:
        """`directions`: how the methods to come keep loaded models, to be ready for that when the files are read."""
        task.check_names(pool.specs)  # before everything is read for its facts
        weights = next(task.model.parameters(), None)
        ahead.begin(task.device, directions, torch.float32 if weights is None else weights.dtype)
        self.pool = pool
        self.task = task
        self.listen = listen
        self.facts: PoolFacts = pool.facts(listen)
        self._layout_choices: dict[str, Any] = {"include": include, "exclude": exclude, "donor": donor}
        self._layouts: dict[Any, Layout] = {}
        self._individual: list[Scores] | None = None
        self._open: Live | None = None
        self.individual_seconds = 0.0
        with Live(task, pool, self.layout("model")) as live:
            live.load_ingredient(0)
            task.check_loss()

    def layout(self, granularity: str | Callable[[str], str]) -> Layout:
        if granularity not in self._layouts:
            self._layouts[granularity] = Layout.of(
                self.pool, granularity, facts=self.facts, **self._layout_choices
            )
        return self._layouts[granularity]

    @contextmanager
    def live(self, layout: Layout) -> Iterator[Live]:
        # Two at a time would take the model's tensors from each other, and scores would be those of neither.
        assert self._open is None, "the model is in use"
        with Live(self.task, self.pool, layout) as live:
            self._open = live
            try:
                yield live
            finally:
                self._open = None

    def members(self) -> Iterator[int]:
        """Load one ingredient after the other into the model, for the ensemble."""
        with self.live(self.layout("model")) as live:
            for k in range(len(self.pool)):
                live.load_ingredient(k)
                yield k

    def individual(self) -> list[Scores]:
        """Every ingredient on the fitting data; evaluated once, whoever asks, in whatever live model is open."""
        if self._individual is None:
            began = time.perf_counter()
            scores = []
            with nullcontext(self._open) if self._open else self.live(self.layout("model")) as live:
                for k in range(len(self.pool)):
                    live.load_ingredient(k)
                    scores.append(self.task.score())
                    mean = scores[-1].mean
                    self.listen(Event("ingredient", {"name": self.pool.names[k], "index": k, "fit": mean}))
                    progress(self.listen, "scoring the ingredients", k + 1, len(self.pool), "models")
            self._individual = scores
            self.individual_seconds = time.perf_counter() - began
        return self._individual

    @property
    def known(self) -> list[Scores] | None:
        """The ingredients' scores if somebody has asked for them."""
        return self._individual

    def remember(self, scores: list[Scores], seconds: float) -> None:
        """The ingredients' scores, and what they cost, as an earlier process found them."""
        self._individual, self.individual_seconds = scores, seconds

    def ranked(self, scores: Sequence[float]) -> list[int]:
        """Ingredients by score, highest first; of equals, the same one first wherever they stand in the pool."""
        return sorted(range(len(scores)), key=lambda k: (-scores[k], self.facts.digests[k], k))

    def first(self, scores: Sequence[float]) -> int:
        """The ingredient with the highest score."""
        return self.ranked(scores)[0]

    def individual_values(self) -> Tensor:
        """Per-sample scores of every ingredient. (K, N)"""
        return torch.stack([score.values for score in self.individual()])

    def set_statistics(self, live: Live, W: Tensor, limit: int | None = None) -> dict[str, Tensor] | None:
        """Give the live model the running statistics and integers a soup of weights W has.

        Returns the recalibrated statistics when the task asks for that; they are part of the soup then. `limit`:
        estimated from so many samples at most.
        """
        one = single(W)
        heavy = one if one is not None else heaviest(W)
        weights = W.mean(dim=1).tolist()
        average = one is None and self.task.statistics == "average"
        for name, reason in live.layout.kept.items():
            if reason == STATISTIC and average and self.pool.specs[name].dtype.is_floating_point:
                live.put(
                    name, mix_statistic([self.pool.tensor(k, name) for k in range(len(self.pool))], weights)
                )
            elif reason in (STATISTIC, INTEGER):
                live.put(name, self.pool.tensor(heavy, name))
        if one is None and self.task.has_statistics and self.task.statistics == "recalibrate":
            return self.task.recalibrate(self.listen, limit)
        return None

    def score_live(self, live: Live, W: Tensor, *, calibration: int | None = None, **options: Any) -> Scores:
        """Score live.theta, which must hold the soup of weights W, on fitting data.

        `calibration`: samples that statistics are estimated from, at most.
        """
        live.push()
        self.set_statistics(live, W, calibration)
        return self.task.score(**options)

    def finish(
        self,
        layout: Layout,
        W: Tensor,
        about: dict[str, Any],
        *,
        temperature: float | None = None,
        free: bool = False,
    ) -> tuple[Soup, Scores]:
        """The exact soup, as its file will hold it, left in the model and scored on the fitting data."""
        one = single(W)
        plain = Soup(
            self.pool,
            layout,
            W,
            copy_statistics=self.task.statistics == "copy" or one is not None,
            temperature=temperature,
            free=free,
            about=about,
        )
        plain.load_into(self.task.model)
        self.listen(Event("built", {"method": str(about.get("method"))}))
        statistics = None
        if one is None and self.task.has_statistics and self.task.statistics == "recalibrate":
            statistics = self.task.recalibrate(self.listen)
            plain = Soup(self.pool, layout, W, statistics, temperature=temperature, free=free, about=about)
        return plain, self.task.score()

"""The learner behind all learned soups: block coordinate descent on mixing coefficients (paper, Algorithm 1).

One or several *tracks* learn side by side, each on its own part of the fitting data (one for the plain methods, one per
fold for cross-fitting); a loaded block serves all of them before it is dropped.

For a visit of block B by a track:  theta_fix = theta - sum_{k in B} c_k d_k;  J optimiser steps on the block's
coefficients;  theta = theta_fix + sum_{k in B} c_k d_k.  W follows exactly, by the same linear map:
adding c_k d_k with d_k = s_k (theta_k - centre) adds c_k s_k (e_k - W_centre) to W.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from stockpot.engine import Directions, Engine, Live
from stockpot.engine.budget import NAMES
from stockpot.engine.parametrisation import coefficients
from stockpot.errors import LearningError, describe
from stockpot.events import Event, Listener, ignore
from stockpot.soup import weights
from stockpot.soups import setbacks
from stockpot.soups.blocks import blocks_for
from stockpot.soups.settings_before import Settings
from stockpot.soups.state import NoStore, StateStore
from stockpot.soups.track import Track, steps_for
from stockpot.soups.visit import Visit
from stockpot.soups.visits import Visits


class Learner:
    def __init__(
        self,
        live: Live,
        settings: Settings,
        tracks: list[Track],
        *,
        listen: Listener = ignore,
        store: StateStore | None = None,
    ) -> None:
        self.live = live
        self.settings = settings
        self.tracks = tracks
        self.listen = listen
        models = len(live.pool)
        self.simplex = settings.parametrisation == "simplex"
        digests = live.pool.digests(listen)
        # Who is loaded with whom goes by content, not by place in the pool: a permuted pool gives a permuted W.
        ranked = sorted(range(models), key=lambda k: digests[k])
        blocks = [sorted(ranked[i] for i in block) for block in blocks_for(settings, models)]
        starts = [track.start for track in tracks]
        self.visits = Visits(blocks, settings, store or NoStore(), starts)
        self._limit = models  # models loaded at a time; lower after running out of memory
        self._prefetched: set[int] = set()

    @property
    def blocks(self) -> list[list[int]]:
        """Which models are loaded together, in the order they are."""
        return self.visits.blocks

    @property
    def history(self) -> list[Mapping[str, Any]]:
        return self.visits.history

    def setback_notes(self) -> tuple[str, ...]:
        """What a reader of the result must know about steps that could not be taken."""
        steps = len(self.blocks) * sum(steps_for(self.settings, len(track.data)) for track in self.tracks)
        return setbacks.notes([track.setbacks for track in self.tracks], steps)

    def run(self) -> None:
        """Learn every track; afterwards `track.W`, `track.theta` and `track.raw` hold the result."""
        self.visits.restore()
        while True:
            try:
                return self._attempt()
            except torch.OutOfMemoryError as error:
                self._step_down(error)

    def _attempt(self) -> None:
        s = self.visits.arranged
        self.live.drop_theta()
        size = min(self._limit, max(map(len, self.blocks)))
        fixed = not isinstance(self.settings.block_size, str)
        self.engine = Engine(
            self.live, s, self.tracks[0].data,
            block_size=size, fixed_block=fixed, tracks=len(self.tracks), listen=self.listen,
        )  # fmt: skip
        plan = self.engine.plan
        self.visits.arranged = dataclasses.replace(
            s, directions=cast(Any, NAMES[plan.dtype]), accumulate=plan.accumulate, low_memory=plan.low_memory
        )
        self.visits.cut(plan.block_size, self.tracks)
        try:
            self._start()
            done = self.visits.finished(self.tracks)
            for t, block in enumerate(self.blocks):
                # A finished block that is too large by now is replayed in parts.
                size = len(block) if t >= done else max(1, min(len(block), plan.block_size))
                for at in range(0, len(block), size):
                    self._visits_of(t, block[at : at + size], at)
        finally:
            self.engine.close()

    def _visits_of(self, t: int, block: list[int], at: int) -> None:
        """Every track on one block, or on the part of it that begins at place `at`."""
        directions = None
        for track in self.tracks:
            if directions is None or self.settings.centre == "soup":
                directions = None  # free the old block before loading the next one
                self.engine.release()
                directions = self._load(block, track, t)
            self._visit(t, block, directions, track, at)

    # Less memory: the finished blocks are replayed from their coefficients, the rest is learned differently.

    def _step_down(self, error: BaseException) -> None:
        now, plan = self.visits.arranged, self.engine.plan
        if plan.block_size > 1 and self.settings.centre == "mean":
            self._limit = -(-plan.block_size // 2)
            self.visits.cut(self._limit, self.tracks)
            change = f"{self._limit} models at a time instead of {plan.block_size}"
        elif now.directions in ("fp32", "bf16") and self.live.device.type == "cuda":
            self.visits.arranged = dataclasses.replace(now, directions="int8")
            change = "models kept as int8"
        elif not now.low_memory:
            self.visits.arranged = dataclasses.replace(now, low_memory=True)
            change = "gradients and activations in low-memory mode"
        else:
            raise error
        self._tell("memory", text=f"out of memory; going on with {change}")
        if self.live.device.type == "cuda":
            torch.cuda.empty_cache()

    # The centre of the directions and its own mixing weights.

    def _start(self) -> None:
        live, s = self.live, self.settings
        K, G = len(live.pool), len(live.layout)
        first = self.blocks[0] if s.centre == "soup" else None
        mean = self.engine.loader.mean(first, self.listen)  # on the host when the device is CUDA
        if not bool(torch.stack(torch.aminmax(mean)).isfinite().all()):
            live.pool.verify_finite(self.listen)  # names the files to blame
            raise _overflowing_mean()
        self._mean = mean if s.centre == "mean" and s.decentralise else None
        self._W_mean = weights.uniform(K, G) if first is None else weights.chosen(K, G, first)
        # Of several tracks only one is at work; the others' soups wait where the mean is.
        self._active = mean.to(live.device, copy=True)  # (P,)
        for track in self.tracks:
            track.raw = torch.full((K, G), 0.0 if s.decentralise else 1.0 / K, dtype=live.dtype)
            track.theta = mean.clone() if len(self.tracks) > 1 else self._active
            track.W = self._W_mean.clone()
            if track.start is not None:
                track.W = weights.chosen(K, G, track.start)
                track.raw.copy_(track.W - self._W_mean)
                track.theta.copy_(self.engine.loader.mean(list(track.start), self.listen))
            track.temperature = 1.0 if s.temperature else None
            track.held_out_loss, track.setbacks = float("inf"), setbacks.Setbacks()

    def _load(self, block: list[int], track: Track, t: int) -> Directions:
        s, pool = self.settings, self.live.pool
        centre = self._mean if s.centre == "mean" else track.theta
        self.listen(
            Event("block", {"block": t, "of": len(self.blocks), "models": [pool.names[k] for k in block]})
        )
        return self.engine.loader.load(block, centre if s.decentralise else None, unit_norm=s.unit_norm)

    def _prefetch(self, t: int) -> None:
        """The next block while this one learns, when it does not depend on the outcome."""
        if self.settings.centre == "mean" and t + 1 < len(self.blocks) and t not in self._prefetched:
            self._prefetched.add(t)
            self.engine.loader.prefetch(self.blocks[t + 1], self._mean)

    # One block on one track.

    def _visit(self, t: int, block: list[int], directions: Directions, track: Track, at: int) -> None:
        live, s = self.live, self.settings
        if s.reset:
            track.raw[block] = 0.0
        before = track.raw[block].clone()  # (b, G)
        old = coefficients(before.to(live.device), self.simplex)
        theta = self._active
        if theta is not track.theta:
            theta.copy_(track.theta)
        if bool((old != 0).any()):
            directions.mix(theta, -old, out=theta)  # theta_fix, in place
        key = f"{t}.{track.number}"
        if key in self.visits.done:
            after = self.visits.recall(key, track)[at : at + len(block)]
        else:
            with self.visits.holding():
                after = self._learn(t, block, directions, track, before)
                self.visits.add(key, after, track)
        new = coefficients(after.to(live.device), self.simplex)
        directions.mix(theta, new, out=theta)
        if theta is not track.theta:
            track.theta.copy_(theta)
        track.raw[block] = after
        track.W = self._followed(track.W, block, directions, (new - old).double().cpu())

    def _followed(self, W: Tensor, block: list[int], directions: Directions, change: Tensor) -> Tensor:
        """W after the block's coefficients changed by `change` (b, G)."""
        if directions.scale is not None:
            change = change * directions.scale.double().cpu()
        after = W.clone()
        if self.settings.decentralise:
            centre = W if self.settings.centre == "soup" else self._W_mean
            after -= centre * change.sum(dim=0, keepdim=True)
        after[block] += change
        return after

    def _learn(self, t: int, block: list[int], directions: Directions, track: Track, raw: Tensor) -> Tensor:
        """The coefficients (b, G) a track ends its visit with."""
        steps = steps_for(self.settings, len(track.data))
        descent = self.engine.descent(directions, self._active, raw, track.temperature, steps, track.data)
        self._prefetch(t)
        visit = Visit(
            t, track, descent, raw, steps,
            live=self.live, settings=self.settings, visits=self.visits, tell=self._tell,
        )  # fmt: skip
        try:
            found = visit.run()
        except LearningError as error:
            # The visit is undone to the best coefficients it had, so that what was learned is not lost.
            change = coefficients(error.best, self.simplex) - coefficients(track.raw[block], self.simplex)
            error.best = self._followed(track.W, block, directions, change.double().cpu())
            raise
        track.temperature = found.temperature
        if track.held_out is not None:
            track.held_out_loss = found.loss
        return found.raw

    def _tell(self, kind: str, **data: Any) -> None:
        self.history.append({"kind": kind, **data})
        self.listen(Event(kind, data))


def _overflowing_mean() -> LearningError:
    return LearningError(
        describe(
            "mean of the ingredients",
            expected="finite weights",
            found="sums that overflow, although every ingredient is finite",
            fix="look for absurdly large weights with `stockpot inspect`, and leave those ingredients out",
        )
    )

"""One block on one track: J optimiser steps, judged on the fold left out, with a way back from bad numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from stockpot.engine import Descent, Live, parallel
from stockpot.engine.descent import Step
from stockpot.errors import LearningError, describe
from stockpot.soups.best import Point, Stretch, stretch_of
from stockpot.soups.setbacks import Setbacks
from stockpot.soups.settings_before import Settings
from stockpot.soups.track import Track
from stockpot.soups.visits import Visits

Tell = Callable[..., None]

SLOWEST = 0.5**4  # of the rate, where a fold gives up: smaller steps cost more than they find
FASTEST = 2.0**10


class Visit:
    """Everything that happens between loading a block and its final coefficients."""

    def __init__(
        self,
        t: int,
        track: Track,
        descent: Descent,
        raw: Tensor,  # (b, G) where the block starts
        steps: int,
        *,
        live: Live,
        settings: Settings,
        visits: Visits,
        tell: Tell,
    ) -> None:
        self.t, self.track, self.descent, self.steps = t, track, descent, steps
        self.live, self.settings, self.visits, self._tell = live, settings, visits, tell
        self.every = max(1, steps // settings.evaluations)
        self.done = 0
        self.pace = 1.0  # factor on the rate, by what held-out loss did since the visit began
        self.setbacks = track.setbacks
        self.setbacks.begin_visit()
        self.best = Point(track.held_out_loss, raw, track.temperature)
        self.stretch = Stretch(raw, track.temperature)
        if visits.partial is not None:
            self._continue()
        descent.slow(self._factor)

    def run(self) -> Point:
        """The coefficients to go on with: the best on held-out data, else the last."""
        devices = [self.live.device] if self.live.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices), self.live.task.learning():
            if self.done == 0 and self.t == 0 and self.track.held_out is not None:
                self.best = self._judged(self.best.raw, self.best.temperature)
            while self.done < self.steps:
                self._advance()
                self._judge()
                if self.visits.due():
                    self._keep()
        if self.setbacks.visit > self.steps / 2:
            raise self._stopped(f"{self.setbacks.visit} of {self.steps} skipped")
        if self.track.held_out is not None:
            return self.best
        last = self._here(float("inf"))
        return last if _is_finite(last) else self._went_back("coefficients that are not finite")

    # Steps.

    @property
    def _factor(self) -> float:
        """On the learning rate."""
        return self.setbacks.factor * self.pace

    def _restart(self, point: Point) -> None:
        self.descent.go_back(point.raw, point.temperature, self.done)
        self.descent.slow(self._factor)
        self.stretch = Stretch(point.raw, point.temperature)

    def _advance(self) -> None:
        """Up to the next judgement, at most as many steps as the engine likes to take at once."""
        j, track = self.done, self.track
        length = self.every if track.held_out is not None else stretch_of(self.every)
        stop = min(self.steps, (j // length + 1) * length, j + self.descent.burst)
        seed = self.settings.seed * 1009 + track.number
        first = self.t * self.steps
        _seed(self.live.device, seed * 1_000_000_007 + first + j)
        batches = [track.data.order(seed, first + i, self.settings.batch_size) for i in range(j, stop)]
        for step in self.descent.run(track.data, batches):
            too_often = self._count(step)
            self.done += 1
            if too_often:
                # What the engine did after this step is undone with it: every device stops at the same one.
                self._restart(
                    self._went_back(f"{self.setbacks.lately} skipped, the last with {_found(step)}")
                )
                break

    def _count(self, step: Step) -> bool:
        """Say what the step found; whether too many were skipped."""
        place = {"block": self.t, "fold": self.track.number, "step": self.done, "of": self.steps}
        if step.skipped:
            self._tell("skipped", **place, found=_found(step))
        else:
            rate = self.descent.rates[self.done] * self._factor
            self._tell("step", **place, loss=step.loss, lr=rate)
        self.stretch.add(step.loss, step.skipped)
        return self.setbacks.count(step.skipped)

    def _went_back(self, why: str) -> Point:
        """The best coefficients so far, to go on from at half the rate."""
        if not self.setbacks.go_back():
            raise self._stopped(why)
        self._tell(
            "setback",
            block=self.t,
            fold=self.track.number,
            step=self.done,
            factor=self.setbacks.factor,
            text=f"{why}; back to the best coefficients so far at {self.setbacks.factor:g} of the learning rate",
        )
        return self.best

    # Which coefficients are best.

    def _judge(self) -> None:
        if self.track.held_out is not None:
            if self.done % self.every == 0 or self.done == self.steps:
                here = self._shown()
                if here.loss < self.best.loss and _is_finite(here):
                    self.best = here
                    if self.settings.retreat:  # which takes back what was too fast
                        self._speed_up()
                elif self.settings.retreat:
                    self._retreat()
        elif self.done % stretch_of(self.every) == 0:
            self.best = self.stretch.better_than(self.best)
            here = self._here(float("inf"))
            if _is_finite(here):
                self.stretch = Stretch(here.raw, here.temperature)

    def _shown(self) -> Point:
        """What is judged: the coefficients, or their mean over the steps since the last judgement."""
        trail = self.descent.trail
        if trail is None:
            here = self._here(float("inf"))
            return self._judged(here.raw, here.temperature)
        raw, temperature = trail.mean()
        trail.begin()
        return self._judged(raw.cpu(), temperature)

    def _speed_up(self) -> None:
        self.pace = min(FASTEST, self.pace * self.settings.advance)
        self.descent.slow(self._factor)

    def _retreat(self) -> None:
        """Try again from the best coefficients in smaller steps, or leave it at them."""
        self.pace *= 0.5
        if self.pace <= SLOWEST:
            self.done = self.steps
        self._restart(self.best)

    def _here(self, loss: float) -> Point:
        d = self.descent
        temperature = None if d.temperature is None else float(d.temperature.detach())
        return Point(loss, d.raw.detach().cpu().clone(), temperature)

    def _judged(self, raw: Tensor, temperature: float | None) -> Point:
        """By the mean loss on the fold left out: the one that is learned with."""
        assert self.track.held_out is not None
        task, data = self.live.task, self.track.held_out
        smoothing = self.settings.label_smoothing
        factor = None
        if temperature is not None:
            factor = torch.tensor(temperature, dtype=self.live.dtype, device=self.live.device)
        self.descent.mix(raw)
        total = torch.zeros((), dtype=torch.float64, device=self.live.device)
        with torch.no_grad():
            # Pieces of equal size: a last batch of two samples would spoil batch statistics.
            for piece in torch.arange(len(data)).tensor_split(-(-len(data) // task.batch_size)):
                mine = parallel.share(piece)
                if len(mine):
                    batch = task.to_device(data.batch(mine))
                    loss = task.loss(batch, label_smoothing=smoothing, temperature=factor)
                    total += loss.double() * len(mine)
        parallel.add_up([total])
        mean = float(total) / len(data)
        self._tell("held_out", block=self.t, fold=self.track.number, step=self.done, loss=finite(mean))
        return Point(mean if mean == mean else float("inf"), raw, temperature)

    # State.

    def _keep(self) -> None:
        tensors, values = self.descent.state()
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            return  # the state before this one stays
        tensors["best"] = self.best.raw
        tensors["stretch"] = self.stretch.raw.clone()  # may be the very tensor of the best
        values |= {
            "step": self.done,
            "best_loss": finite(self.best.loss),
            "best_temperature": self.best.temperature,
            "stretch_temperature": self.stretch.temperature,
            "stretch": [self.stretch.total, self.stretch.steps, self.stretch.clean],
            "setbacks": self.setbacks.to_json(),
            "pace": self.pace,
        }
        self.visits.partial = (tensors, values)
        self.visits.save()

    def _continue(self) -> None:
        assert self.visits.partial is not None
        tensors, values = self.visits.partial
        self.visits.partial = None
        self.descent.restore(tensors, values)
        self.done = values["step"]
        loss = float("inf") if values["best_loss"] is None else values["best_loss"]
        self.best = Point(loss, tensors["best"], values["best_temperature"])
        total, steps, clean = values["stretch"]
        self.stretch = Stretch(tensors["stretch"], values["stretch_temperature"], total, steps, clean)
        self.setbacks = self.track.setbacks = Setbacks.from_json(values["setbacks"])
        self.pace = values["pace"]

    # Giving up.

    def _stopped(self, found: str) -> LearningError:
        fold = f", fold {self.track.number + 1}" if self.track.held_out is not None else ""
        lowered = self.setbacks.halvings
        return LearningError(
            describe(
                f"learning at block {self.t + 1} of {len(self.visits.blocks)}, step {self.done}{fold}",
                expected="steps whose loss and gradient are finite",
                found=found + (f", also at {self.setbacks.factor:g} of the learning rate" if lowered else ""),
                fix="lower lr, look for what the loss cannot take (the logarithm of zero, a division by zero), or"
                " use fp32 instead of fp16 autocast; the best soup so far is in the error's .best",
            ),
            best=self.best.raw,
        )


def _found(step: Step) -> str:
    if math.isfinite(step.loss):
        return "a gradient that is not finite"
    return f"loss {step.loss}"


def _is_finite(point: Point) -> bool:
    return bool(point.raw.isfinite().all()) and math.isfinite(point.temperature or 0.0)


def finite(value: float) -> float | None:
    """What JSON can hold."""
    return value if math.isfinite(value) else None


def _seed(device: torch.device, value: int) -> None:
    """For losses that draw numbers: they depend on the step, not on what ran before."""
    # Not torch.manual_seed: where CUDA is not in use yet, it formats and keeps a stack trace at every call.
    torch.default_generator.manual_seed(value % 2**63)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(value % 2**63)

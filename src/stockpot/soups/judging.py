"""Algorithm 1 for several folds: judged, paced and stopped together on what each leaves out.

The rules are soups/stopping.py. What is judged is the mean of the coefficients since the last judgement: less noisy
than where the last step ended. After a block of several, all go on from their average. Ranks that divide the folds
learn each as a process alone does, and tell each other what came of it at every judgement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Engine, Live
from stockpot.engine.optimiser import with_mean
from stockpot.events import Event
from stockpot.soup import Soup
from stockpot.soup import weights as mixing
from stockpot.soups.fold import Fold, average, coefficients
from stockpot.soups.learn import Learner
from stockpot.soups.mehl import weights
from stockpot.soups.problem import finite
from stockpot.soups.result import about
from stockpot.soups.stopping import Verdict, earliest, together, verdict

Put = Callable[[Sequence[int]], None]  # makes the model the mean of some ingredients


class FoldLearner(Learner):
    """Learns every fold; in the end each is judged once more, by whoever makes this, before they are averaged.

    `judge` is called for every part that a fold leaves out, with the fold's soup as it was when it was best on the
    other part, in the model. `begin` finds the ingredients whose mean the folds set out from. Where a GPU holds all of
    them, it is given what puts such means into the model without a look at the files.
    """

    def __init__(
        self,
        *learner: Any,
        judge: Callable[[Fold, int, Tensor], None],
        begin: Callable[[Put | None], tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(*learner)
        self._judge, self._begin = judge, begin
        self._again = 0  # steps whose batches come again
        self.averaged = self.folds  # whose mean is the soup
        self._apart: tuple[str, ...] = ()  # the note, where that is one of them

    def _prepare(self) -> None:
        if self._begin is None or self._continued:
            return
        put = self._means(self._open_engine()) if mixes_fast(self.live) else None
        if put is None:
            self._close_engine()  # what files are read into needs the room
        start = mixing.chosen(len(self.problem.pool), len(self.live.layout), self._begin(put))
        self._begin = None
        if self.problem.keep is not None:  # usable before anything is learned
            how = {**about(self.method.name, self.settings), "stopped": "before learning"}
            record = str(self.problem.keep(Soup(self.problem.pool, self.live.layout, start, about=how)))
            models = int((start[:, 0] > 0).sum())
            self.listen(Event("kept", {"models": models, "of": len(start), "record": record}))
        for fold in self.folds:
            fold.state.alpha.copy_(start - 1 / len(start))
            fold.set_out()
        self.live.task.evaluator.forget()  # learning needs the room of its graphs

    def _means(self, engine: Engine) -> Put | None:
        """What makes the model the mean of some ingredients, where the engine holds all of them."""
        block = self.blocks[0]
        K, G = len(self.problem.pool), len(self.live.layout)
        if len(block) < K or len(self.blocks) > 1:
            return None
        engine.load(block)
        theta_bar = engine.theta_fix(torch.zeros(K, G), block)

        def put(members: Sequence[int]) -> None:
            c = mixing.chosen(K, G, members) - 1 / K
            engine.mix(theta_bar, c[block].to(self.live.device, self.live.dtype))

        return put

    def _finish(self, engine: Engine) -> None:
        block = self.blocks[-1]
        for fold in self.folds:
            for part, unseen in enumerate(fold.unseen):
                alpha = fold.state.alpha.clone()
                alpha[block] = unseen.to(alpha)
                c = alpha.softmax(dim=0) if self.method.simplex else alpha
                engine.load(block)
                engine.mix(engine.theta_fix(c, block), c[block].to(self.live.device, self.live.dtype))
                self._judge(fold, part, weights(alpha, self.method.simplex))
        with self._ranks.working(), self.live.task.learning():
            self.averaged = self._to_be_averaged(engine)

    def _to_be_averaged(self, engine: Engine) -> list[Fold]:
        """All folds, or where they lie so far apart that their average is worse than each of them, the best.

        The average and every fold are measured on the same samples, and each has learned from as many of those.
        """
        block, parts = self.blocks[-1], [part for fold in self.folds for part in fold.held_out]

        def loss(folds: Sequence[Fold]) -> float:
            W, beta = average(folds, self.method.simplex)
            c = W - 1 / len(W)
            engine.load(block)
            engine.mix(engine.theta_fix(c, block), c[block].to(self.live.device, self.live.dtype))
            found = sum(len(part) * engine.loss_on(part, beta) for part in parts) / sum(map(len, parts))
            return found if math.isfinite(found) else math.inf

        # The first rank's: all must choose alike.
        each, mean = self._ranks.exchanged(([loss([fold]) for fold in self.folds], loss(self.folds)))[0]
        if mean <= max(each):
            return self.folds
        self._apart = (
            f"the folds are so far apart that their average is worse (loss {mean:.4g}) than each of them (at most"
            f" {max(each):.4g}): the best of them is returned ({min(each):.4g})",
        )
        return [self.folds[each.index(min(each))]]

    def notes(self) -> tuple[str, ...]:
        return (*super().notes(), *self._apart)

    # A block, from judgement to judgement ---------------------------------------------------------------

    def _turns_of_a_block(self, engine: Engine) -> Iterator[tuple[Fold, int]]:
        began, J = time.monotonic(), self._steps_of_a_block
        while True:
            judgement = min(len(fold.losses) for fold in self.folds)
            before, here, after = (self._verdict(max(0, n)) for n in range(judgement - 2, judgement + 1))
            longer = (after.next - here.next) / max(1, here.next - before.next)  # than the last round
            now = time.monotonic()
            if after.over or (judgement and here.next == J) or (judgement and self._late(longer * (now - began))):
                break
            began = now
            least, most = self._left()
            budget = finite(self.problem.deadline - now)
            self.listen(Event("left", {"least": least, "most": most, "budget": budget}))
            self._again = after.again
            for fold in self._ranks.mine:
                if len(fold.losses) > judgement:
                    continue  # it is ahead, in a run that was continued
                if judgement == 0:
                    self._first_look(engine, fold)
                else:
                    self._decide(engine, fold)
                    yield fold, after.next
                    assert fold.state.saved is not None
                    fold.judged = with_mean(fold.state.saved)
                fold.losses.append(self._loss_held_out(engine, fold))
            for found in self._ranks.exchanged({fold.number: fold.losses for fold in self._ranks.mine}):
                for number, losses in found.items():
                    self.folds[number].losses = losses
        for fold in self._ranks.mine:
            self._decide(engine, fold)
            assert fold.best is not None
            fold.begin(fold.best, self.blocks[fold.state.t])

    def _first_look(self, engine: Engine, fold: Fold) -> None:
        """Before the first step."""
        s, block = fold.state, self.blocks[fold.state.t]
        self._begin_block(fold)
        engine.load(block)
        engine.theta_fix(s.alpha, block)
        fold.judged = engine.optimiser(s.alpha[block], s.beta, self.settings.weight_decay).save()

    def _decide(self, engine: Engine, fold: Fold) -> None:
        """Go on from where the fold is, or go back to its best, as the losses of all of them say."""
        if fold.decided == len(fold.losses):
            return
        assert fold.judged is not None
        last, block = len(fold.losses) - 1, self.blocks[fold.state.t]
        found = self._verdict(last + 1)
        fold.unseen = fold.unseen if last else [torch.empty(0)] * len(fold.held_out)
        for part in range(len(fold.held_out)):
            other = [losses[-1 - part] for losses in fold.losses]  # of two the other one
            if all(other[last] < loss for loss in other[:last]):
                fold.unseen[part] = coefficients(fold.judged["x"], block, fold.state).clone()
        if found.best == last:
            fold.best = fold.judged
        assert fold.best is not None
        if found.restart:
            start = fold.at_block
            optimiser = engine.optimiser(start.alpha[block], start.beta, self.settings.weight_decay)
            fold.begin(optimiser.save(), block)
        elif found.best != last:
            fold.begin(fold.best, block)
        fold.decided, fold.judged = last + 1, None
        fold.state.pace = found.rate / (self.settings.lr or 1.0)  # zero stays zero

    def _batch(self, fold: Fold, i: int) -> Tensor:
        return super()._batch(fold, i - self._again)

    def _verdict(self, judgements: int) -> Verdict:
        """What followed, or follows, from the first so many."""
        return verdict(together(self.folds)[:judgements], self._steps_of_a_block, self.settings.lr)

    def _loss_held_out(self, engine: Engine, fold: Fold) -> list[float]:
        """The mean loss, the one that is learned with, of what is judged, on each part of the samples left out."""
        assert fold.judged is not None
        s, block, x = fold.state, self.blocks[fold.state.t], fold.judged["x"]
        alpha = coefficients(x, block, s)
        c = alpha.softmax(dim=0) if self.method.simplex else alpha
        engine.mix(engine.fixed, c.to(self.live.device, self.live.dtype))
        beta = None if s.beta is None else float(x[-1])
        measured = [engine.loss_on(part, beta) for part in fold.held_out]
        losses = [loss if math.isfinite(loss) else math.inf for loss in measured]  # nothing is less than NaN
        sizes = [len(part) for part in fold.held_out]
        loss = sum(size * one for size, one in zip(sizes, losses, strict=True)) / sum(sizes)
        self._enter("held_out", fold, s.j, loss)
        told = {"block": s.t, "fold": fold.number, "step": s.j, "loss": finite(loss)}
        self.listen(Event("held_out", told))
        return losses

    def _left(self) -> tuple[int, int]:
        _, most = super()._left()
        J, mine = self._steps_of_a_block, self._ranks.mine
        now, later = (earliest(losses, J, self.settings.lr) for losses in (together(self.folds), ()))
        blocks = [len(self.blocks) - fold.state.t for fold in mine]
        return sum(now + later * (n - 1) for n in blocks) - sum(fold.state.j for fold in mine), most

    def _end_block(self) -> None:
        for fold in self.folds:
            if fold.skipped > fold.taken / 2:  # it may have stopped long before J
                raise self._stopped(fold)
            s = fold.state
            s.t, s.j, s.saved = s.t + 1, 0, None
        if self.folds[0].state.t < len(self.blocks):
            alpha = torch.stack([fold.state.alpha for fold in self.folds]).mean(dim=0)
            beta = average(self.folds, self.method.simplex)[1]
            for fold in self.folds:
                fold.state.alpha.copy_(alpha)
                fold.state.beta = beta
        super()._end_block()


def mixes_fast(live: Live) -> bool:
    """Whether mixing what is loaded takes less time than reading one ingredient from its file."""
    return live.device.type == "cuda"

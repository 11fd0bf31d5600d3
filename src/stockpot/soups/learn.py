"""Whoever drives Algorithm 1: folds, early stopping, saving and going on, signals, and memory that runs out.

The algorithm is soups/mehl.py. A *fold* (soups/fold.py) is one set of coefficients and the data it learns from: one
fold with all fitting data for the plain methods, several for cross-fitting, which a loaded block serves one after the
other. Several ranks divide every batch, or the folds (soups/arrangement.py): then each learns its own as a process
alone does, and all tell each other what came of it at the end.

A fold with data left out is judged by its loss there, every J/30 steps, and keeps the coefficients that were best. What
is judged is the mean of the coefficients since the last judgement: less noisy than where the last step ended. Where the
loss fell, the pace rises; where it did not, the fold goes back to its best at half the pace, and gives up at a
sixteenth. docs/search.md has the evidence.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stockpot import ranks
from stockpot.engine import Engine, Live, Options
from stockpot.engine.engine import BURST
from stockpot.engine.plan import NAMES
from stockpot.errors import LearningError, StockpotError, describe
from stockpot.events import Event
from stockpot.signals import Stop, held
from stockpot.soup import weights as mixing
from stockpot.soups import arrangement
from stockpot.soups.fold import Fold, check_same_settings, fold_states, restore_folds
from stockpot.soups.mehl import State, mehl_soup, schedule, weights
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings, as_json, block_size_for, steps_for
from stockpot.task.data import forked_random

EVALUATIONS = 30  # judgements per block
SLOWEST, FASTEST = (0.5**4, 2.0**10)  # of the rate: a fold gives up at the first, and goes no faster than the second
FASTER, SLOWER = 1.5, 0.5
Put = Callable[[Sequence[int]], None]
KINDS = ("step", "held_out", "skipped")  # of entries in the history


def learned_soup(problem: Problem, method: Method, settings: Settings, store: StateStore | None) -> Decision:
    """Mixing weights learned on all fitting data, or cross-fitted from the mean where folds are asked for."""
    if settings.folds > 1:
        from stockpot.soups.crossfit import cross_fitted

        return cross_fitted(problem, method, settings, store)
    layout = problem.layout(settings.granularity)
    with problem.live(layout) as live:
        learner = Learner(problem, live, method, settings, [Fold(0, problem.task.fit)], store)
        learner.run()
    fold = learner.folds[0]
    W = weights(fold.state.alpha, method.simplex)
    return Decision(W, layout, fold.state.beta, history=learner.history(), models_used=_used(W), notes=learner.notes())


class Learner:
    """Learns every fold; afterwards `fold.state.alpha` is the result."""

    def __init__(
        self,
        problem: Problem,
        live: Live,
        method: Method,
        settings: Settings,
        folds: list[Fold],
        store: StateStore | None = None,
    ) -> None:
        self.problem, self.live, self.method, self.settings = problem, live, method, settings
        self.folds, self.listen, self._store = folds, problem.listen, store
        self._way = ranks.decided_once(lambda: arrangement.way(settings, problem.task))
        alone = self._way == "folds"
        self._mine = [fold for fold in folds if not alone or arrangement.owner(fold.number, self._way) == ranks.own()]
        K, G = len(problem.pool), len(live.layout)
        # Who is loaded with whom goes by content, not by place in the pool: a permuted pool gives a permuted W.
        ranked = sorted(range(K), key=lambda k: problem.facts.digests[k])
        drawn = schedule(
            K, block_size_for(settings, K), passes=settings.passes, blocks=settings.blocks, seed=settings.seed
        )
        self._rank = {k: place for place, k in enumerate(ranked)}
        self.blocks = [sorted(ranked[i] for i in block) for block in drawn]
        self._options = Options(**{f.name: getattr(settings, f.name) for f in fields(Options)})
        self._limit = K  # models loaded at a time; lower after running out of memory
        self._engine: Engine | None = None
        self._entries: list[tuple[int, int, int, int, float, float]] = []  # kind, block, fold, step, loss, rate
        self._saved_at = time.monotonic()
        self._paced: float | None = None  # when the first steps were done; infinite once the pace was told
        self._stop = Stop()
        beta = 1.0 if settings.beta and problem.task.can_scale_logits else None
        for fold in folds:
            alpha = torch.zeros(K, G, dtype=live.dtype)
            if fold.start is not None:
                alpha.copy_(mixing.chosen(K, G, fold.start) - 1 / K)
            fold.state = State(alpha, beta)
        # Where a block that cannot be finished begins again, by fold.
        self._at_block = {fold.number: fold.block_start() for fold in folds}

    def run(
        self,
        judge: Callable[[Sequence[Fold]], None] | None = None,
        begin: Callable[[Put | None], Sequence[tuple[int, ...]]] | None = None,
    ) -> None:
        """`judge` is called in the end for every fold, and for all of them, when their average is in the model.

        `begin` finds where the folds set out from, which are the means of some ingredients. Where a GPU holds all of
        them, it is given what puts such means into the model without a look at the files.
        """
        s = self.settings
        self._restore()
        while True:
            try:
                if begin is not None:
                    put = self._means(self._open_engine()) if mixes_fast(self.live) else None
                    if put is None and self._engine is not None:
                        self._engine.close()  # what files are read into needs the room
                        self._engine = None
                    self._set_out(begin(put))
                    put = begin = None
                    self.live.task.evaluator.forget()  # learning needs the room of its graphs
                engine = self._engine or self._open_engine()
                # Losses may draw numbers: these depend on the step, not on what ran before.
                with (
                    self._shared(), forked_random(self.live.device) as reseed, self.live.task.learning(),
                    held() as self._stop,
                ):  # fmt: skip
                    while unfinished := [fold for fold in self._mine if fold.state.t < len(self.blocks)]:
                        fold = min(unfinished, key=lambda fold: fold.state.t)
                        J = steps_for(s, len(fold.data))
                        self._begin_block(engine, fold)
                        for _ in mehl_soup(
                            engine, self.blocks[: fold.state.t + 1], fold.data, partial(self._batch, fold),
                            J=J, eta=s.lr, weight_decay=s.weight_decay, simplex=self.method.simplex,
                            every=_every(fold, J), seed=partial(_reseed, reseed, self._stream(fold)), state=fold.state,
                        ):  # fmt: skip
                            self._after_steps(engine, fold, J)
                        self._end_block(fold)
                if judge is not None:
                    for folds in [*([fold] for fold in self.folds), self.folds]:
                        self._put(engine, folds)
                        judge(folds)
                return
            except torch.OutOfMemoryError as error:
                if ranks.active():
                    raise  # the others did not run out: they would go on with another plan
                self._take_less(error)
            finally:
                if self._engine is not None:
                    self._engine.close()
                    self._engine = None

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Where each rank learns folds by itself, all know in the end what came of every one, or why it had to stop."""
        if self._way in ("data", "shards"):
            yield
            return
        failed: StockpotError | None = None
        with ranks.apart():
            try:
                yield
            except StockpotError as error:
                failed = error
        mine = [fold for fold in self._mine if arrangement.owner(fold.number, self._way) == ranks.own()]
        numbers = {fold.number for fold in mine}
        entries = [entry for entry in self._entries if entry[2] in numbers]
        found = ranks.gathered((fold_states(mine, self._at_block), entries, failed))
        for _, _, reason in found:
            if reason is not None:
                raise reason
        for (tensors, values), _, _ in found:
            self._at_block |= restore_folds(self.folds, tensors, values)
        # In the order in which one process would have learned them.
        every = [entry for _, entries, _ in found for entry in entries]
        self._entries = sorted(every, key=lambda entry: entry[1:3])

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

    def _set_out(self, starts: Sequence[tuple[int, ...]]) -> None:
        """Make these means of ingredients the folds' coefficients."""
        K, G = len(self.problem.pool), len(self.live.layout)
        for fold, start in zip(self.folds, starts, strict=True):
            fold.start = start
            fold.state.alpha.copy_(mixing.chosen(K, G, start) - 1 / K)
        self._at_block = {fold.number: fold.block_start() for fold in self.folds}

    def _batch(self, fold: Fold, i: int) -> Tensor:
        """The samples of step i."""
        return fold.data.order(self._stream(fold), i, self.settings.batch_size)

    def _stream(self, fold: Fold) -> int:
        """The seed of a fold's random numbers."""
        return self.settings.seed * 1009 + fold.number

    def _begin_block(self, engine: Engine, fold: Fold) -> None:
        s = fold.state
        if s.j:
            return  # it goes on where an earlier process stopped
        block = self.blocks[s.t]
        if fold is self._mine[0]:
            names = [self.problem.pool.names[k] for k in block]
            self.listen(Event("block", {"block": s.t, "of": len(self.blocks), "models": names}))
        s.pace, fold.taken, fold.skipped = 1.0, 0, 0
        fold.best, fold.best_beta = s.alpha[block].clone(), s.beta
        if fold.held_out is not None and not math.isfinite(fold.best_loss):
            engine.load(block)
            engine.theta_fix(s.alpha, block)
            loss = self._judged(engine, fold, fold.best, s.beta)
            fold.best_loss = loss if math.isfinite(loss) else math.inf  # nothing is less than NaN

    def _after_steps(self, engine: Engine, fold: Fold, J: int) -> None:
        s = fold.state
        self.live.check_bound()
        fold.taken += len(s.steps)
        for j, step in enumerate(s.steps, start=s.j - len(s.steps)):
            place = {"block": s.t, "fold": fold.number, "step": j, "of": J}
            if step.skipped:
                fold.skipped += 1
                self._enter("skipped", fold, j, step.loss)
                found = "a gradient that is not finite" if math.isfinite(step.loss) else f"loss {step.loss}"
                self.listen(Event("skipped", {**place, "found": found}))
            else:
                self._enter("step", fold, j, step.loss, step.rate)
                self.listen(Event("step", {**place, "loss": step.loss, "lr": step.rate}))
        if fold.held_out is not None and (s.j % _every(fold, J) == 0 or s.j == J):
            self._judge(engine, fold, J)
        self._tell_pace(fold, J)
        if s.t + 1 < len(self.blocks):
            engine.prefetch(self.blocks[s.t + 1])
        if fold.skipped > (fold.taken if s.j == J else J) / 2:  # a fold may give up before J
            raise self._stopped(fold)
        if self._due():
            self._save()

    def _tell_pace(self, fold: Fold, J: int) -> None:
        """Say once how long learning will take at most: the first steps are over, the next ones were timed."""
        now, before = time.perf_counter(), self._paced
        if before is None or before == math.inf:
            self._paced = now if before is None else before
            return
        self._paced = math.inf
        rest = sum((len(self.blocks) - each.state.t) * J - each.state.j for each in self._mine)
        K, each = len(self.problem.pool), self.problem.seconds_each
        told = {"seconds": rest * (now - before) / len(fold.state.steps), "steps": rest}
        self.listen(Event("pace", {**told, "greedy": None if each is None else 2 * K * each}))

    def _end_block(self, fold: Fold) -> None:
        fold.taken_before, fold.taken = fold.taken_before + fold.taken, 0
        fold.skipped_before, fold.skipped = fold.skipped_before + fold.skipped, 0
        if len({fold.state.t for fold in self._mine}) == 1:
            self._at_block |= {fold.number: fold.block_start() for fold in self._mine}
        self._save()

    # Judging on the fold left out ---------------------------------------------------------------------

    def _judge(self, engine: Engine, fold: Fold, J: int) -> None:
        s = fold.state
        assert s.optimiser is not None
        alpha, beta = s.optimiser.mean()
        loss = self._judged(engine, fold, alpha, beta)
        better = loss < fold.best_loss
        if better:
            fold.best, fold.best_beta, fold.best_loss = alpha, beta, loss
            s.pace = min(FASTEST, s.pace * FASTER)
        else:
            s.pace *= SLOWER
            if s.pace <= SLOWEST:
                s.j = J
        if not better or s.j == J:
            assert fold.best is not None
            s.optimiser.restart(fold.best, fold.best_beta)

    def _judged(self, engine: Engine, fold: Fold, alpha: Tensor, beta: float | None) -> float:
        """The mean loss, the one that is learned with, of these coefficients (b, G) on the samples left out."""
        assert fold.held_out is not None
        c = alpha.softmax(dim=0) if self.method.simplex else alpha
        engine.mix(engine.fixed, c.to(self.live.device, self.live.dtype))
        loss = engine.loss_on(fold.held_out, beta)
        s = fold.state
        self._enter("held_out", fold, s.j, loss)
        told = {"block": s.t, "fold": fold.number, "step": s.j, "loss": finite(loss)}
        self.listen(Event("held_out", told))
        return loss

    def _put(self, engine: Engine, folds: Sequence[Fold]) -> None:
        """Make the model the average of these folds' soups."""
        alphas = [fold.state.alpha for fold in folds]
        c = torch.stack([a.softmax(dim=0) if self.method.simplex else a for a in alphas]).mean(dim=0)  # (K, G)
        block = self.blocks[-1][: engine.plan.block_size]  # any will do: theta_fix has the share of all others
        engine.load(block)
        engine.mix(engine.theta_fix(c, block), c[block].to(self.live.device, self.live.dtype))

    # What happened ------------------------------------------------------------------------------------

    def _enter(self, kind: str, fold: Fold, j: int, loss: float, rate: float = math.nan) -> None:
        self._entries.append((KINDS.index(kind), fold.state.t, fold.number, j, loss, rate))

    def history(self) -> tuple[dict[str, Any], ...]:
        """Every step and judgement, in order."""
        return tuple(
            {"kind": KINDS[kind], "block": t, "fold": fold, "step": j, "loss": finite(loss), "lr": finite(rate)}
            for kind, t, fold, j, loss, rate in self._entries
        )

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        found = []
        skipped = sum(fold.skipped_before for fold in self.folds)
        if skipped:
            taken = sum(fold.taken_before for fold in self.folds)
            found.append(f"{skipped} of {taken} steps were skipped: their loss or gradient was not finite")
        if self.settings.accumulate > 1 and not self.problem.task.may_be_cut:
            found.append(
                f"the loss of a batch is not that of its {self.settings.accumulate} pieces: accumulate changes what is"
                " learned"
            )
        if self.settings.beta and self.folds[0].state.beta is None:
            found.append("beta was not learned: the task's loss is its own, so there are no logits to scale")
        return tuple(found)

    # Memory -------------------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        self.live.drop_theta()
        engine = self._engine = Engine(
            self.live, self._options, self.folds[0].data,
            block_size=min(self._limit, max(map(len, [*self.blocks[self._first_open() :], self.blocks[-1]]))),
            fixed_block=self.method.simplex or not isinstance(self.settings.block_size, str),
            theta_bar=self.problem.theta_bar(self.live),
            last=self.problem.last_block,
            listen=self.listen,
        )  # fmt: skip
        finite_here = not engine.theta_bar.numel() or bool(
            torch.stack(torch.aminmax(engine.theta_bar)).isfinite().all()
        )
        if not all(ranks.gathered(finite_here)):
            self.live.pool.verify_finite(self.listen)  # names the files to blame
            raise LearningError.of(
                "mean of the ingredients",
                expected="finite weights",
                found="sums that overflow, although every ingredient is finite",
                fix="look for absurdly large weights with `stockpot inspect`, and leave those ingredients out",
            )
        self.problem.remember_theta_bar(self.live, engine.theta_bar)
        plan = engine.plan
        self._options = replace(
            self._options,
            directions=NAMES[plan.dtype], accumulate=plan.accumulate, low_memory=plan.low_memory,
        )  # fmt: skip
        self._cut(plan.block_size)
        return engine

    def _take_less(self, error: BaseException) -> None:
        """Blocks of half the size, then rounder directions, then low-memory mode; each only ever goes down."""
        planned = self._limit if self._engine is None else min(self._limit, self._engine.plan.block_size)
        size = min(planned, max(map(len, self.blocks)))
        o = self._options
        if size > 1 and not self.method.simplex:
            self._limit = -(-size // 2)
            change = f"{self._limit} models at a time instead of {size}"
        elif o.directions in ("auto", "fp32", "bf16") and self.live.device.type == "cuda":
            self._options = replace(o, directions="int8")
            change = "models kept as int8"
        elif not o.low_memory:
            self._options = replace(o, low_memory=True)
            change = "gradients and activations in low-memory mode"
        else:
            raise error
        self.problem.last_block.clear()
        self._begin_again()
        self._cut(self._limit)
        self.listen(Event("memory", {"text": f"out of memory; going on with {change}"}))
        if self.live.device.type == "cuda":
            torch.cuda.empty_cache()

    def _first_open(self) -> int:
        """The first block that some fold has not finished."""
        return min(state.t for state, _ in self._at_block.values())

    def _begin_again(self) -> None:
        """All folds back to where the block under way began."""
        for fold in self.folds:
            state, best_loss = self._at_block[fold.number]
            fold.state, fold.best_loss = replace(state, alpha=state.alpha.clone()), best_loss
            fold.taken = fold.skipped = 0
        self._entries = [entry for entry in self._entries if entry[1] < self._at_block[entry[2]][0].t]

    def _cut(self, size: int) -> None:
        """Blocks of at most `size` models from the one under way on, which begins again where it is cut."""
        if self.method.simplex:
            return  # a softmax over all models cannot be cut
        t = self._first_open()
        by_content = [sorted(block, key=self._rank.__getitem__) for block in self.blocks[t:]]
        rest = [sorted(block[i : i + size]) for block in by_content for i in range(0, len(block), size)]
        if rest != self.blocks[t:]:
            self._begin_again()
            self.blocks = self.blocks[:t] + rest

    # Saving and going on ------------------------------------------------------------------------------

    def _due(self) -> bool:
        interval = math.inf if self._store is None else self._store.interval
        return self._stop.asked or time.monotonic() - self._saved_at > interval

    def _save(self) -> None:
        if self._store is not None:
            tensors, values = fold_states(self._mine, self._at_block)
            tensors["history"] = torch.tensor(self._entries, dtype=torch.float64).reshape(-1, 6)
            o = self._options
            values |= {
                "starts": [None if fold.start is None else list(fold.start) for fold in self.folds],
                "settings": as_json(self.settings),
                "blocks": self.blocks,
                "options": [o.directions, o.accumulate, o.low_memory],
            }
            self._store.save(tensors, values, ranks.own() if self._way == "folds" else None)
        self._saved_at = time.monotonic()
        self._stop.obey()

    def _restore(self) -> None:
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return
        tensors, values = saved
        check_same_settings(values.get("settings"), as_json(self.settings))
        self._entries = [
            (int(kind), int(t), int(fold), int(j), loss, rate)
            for kind, t, fold, j, loss, rate in tensors["history"].tolist()
        ]
        self.blocks = values["blocks"]
        directions, accumulate, low_memory = values["options"]
        self._options = replace(self._options, directions=directions, accumulate=accumulate, low_memory=low_memory)
        self._at_block |= restore_folds(self.folds, tensors, values)

    def _stopped(self, fold: Fold) -> LearningError:
        s = fold.state
        alpha = s.alpha.clone()
        if fold.held_out is not None and fold.best is not None:
            alpha[self.blocks[s.t]] = fold.best
        which = f", fold {fold.number + 1}" if fold.held_out is not None else ""
        return LearningError(
            describe(
                f"learning at block {s.t + 1} of {len(self.blocks)}, step {s.j}{which}",
                expected="steps whose loss and gradient are finite",
                found=f"{fold.skipped} of {fold.taken} skipped",
                fix="lower lr, look for what the loss cannot take (the logarithm of zero, a division by zero), or"
                " use fp32 instead of fp16 autocast; the best soup so far is in the error's .best",
            ),
            best=weights(alpha, self.method.simplex),
        )


def mixes_fast(live: Live) -> bool:
    """Whether mixing what is loaded takes less time than reading one ingredient from its file."""
    return live.device.type == "cuda"


def _reseed(reseed: Callable[[int], None], stream: int, i: int) -> None:
    reseed((stream * 1_000_000_007 + i) % 2**63)


def _every(fold: Fold, J: int) -> int:
    """Steps between two judgements, or at most between two looks at the device."""
    return BURST if fold.held_out is None else max(1, J // EVALUATIONS)


def _used(W: Tensor) -> int:
    return int((W != 0).any(dim=1).sum())

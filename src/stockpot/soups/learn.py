"""Whoever drives Algorithm 1: folds, early stopping, saving and going on, signals, and memory that runs out.

The algorithm is soups/mehl.py. A *fold* (soups/fold.py) is one set of coefficients and the data it learns from: one
fold with all fitting data for the plain methods, several for cross-fitting, which a loaded block serves one after the
other. Several ranks divide every batch, or the folds (soups/arrangement.py): then each learns its own as a process
alone does, and all tell each other what came of it at the end.

Folds with data left out are judged, paced and stopped together (soups/stopping.py). What is judged is the mean of the
coefficients since the last judgement: less noisy than where the last step ended. After a block of several, all go on
from their average.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from stockpot import ranks
from stockpot.engine import AdamW, Engine, Live, Options
from stockpot.engine.engine import BURST
from stockpot.engine.optimiser import judged
from stockpot.engine.plan import NAMES
from stockpot.errors import LearningError, StockpotError, describe
from stockpot.events import Event
from stockpot.signals import Stop, held
from stockpot.soup import weights as mixing
from stockpot.soups import arrangement
from stockpot.soups.fold import Fold, average, check_same_settings, coefficients, fold_states, restore_folds
from stockpot.soups.mehl import State, mehl_soup, schedule, weights
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings, as_json, block_size_for, steps_for
from stockpot.soups.stopping import Verdict, earliest, together, verdict
from stockpot.task.data import forked_random

Put = Callable[[Sequence[int]], None]
T = TypeVar("T")
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
        self._apart = self._way in ("folds", "alike")  # whether each rank computes as a process alone does
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
        self._notes: tuple[str, ...] = ()
        beta = 1.0 if settings.beta and problem.task.can_scale_logits else None
        for fold in folds:
            fold.state = State(torch.zeros(K, G, dtype=live.dtype), beta)
        self.start: tuple[int, ...] | None = None  # the ingredients whose mean all set out from; None: all
        # Where a block that cannot be finished begins again, by fold.
        self._at_block = {fold.number: fold.block_start() for fold in folds}

    def run(
        self,
        judge: Callable[[Fold, Tensor], None] | None = None,
        begin: Callable[[Put | None], tuple[int, ...]] | None = None,
    ) -> None:
        """`judge` is called in the end for every fold with the soup that its own samples had no say in, in the model.

        `begin` finds the ingredients whose mean the folds set out from. Where a GPU holds all of them, it is given what
        puts such means into the model without a look at the files.
        """
        s = self.settings
        begin = None if self._restore() else begin
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
                    for fold, until in self._turns(engine):
                        for _ in mehl_soup(
                            engine, self.blocks[: fold.state.t + 1], fold.data, partial(self._batch, fold),
                            J=self._steps_of_a_block, eta=s.lr, weight_decay=s.weight_decay, every=BURST, until=until,
                            simplex=self.method.simplex, seed=partial(_reseed, reseed, self._stream(fold)),
                            state=fold.state,
                        ):  # fmt: skip
                            self._after_steps(engine, fold)
                            if until is None and self._late(0.0):
                                fold.state.t, fold.state.j, fold.state.optimiser = len(self.blocks), 0, None
                                break
                if judge is not None:
                    for fold in self.folds:
                        judge(fold, self._put_unseen(engine, fold))
                return
            except KeyboardInterrupt as error:
                error.best = self._so_far()  # type: ignore[attr-defined]
                raise
            except torch.OutOfMemoryError as error:
                if ranks.active():
                    raise  # the others did not run out: they would go on with another plan
                self._take_less(error)
            finally:
                if self._engine is not None:
                    self._engine.close()
                    self._engine = None

    def _turns(self, engine: Engine) -> Iterator[tuple[Fold, int | None]]:
        """Whose steps of a block come next, all of them or until they are so many; folds are judged in between."""
        while min(fold.state.t for fold in self.folds) < len(self.blocks):
            if self.folds[0].held_out is None:
                self._begin_block(self.folds[0])
                yield self.folds[0], None
            else:
                yield from self._from_judgement_to_judgement(engine)
            self._tell_all()
            self._end_block()

    # A block with folds: all of them from judgement to judgement ---------------------------------------

    def _from_judgement_to_judgement(self, engine: Engine) -> Iterator[tuple[Fold, int]]:
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
            for fold in self._mine:
                if len(fold.losses) > judgement:
                    continue  # it is ahead, in a run that was continued
                if judgement == 0:
                    self._first_look(engine, fold)
                else:
                    self._decide(fold)
                    yield fold, after.next
                    assert fold.state.saved is not None
                    fold.judged = judged(fold.state.saved)
                fold.losses.append(self._loss_held_out(engine, fold))
            for found in self._exchanged({fold.number: fold.losses for fold in self._mine}):
                for number, losses in found.items():
                    self.folds[number].losses = losses
        for fold in self._mine:
            self._decide(fold)
            assert fold.best is not None
            fold.begin(fold.best, self.blocks[fold.state.t])

    def _first_look(self, engine: Engine, fold: Fold) -> None:
        """Before the first step."""
        s, block = fold.state, self.blocks[fold.state.t]
        self._begin_block(fold)
        engine.load(block)
        engine.theta_fix(s.alpha, block)
        fold.judged = AdamW(s.alpha[block], s.beta, self.settings.weight_decay).save()

    def _decide(self, fold: Fold) -> None:
        """Go on from where the fold is, or go back to its best, as the losses of all of them say."""
        if fold.decided == len(fold.losses):
            return
        assert fold.judged is not None
        last, block = len(fold.losses) - 1, self.blocks[fold.state.t]
        found = self._verdict(last + 1)
        if self._verdict(last + 1, without=fold).best == last:
            fold.unseen = coefficients(fold.judged["x"], block, fold.state)
        if found.best == last:
            fold.best = fold.judged
        else:
            assert fold.best is not None
            fold.begin(fold.best, block)
        fold.state.pace, fold.decided, fold.judged = found.pace, last + 1, None

    def _verdict(self, judgements: int, without: Fold | None = None) -> Verdict:
        """What followed, or follows, from the first so many."""
        return verdict(together(self.folds, without)[:judgements], self._steps_of_a_block)

    def _left(self) -> tuple[int, int]:
        """Steps of this process that are left, at least and at most."""
        J, rest = self._steps_of_a_block, [len(self.blocks) - fold.state.t for fold in self._mine]
        done = sum(fold.state.j for fold in self._mine)
        most = J * sum(rest) - done
        if not self._mine or self._mine[0].held_out is None:  # there may be more ranks than folds
            return most, most
        now, later = earliest(together(self.folds), J), earliest((), J)
        return sum(now + later * (blocks - 1) for blocks in rest) - done, most

    # Several ranks --------------------------------------------------------------------------------------

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Where each rank learns folds by itself, all know what came of every one, or why it had to stop."""
        if not self._apart:
            yield
            return
        with ranks.apart():
            try:
                yield
            except StockpotError as error:
                self._exchanged(None, error)
                raise

    def _exchanged(self, mine: T, failed: StockpotError | None = None) -> list[T]:
        """What every rank has, where each learns by itself; an error of one is an error of all."""
        if not self._apart:
            return [mine]
        with ranks.meeting():
            found = ranks.gathered((mine, failed))
        for _, reason in found:
            if reason is not None and reason is not failed:
                raise reason
        return [one for one, _ in found]

    def _tell_all(self) -> None:
        """In the end of a block all ranks know what came of every fold."""
        mine = [fold for fold in self._mine if arrangement.owner(fold.number, self._way) == ranks.own()]
        numbers = {fold.number for fold in mine}
        entries = [entry for entry in self._entries if entry[2] in numbers]
        found = self._exchanged((fold_states(mine, self._at_block), entries))
        if len(found) > 1:
            for (tensors, values), _ in found:
                restore_folds(self.folds, tensors, values)
            self._entries = [entry for _, entries in found for entry in entries]

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

    def _set_out(self, start: tuple[int, ...] | None) -> None:
        """Make the mean of these ingredients the folds' coefficients."""
        self.start = start
        K, G = len(self.problem.pool), len(self.live.layout)
        for fold in self.folds:
            if start is not None:
                fold.state.alpha.copy_(mixing.chosen(K, G, start) - 1 / K)
        self._at_block = {fold.number: fold.block_start() for fold in self.folds}

    @property
    def _steps_of_a_block(self) -> int:
        """Steps of a block, the same for all folds."""
        return steps_for(self.settings, len(self.folds[0].data))

    def _batch(self, fold: Fold, i: int) -> Tensor:
        """The samples of step i."""
        return fold.data.order(self._stream(fold), i, self.settings.batch_size)

    def _stream(self, fold: Fold) -> int:
        """The seed of a fold's random numbers."""
        return self.settings.seed * 1009 + fold.number

    def _begin_block(self, fold: Fold) -> None:
        s = fold.state
        if s.j or fold.losses:
            return  # it goes on
        block = self.blocks[s.t]
        if fold is self._mine[0]:
            names = [self.problem.pool.names[k] for k in block]
            self.listen(Event("block", {"block": s.t, "of": len(self.blocks), "models": names}))
        s.pace, fold.taken, fold.skipped = 1.0, 0, 0

    def _after_steps(self, engine: Engine, fold: Fold) -> None:
        s, J = fold.state, self._steps_of_a_block
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
        self._tell_pace(fold)
        if s.t + 1 < len(self.blocks):
            engine.prefetch(self.blocks[s.t + 1])
        if fold.skipped > J / 2 or (s.j == J and fold.skipped > fold.taken / 2):
            raise self._stopped(fold)
        if self._due():
            self._save()

    def _tell_pace(self, fold: Fold) -> None:
        """Say once how long learning will take at most: the first steps are over, the next ones were timed."""
        now, before = time.perf_counter(), self._paced
        if before is None or before == math.inf:
            self._paced = now if before is None else before
            return
        self._paced = math.inf
        K, each = len(self.problem.pool), self.problem.seconds_each
        each_step, budget = (now - before) / len(fold.state.steps), self.problem.deadline - time.monotonic()
        least, most = (min(budget, steps * each_step) for steps in self._left())
        told = {"seconds": most, "least": least, "steps": self._left()[1]}
        self.listen(Event("pace", {**told, "greedy": None if each is None else 2 * K * each}))

    def _end_block(self) -> None:
        for fold in self.folds:
            s = fold.state
            if fold.held_out is not None:
                if fold.skipped > fold.taken / 2:  # it may have stopped long before J
                    raise self._stopped(fold)
                s.t, s.j, s.saved = s.t + 1, 0, None
            fold.taken_before, fold.skipped_before = fold.taken_before + fold.taken, fold.skipped_before + fold.skipped
            if s.t < len(self.blocks):
                fold.forget()
        if self.folds[0].held_out is not None and self.folds[0].state.t < len(self.blocks):
            alpha = torch.stack([fold.state.alpha for fold in self.folds]).mean(dim=0)
            beta = average(self.folds, self.method.simplex)[1]
            for fold in self.folds:
                fold.state.alpha.copy_(alpha)
                fold.state.beta = beta
        self._at_block = {fold.number: fold.block_start() for fold in self.folds}
        self._save()

    # Judging on what a fold leaves out ----------------------------------------------------------------

    def _loss_held_out(self, engine: Engine, fold: Fold) -> float:
        """The mean loss, the one that is learned with, of what is judged, on the samples left out."""
        assert fold.held_out is not None
        assert fold.judged is not None
        s, block, x = fold.state, self.blocks[fold.state.t], fold.judged["x"]
        alpha = coefficients(x, block, s)
        c = alpha.softmax(dim=0) if self.method.simplex else alpha
        engine.mix(engine.fixed, c.to(self.live.device, self.live.dtype))
        loss = engine.loss_on(fold.held_out, None if s.beta is None else float(x[-1]))
        self._enter("held_out", fold, s.j, loss)
        told = {"block": s.t, "fold": fold.number, "step": s.j, "loss": finite(loss)}
        self.listen(Event("held_out", told))
        return loss

    def _put_unseen(self, engine: Engine, fold: Fold) -> Tensor:
        """Make the model the fold's soup as it was when the other folds were best together; returns its weights."""
        alpha, block = fold.state.alpha.clone(), self.blocks[-1]
        if fold.unseen is not None:
            alpha[block] = fold.unseen.to(alpha)
        c = alpha.softmax(dim=0) if self.method.simplex else alpha
        engine.load(block)
        engine.mix(engine.theta_fix(c, block), c[block].to(self.live.device, self.live.dtype))
        return weights(alpha, self.method.simplex)

    def _late(self, seconds: float) -> bool:
        """Whether the budget would be over when this has been done."""
        late = self.settings.budget is not None and any(self._exchanged(self.problem.late(seconds)))
        if late:
            self._notes = (f"its budget of {self.settings.budget:g} s ended learning before it would have stopped",)
        return late

    def _so_far(self) -> Tensor:
        """The mixing weights of the best that is known now."""
        folds = self._mine or self.folds  # there may be more ranks than folds
        for fold in folds:
            if fold.best is not None and fold.state.t < len(self.blocks):
                fold.begin(fold.best, self.blocks[fold.state.t])
        return average(folds, self.method.simplex)[0]

    # What happened ------------------------------------------------------------------------------------

    def _enter(self, kind: str, fold: Fold, j: int, loss: float, rate: float = math.nan) -> None:
        self._entries.append((KINDS.index(kind), fold.state.t, fold.number, j, loss, rate))

    def history(self) -> tuple[dict[str, Any], ...]:
        """Every step and judgement, fold by fold."""
        return tuple(
            {"kind": KINDS[kind], "block": t, "fold": fold, "step": j, "loss": finite(loss), "lr": finite(rate)}
            for kind, t, fold, j, loss, rate in sorted(self._entries, key=lambda entry: entry[1:3])
        )

    def notes(self) -> tuple[str, ...]:
        """What a reader of the result must know."""
        found = [*self._notes]
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
        return min(state.t for state in self._at_block.values())

    def _begin_again(self) -> None:
        """All folds back to where the block under way began."""
        for fold in self.folds:
            state = self._at_block[fold.number]
            fold.state = replace(state, alpha=state.alpha.clone())
            fold.forget()
        self._entries = [entry for entry in self._entries if entry[1] < self._at_block[entry[2]].t]

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
            tensors, values = fold_states(self.folds, self._at_block)
            tensors["history"] = torch.tensor(self._entries, dtype=torch.float64).reshape(-1, 6)
            o = self._options
            values |= {
                "start": None if self.start is None else list(self.start),
                "settings": as_json(self.settings),
                "blocks": self.blocks,
                "options": [o.directions, o.accumulate, o.low_memory],
            }
            self._store.save(tensors, values, ranks.own() if self._way == "folds" else None)
        self._saved_at = time.monotonic()
        self._stop.obey()

    def _restore(self) -> bool:
        """Go on from what an earlier process saved, if it did."""
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return False
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
        self.start = None if values["start"] is None else tuple(values["start"])
        return True

    def _stopped(self, fold: Fold) -> LearningError:
        s = fold.state
        alpha = s.alpha.clone()
        if fold.best is not None:
            fold.begin(fold.best, self.blocks[s.t])
            alpha = s.alpha
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


def _used(W: Tensor) -> int:
    return int((W != 0).any(dim=1).sum())

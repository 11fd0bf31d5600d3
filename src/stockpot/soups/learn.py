"""Whoever drives Algorithm 1: blocks, saving and going on, signals, and memory that runs out.

The algorithm is soups/mehl.py. A *fold* (soups/fold.py) is one set of coefficients and the data it learns from. Here
there is one, with all fitting data; several, which a loaded block serves one after the other, are soups/judging.py.
Several ranks divide every batch, or the folds (soups/arrangement.py).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stockpot import ranks
from stockpot.engine import Engine, Live, Options
from stockpot.engine.engine import BURST
from stockpot.engine.memory import NAMES, ROUNDED
from stockpot.errors import LearningError, describe
from stockpot.events import Event
from stockpot.signals import Stop, held
from stockpot.soups.arrangement import Arrangement, Entry
from stockpot.soups.fold import Fold, average, check_format, check_same_settings, fold_states, restore_folds
from stockpot.soups.mehl import State, mehl_soup, weights
from stockpot.soups.problem import Decision, Problem, StateStore, finite
from stockpot.soups.registry import Method
from stockpot.soups.settings import Settings, as_json, steps_for
from stockpot.task.data import forked_random

TIMED = 10  # steps, at least, by which it is said how long learning takes: one alone may take ten times as long
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
    return Decision(W, layout, fold.state.beta, history=learner.history(), notes=learner.notes())


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
        self._ranks = Arrangement(settings, problem.task, folds)
        K, G = len(problem.pool), len(live.layout)
        self.blocks = problem.blocks(settings)
        self._options = Options(**{f.name: getattr(settings, f.name) for f in fields(Options)})
        self._limit = K  # models loaded at a time; lower after running out of memory
        self._engine: Engine | None = None
        self._entries: list[Entry] = []
        self._saved_at = time.monotonic()
        self._paced: tuple[float, float] | None = None  # when the first steps were done, and how many; infinite: told
        self._stop = Stop()
        self._ended = False  # because the budget was over
        beta = 1.0 if settings.beta and problem.task.can_scale_logits else None
        for fold in folds:
            fold.state = State(torch.zeros(K, G, dtype=live.dtype), beta)
            fold.set_out()

    def run(self) -> None:
        """Learn, from where an earlier process stopped if it did."""
        s = self.settings
        self._continued = self._restore()
        while True:
            try:
                self._prepare()
                engine = self._engine or self._open_engine()
                # Losses may draw numbers: these depend on the step, not on what ran before.
                with (
                    self._ranks.working(), forked_random(self.live.device) as reseed, self.live.task.learning(),
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
                self._finish(engine)
                return
            except KeyboardInterrupt as error:
                error.best = self._so_far()  # type: ignore[attr-defined]
                raise
            except torch.OutOfMemoryError as error:
                if ranks.active():
                    raise  # the others did not run out: they would go on with another plan
                self._take_less(error)
            finally:
                self._close_engine()

    def _prepare(self) -> None:
        """What comes before the first step."""

    def _finish(self, engine: Engine) -> None:
        """What comes after the last step, while a block is loaded."""

    def _turns(self, engine: Engine) -> Iterator[tuple[Fold, int | None]]:
        """Whose steps of a block come next, all of them or until they are so many."""
        while min(fold.state.t for fold in self.folds) < len(self.blocks):
            yield from self._turns_of_a_block(engine)
            # In the end of a block all ranks know what came of every fold.
            self._entries = self._ranks.told(self.folds, self._entries)
            self._end_block()

    def _turns_of_a_block(self, engine: Engine) -> Iterator[tuple[Fold, int | None]]:  # noqa: ARG002
        self._begin_block(self.folds[0])
        yield self.folds[0], None

    def _left(self) -> tuple[int, int]:
        """Steps of this process that are left, at least and at most."""
        mine = self._ranks.mine
        steps = self._steps_of_a_block * sum(len(self.blocks) - fold.state.t for fold in mine)
        most = steps - sum(fold.state.j for fold in mine)
        return most, most

    @property
    def _steps_of_a_block(self) -> int:
        """Steps of a block, the same for all folds."""
        return self._steps_with(self.settings)

    def _steps_with(self, settings: Settings) -> int:
        return steps_for(settings, *(len(fold.data) for fold in self.folds), blocks=len(self.blocks))

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
        if fold is self._ranks.mine[0]:
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
        self._tell_pace()
        if s.t + 1 < len(self.blocks):
            engine.prefetch(self.blocks[s.t + 1])
        if fold.skipped > J / 2 or (s.j == J and fold.skipped > fold.taken / 2):
            raise self._stopped(fold)
        if self._due():
            self._save()

    def _tell_pace(self) -> None:
        """Say once how long learning will take: the first steps are over, and enough others were timed."""
        now, taken = time.perf_counter(), sum(fold.taken for fold in self._ranks.mine)
        before, first = self._paced = self._paced or (now, taken)
        if taken - first < TIMED:
            return
        self._paced = now, math.inf
        K, each = len(self.problem.pool), self.problem.seconds_each
        each_step, budget = (now - before) / (taken - first), self.problem.deadline - time.monotonic()
        least, most = (min(budget, steps * each_step) for steps in self._left())
        told = {"seconds": most, "least": least, "steps": self._left()[1]}
        self.listen(Event("pace", {**told, "greedy": None if each is None else 2 * K * each}))

    def _end_block(self) -> None:
        for fold in self.folds:
            if fold.state.t < len(self.blocks):
                fold.forget()
            fold.set_out()
        self._save()

    def _late(self, seconds: float) -> bool:
        """Whether the budget would be over when this has been done."""
        late = self.settings.seconds < math.inf and any(self._ranks.exchanged(self.problem.late(seconds)))
        self._ended = self._ended or late
        return late

    def _so_far(self) -> Tensor:
        """The mixing weights of the best that is known now."""
        folds = self._ranks.mine or self.folds  # there may be more ranks than folds
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
        found, J, budget = list[str](), self._steps_of_a_block, self.settings.budget
        cut = self._steps_with(replace(self.settings, budget=None)) > J  # by a budget in samples
        if self._ended or (cut and self._took(J)):
            budget = budget if isinstance(budget, str) else f"{budget:g} s"
            found.append(f"its budget of {budget} ended learning before it would have stopped")
        kinds = Counter(KINDS[entry[0]] for entry in self._entries)
        if kinds["skipped"]:
            taken = kinds["step"] + kinds["skipped"]
            found.append(f"{kinds['skipped']} of {taken} steps were skipped: their loss or gradient was not finite")
        if self.settings.accumulate > 1 and not self.problem.task.may_be_cut:
            found.append(
                f"the loss of a batch is not that of its {self.settings.accumulate} pieces: accumulate changes what is"
                " learned"
            )
        if self.settings.beta and self.folds[0].state.beta is None:
            found.append("beta was not learned: the task's loss is its own, so there are no logits to scale")
        return tuple(found)

    def _took(self, J: int) -> bool:
        """Whether some block was learned for so many steps."""
        return max((entry[3] + 1 for entry in self._entries if KINDS[entry[0]] != "held_out"), default=0) >= J

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

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _take_less(self, error: BaseException) -> None:
        """Blocks of half the size, then rounder directions, then low-memory mode; each only ever goes down."""
        planned = self._limit if self._engine is None else min(self._limit, self._engine.plan.block_size)
        size = min(planned, max(map(len, self.blocks)))
        o = self._options
        if size > 1 and not self.method.simplex:
            self._limit = -(-size // 2)
            change = f"{self._limit} models at a time instead of {size}"
        elif o.directions not in ("fp64", NAMES[ROUNDED[-1]]) and self.live.device.type == "cuda":
            self._options = replace(o, directions=NAMES[ROUNDED[-1]])
            change = f"models kept as {self._options.directions}"
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
        return min(fold.at_block.t for fold in self.folds)

    def _begin_again(self) -> None:
        """All folds back to where the block under way began."""
        for fold in self.folds:
            fold.state = replace(fold.at_block, alpha=fold.at_block.alpha.clone())
            fold.forget()
        self._entries = [entry for entry in self._entries if entry[1] < self.folds[entry[2]].at_block.t]

    def _cut(self, size: int) -> None:
        """Blocks of at most `size` models from the one under way on, which begins again where it is cut."""
        if self.method.simplex:
            return  # a softmax over all models cannot be cut
        t = self._first_open()
        by_content = [sorted(block, key=self.problem.facts.digests.__getitem__) for block in self.blocks[t:]]
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
            tensors, values = fold_states(self.folds)
            tensors["history"] = torch.tensor(self._entries, dtype=torch.float64).reshape(-1, 6)
            o = self._options
            values |= {
                "settings": as_json(self.settings),
                "blocks": self.blocks,
                "options": [o.directions, o.accumulate, o.low_memory],
            }
            self._store.save(tensors, values, self._ranks.part)
        self._saved_at = time.monotonic()
        self._stop.obey()

    def _restore(self) -> bool:
        """Go on from what an earlier process saved, if it did."""
        saved = None if self._store is None else self._store.load()
        if saved is None:
            return False
        tensors, values = saved
        check_format(values)
        check_same_settings(values.get("settings"), as_json(self.settings))
        self._entries = [
            (int(kind), int(t), int(fold), int(j), loss, rate)
            for kind, t, fold, j, loss, rate in tensors["history"].tolist()
        ]
        self.blocks = values["blocks"]
        directions, accumulate, low_memory = values["options"]
        self._options = replace(self._options, directions=directions, accumulate=accumulate, low_memory=low_memory)
        restore_folds(self.folds, tensors, values)
        return True

    def _stopped(self, fold: Fold) -> LearningError:
        s = fold.state
        alpha = s.alpha.clone()
        if fold.best is not None:
            fold.begin(fold.best, self.blocks[s.t])
            alpha = s.alpha
        which = f", fold {fold.number + 1}" if fold.held_out else ""
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


def _reseed(reseed: Callable[[int], None], stream: int, i: int) -> None:
    reseed((stream * 1_000_000_007 + i) % 2**63)

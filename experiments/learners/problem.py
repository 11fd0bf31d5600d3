"""The soup's loss as a function of its coefficients a (K, G): all models resident, one captured graph per batch size.

theta(a) = mean + sum_k a[k, group] d_k, as in the product; only the way a is found is free here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from stockpot.engine.loader import Loader
from stockpot.finetune.augment import augment
from stockpot.finetune.plan import Augmentation
from stockpot.pool import Pool
from stockpot.soup import weights
from stockpot.soups.greedy import greedy
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.starts import CALIBRATION
from stockpot.task import Data, Scores, Task
from stockpot.task.batches import find_labels
from stockpot.task.batches import leaves, refill

BATCH = 128


class Problem:
    """Use as a context manager. Rows are places in the fitting data."""

    def __init__(self, pool: Pool, task: Task, dev: Data) -> None:
        self.kitchen = Kitchen(pool, task)
        self.task, self.pool, self.dev = task, pool, dev
        self.device = task.device
        self.K = len(pool)
        self.taken = 0  # gradients of one batch each
        self.smoothing = 0.0  # of the labels
        self.teacher, self.share = "", 0.0  # whose predictions stand for a share of the label
        self.strength = 0.0  # of augmentation
        self._taught: dict[str, Tensor] = {}
        self._greedy: dict[bytes, Tensor] = {}
        self._steps: dict[tuple[Any, ...], Callable[[], None]] = {}

    def __enter__(self) -> Problem:
        self._stack = ExitStack()
        # Scored first: the guard's greedy soups and the best ingredient need them, in a live model of their own.
        self.individual = self.kitchen.individual_values()  # (K, N)
        self.layout = self.kitchen.layout("tensor")
        self.live = self._stack.enter_context(self.kitchen.live(self.layout))
        loader = Loader(self.live, torch.float32)
        self.mean = loader.mean().to(self.device)
        self.directions = loader.load(list(range(self.K)), self.mean)
        self.G = len(self.layout)
        self.gram = self._gram()  # (G, K, K)
        self._columns = [column.to(self.device) for _, column in leaves(self.task.fit.columns)]
        self.a = torch.zeros(self.K, self.G, device=self.device)
        self.slope = torch.zeros_like(self.a)
        self.tau = torch.ones((), device=self.device, requires_grad=True)
        self.tau_slope = torch.zeros((), device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self._rows: dict[int, Tensor] = {}
        self._logits: dict[int, Tensor] = {}  # of the last pass without a gradient over so many rows, (n, C)
        labels = find_labels(self.task.fit.batch(torch.arange(len(self.task.fit))))
        self.labels: Tensor = labels.to(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        self._steps.clear()
        self._stack.close()

    def gradient(self, a: Tensor, rows: Tensor, tau: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and its gradient in a, on these rows (one batch)."""
        self.taken += 1
        self._go(a, rows, True, tau)
        return self.loss.clone(), self.slope.clone()

    def full_gradient(self, a: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The same over all rows, in batches."""
        loss, slope = torch.zeros((), device=self.device), torch.zeros_like(self.a)
        size = min(BATCH, len(rows))
        n = len(rows) // size
        for part in torch.split(rows[: n * size], size):
            one, g = self.gradient(a, part)
            loss += one
            slope += g
        return loss / n, slope / n

    def loss_on(self, a: Tensor, rows: Tensor, tau: Tensor | None = None) -> float:
        """Mean loss on these rows, as one batch."""
        self._go(a, rows, False, tau)
        return float(self.loss)

    def sharpened_loss_on(self, a: Tensor, rows: Tensor) -> float:
        """The same with the factor on the logits that makes it lowest."""
        self._go(a, rows, False, None)
        labels = self.labels[rows]
        logits = self._logits[len(rows)]

        def at(power: float) -> float:
            return float(functional.cross_entropy(logits * math.exp(power), labels))

        return lowest(at, math.log(0.25), math.log(8.0), 16)[1]

    def dev_scores(self, a: Tensor) -> Scores:
        """The soup on data that nothing is fitted on."""
        return self.scores_on(a, [self.dev])[0]

    def scores_on(self, a: Tensor, parts: Sequence[Data]) -> list[Scores]:
        self._put(a)
        return [self.task.score(part) for part in parts]

    def _put(self, a: Tensor) -> None:
        """Make the live model this soup, with its own running statistics."""
        W = (1.0 / self.K + a - a.mean(dim=0, keepdim=True)).double().cpu()
        with torch.no_grad():
            self.directions.mix(self.mean, a - a.mean(dim=0, keepdim=True), out=self.live.theta)
        self.live.push()
        self.kitchen.set_statistics(self.live, W)

    def greedy_start(self, rows: Tensor) -> Tensor:
        """Of the greedy soup of these rows; chosen once, however many ideas begin there."""
        key = rows.cpu().numpy().tobytes()
        if key not in self._greedy:
            found = greedy(self.kitchen, self.live, indices=rows.cpu(), calibration=CALIBRATION)
            self._greedy[key] = (found.W - weights.uniform(self.K, self.G)).float().to(self.device)
        return self._greedy[key]

    def taught(self, teacher: str) -> Tensor:
        """Probabilities of the fitting samples by all models together (`ensemble`), or by the greedy soup. (N, C)"""
        if teacher not in self._taught:
            if teacher == "ensemble":
                total = torch.stack([self._probabilities(k) for k in range(self.K)]).mean(dim=0)
            else:
                total = self._probabilities(None)
            self._taught[teacher] = total
        return self._taught[teacher]

    def _probabilities(self, k: int | None) -> Tensor:
        """Probabilities by ingredient k, or by the greedy soup. (N, C)"""
        everything = torch.arange(len(self.task.fit))
        if k is None:
            self._put(self.greedy_start(everything))
        else:
            self.live.load_ingredient(k)
        with self.task.evaluating():
            batches = [self.task.fit.batch(rows) for rows in torch.split(everything, self.task.batch_size)]
            return torch.cat([self.task.logits(self.task.to_device(batch)).softmax(1) for batch in batches])

    def _go(self, a: Tensor, rows: Tensor, backward: bool, tau: Tensor | None) -> None:
        size = len(rows)
        if size not in self._rows:
            self._rows[size] = torch.zeros(size, dtype=torch.long, device=self.device)
        with torch.no_grad():
            # Directions from the mean: adding one number to all of a column changes nothing, as in the product.
            self.a.copy_(a - a.mean(dim=0, keepdim=True))
            self._rows[size].copy_(rows)
            self.tau.fill_(1.0 if tau is None else float(tau))
        key = (size, backward, self.smoothing, self.teacher, self.share, self.strength)
        if key not in self._steps:
            self._steps[key] = self._made(size, backward)
        self._steps[key]()

    def _clear(self) -> None:
        self.live.clear_gradient()
        self.tau.grad = None

    def _made(self, size: int, backward: bool) -> Callable[[], None]:
        example = self.task.fit.batch(torch.zeros(size, dtype=torch.long))
        smoothing, share, strength = self.smoothing, self.share, self.strength
        taught = self.taught(self.teacher) if share else None  # (N, C)

        def loss_of(batch: Any) -> Tensor:
            if taught is None:
                return self.task.loss(batch, label_smoothing=smoothing, temperature=self.tau)
            logits = self.task.logits(batch)
            target = functional.one_hot(find_labels(batch), logits.shape[1])
            soft = taught[self._rows[size]]
            return functional.cross_entropy(logits, (1 - share) * target + share * soft)

        def once() -> None:
            rows = self._rows[size]
            with torch.no_grad():
                self.directions.mix(self.mean, self.a, out=self.live.theta)
                self.live.push()
                batch = refill(example, [column.index_select(0, rows) for column in self._columns])
            if not backward:
                with torch.no_grad():
                    if taught is None:
                        logits = self.task.logits(batch)
                        self._logits.setdefault(size, torch.empty_like(logits)).copy_(logits)
                        labels = find_labels(batch)
                        loss = functional.cross_entropy(logits * self.tau, labels, label_smoothing=smoothing)
                    else:
                        loss = loss_of(batch)
                    self.loss.copy_(loss)
                return
            self._clear()
            if strength:
                batch, _ = augment(batch, strength, Augmentation(flip=True), seed=1, step=self.taken)
            loss = loss_of(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            with torch.no_grad():
                self.loss.copy_(loss)
                slope = self.directions.project(self.live.collect_gradient())
                self.slope.copy_(slope - slope.mean(dim=0, keepdim=True))
                if self.tau.grad is not None:
                    self.tau_slope.copy_(self.tau.grad)

        def run() -> None:
            with self.task.learning():
                once()

        if (
            self.device.type != "cuda" or strength
        ):  # random numbers of a graph would be the same at every replay
            return run
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with self.task.learning():
            with torch.cuda.stream(stream):
                once()
                once()
            torch.cuda.synchronize(self.device)
            self.live.clear_gradient()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                once()
        replay: Callable[[], None] = graph.replay
        return replay

    def _gram(self) -> Tensor:
        """<d_k, d_m> per group. (G, K, K)"""
        out = torch.zeros(self.G, self.K, self.K, device=self.device)
        for j, (start, stop) in enumerate(self.directions.plan.bounds):
            rows = self.directions.part(start, stop, torch.float32)
            out[j] = rows @ rows.T
        return out


def lowest(value: Callable[[float], float], low: float, high: float, steps: int) -> tuple[float, float]:
    """Where a convex function is smallest between two places, about, and its value: golden sections."""
    share = (math.sqrt(5) - 1) / 2
    left, right = high - share * (high - low), low + share * (high - low)
    at_left, at_right = value(left), value(right)
    for _ in range(steps):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - share * (high - low)
            at_left = value(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + share * (high - low)
            at_right = value(right)
    return (low + high) / 2, min(at_left, at_right)


def open_problem(recipe: Any, dev: Data) -> Problem:
    from stockpot.recipe.build import build_pool, build_task

    return Problem(build_pool(recipe), build_task(recipe, report=False), dev)

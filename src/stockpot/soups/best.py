"""The best coefficients of a visit so far: where to stop, and where to go back to."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

STRETCH = 50  # steps at most over which a loss is averaged


@dataclass(frozen=True)
class Point:
    """Coefficients and the loss they are judged by."""

    loss: float  # infinite: not known
    raw: Tensor  # (b, G)
    temperature: float | None


@dataclass
class Stretch:
    """Without held-out data, coefficients are judged by the mean loss of the next few steps from there."""

    raw: Tensor  # (b, G)
    temperature: float | None
    total: float = 0.0
    steps: int = 0
    clean: bool = True  # no step was skipped

    def add(self, loss: float, skipped: bool) -> None:
        self.clean &= not skipped
        if not skipped:
            self.total += loss
            self.steps += 1

    def better_than(self, best: Point) -> Point:
        if not self.clean or not self.steps or not self.total / self.steps < best.loss:
            return best
        return Point(self.total / self.steps, self.raw, self.temperature)


def stretch_of(every: int) -> int:
    """Steps of a stretch, where `every` steps would be one evaluation."""
    return max(1, min(STRETCH, every))

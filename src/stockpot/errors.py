"""Every error stockpot raises on purpose, from the root down.

Messages name the object, what was expected, what was found, and the likely fix (see `describe`).
"""

from __future__ import annotations

from typing import Any, TypeVar

E = TypeVar("E", bound="StockpotError")
_LONGEST = 8_000  # letters of one part of a message: lists of some hundred ingredients are still whole


class StockpotError(Exception):
    """Root of all errors raised by stockpot."""

    @classmethod
    def of(cls: type[E], subject: str, expected: str, found: str, fix: str) -> E:
        """With a message in our one shape; see `describe`."""
        return cls(describe(subject, expected=expected, found=found, fix=fix))


class PoolError(StockpotError):
    """The checkpoints cannot be used together."""


class CheckpointError(PoolError):
    """One checkpoint cannot be read."""


class MismatchError(PoolError):
    """Checkpoints differ where they must agree."""


class ChangedError(PoolError):
    """Checkpoints were changed while they were in use."""


class LayoutError(StockpotError):
    """No valid assignment of tensors to coefficient groups."""


class TaskError(StockpotError):
    """The model, loss or metric cannot be used, or does not fit the pool."""


class DataError(TaskError):
    """Fitting or report data that cannot be used."""


class EnsembleError(TaskError):
    """The mean of several models' outputs has no meaning here, or no room; `reason` says why in a few words."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            describe(
                "ensemble",
                expected="outputs that can be averaged, and a metric that needs them and the labels only",
                found=reason,
                fix="leave the ensemble out: it is no soup, and every other method works without it",
            )
        )
        self.reason = reason


class MethodError(StockpotError):
    """Unknown method, preset or setting, or an impossible value."""


class LearningError(StockpotError):
    """Learning had to stop. `best` holds the best mixing weights found before that, if any."""

    def __init__(self, message: str, best: Any = None) -> None:
        super().__init__(message)
        self.best = best


class SoupError(StockpotError):
    """A soup cannot be built, saved or loaded."""


class DigestError(SoupError):
    """The ingredients are not the ones the soup was made of."""


class RecipeError(StockpotError):
    """A recipe that cannot be understood."""


class RunError(StockpotError):
    """A run directory that cannot be used."""


class RankError(StockpotError):
    """Another one of several ranks has ended, so this one has stopped."""


class LinkError(StockpotError, OSError):
    """A symbolic link, FIFO or device inside a directory of ours, where none is followed or read."""


class WriteError(StockpotError):
    """No room or no permission to write. What was there before is unchanged."""


def describe(subject: str, expected: str, found: str, fix: str) -> str:
    """The one shape of our messages: object, expectation, finding, fix."""
    subject, expected, found, fix = (_bearable(part) for part in (subject, expected, found, fix))
    return f"{subject}: expected {expected}, found {found}.\n  Fix: {fix}."


def _bearable(part: str) -> str:
    """A file may have a million columns, and each of them a name."""
    return part if len(part) <= _LONGEST else f"{part[:_LONGEST]} ... ({len(part):,} characters)"

"""Report data behind a seal: it can be opened once everything is decided, and then nothing new can be decided.

What the data says may not flow back into a decision, so the order is kept by state and not by good manners: whoever
opens the seal names the decisions that will be scored, and from then on the task takes part in no other decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from stockpot.errors import TaskError, describe
from stockpot.task.data import Data, fingerprint

if TYPE_CHECKING:
    from stockpot.task.task import Task

_FIX = (
    "decide everything first: compare(pool, task, [...]) runs several methods and reports on all of them at the end;"
    " while you try things out, use a Task without report data; for a new question make a new Task, at best with data"
    " that no earlier choice has seen"
)


class Sealed:
    """Samples that no attribute and no method gives away, except `open`."""

    __slots__ = ("__data", "__decisions")

    def __init__(self, data: Data) -> None:
        self.__data = data
        self.__decisions: frozenset[str] | None = None  # None: nobody has looked

    def __len__(self) -> int:
        return len(self.__data)

    @property
    def opened(self) -> bool:
        return self.__decisions is not None

    def check_may_decide(self, decision: str) -> None:
        """Refuse a decision that could have been influenced; one that was named before may be made again."""
        if self.__decisions is not None and decision not in self.__decisions:
            raise TaskError(
                describe(
                    "this task's report data",
                    expected="to be looked at after the last decision",
                    found=f"a new decision, although it was looked at for {len(self.__decisions)} earlier ones",
                    fix=_FIX,
                )
            )

    def open(self, decisions: Iterable[str]) -> Data:
        """The samples, to score these decisions and no others ever after."""
        named = frozenset(decisions)
        for decision in named:
            self.check_may_decide(decision)
        if self.__decisions is None:
            self.__decisions = named
        return self.__data

    def fingerprint(self) -> str:
        """Tells one set of samples from another, and nothing else about them."""
        return fingerprint(self.__data)


def open_report(task: Task, decisions: Iterable[str]) -> Data:
    """Break a task's seal to score these decisions. For methods/reporting.py; nothing else may need it."""
    if task._sealed is None:
        raise TaskError(
            describe(
                "report scores",
                expected="a task with report data",
                found="none",
                fix="give Task(..., report=...) data that nothing was fitted on",
            )
        )
    return task._sealed.open(decisions)

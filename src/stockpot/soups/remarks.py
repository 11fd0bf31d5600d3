"""What a reader of any result must know about the pool and the data, said in its notes."""

from __future__ import annotations

import torch
from torch import Tensor

from stockpot.pool import Pool
from stockpot.task import Task
from stockpot.task.loss import IGNORED

SHOWN = 5  # classes or ingredients named in one note


def remarks(pool: Pool, task: Task) -> tuple[str, ...]:
    return (*_dropped(pool), *_constant_labels(task), *_same_data(task))


def _dropped(pool: Pool) -> tuple[str, ...]:
    if not pool.dropped:
        return ()
    return (f"left out, because their weights are not finite: {_some(pool.dropped)}",)


def _constant_labels(task: Task) -> tuple[str, ...]:
    classes = _classes(task.fit.labels)
    if len(classes) != 1:
        return ()
    ((label, count),) = classes.items()
    return (f"all {count} labels of the fitting data are {label}: whatever always says so is right",)


def _same_data(task: Task) -> tuple[str, ...]:
    if not task.reports_on_fit:
        return ()
    return (
        "the report data is the fitting data: its scores are too good to be true, and say nothing of new data",
    )


def thin_classes(labels: Tensor | None, folds: int) -> tuple[str, ...]:
    """Classes that some fold is judged without, however they are spread."""
    thin = [str(label) for label, count in _classes(labels).items() if count < folds]
    if not thin:
        return ()
    which = f"class {thin[0]} has" if len(thin) == 1 else f"classes {_some(thin)} have"
    return (f"{which} fewer than {folds} samples: some of the {folds} folds are judged without",)


def _classes(labels: Tensor | None) -> dict[int, int]:
    """How many samples each class has."""
    if labels is None:
        return {}
    classes, counts = torch.unique(labels[labels != IGNORED], return_counts=True)
    return dict(zip(classes.tolist(), counts.tolist(), strict=True))


def _some(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")

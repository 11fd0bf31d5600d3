"""What is known of a trial, beside its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stockpot import atomic
from stockpot.errors import RunError, describe
from stockpot.finetune.plan import Trial
from stockpot.task import Scores

FORMAT = 1


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial. `score` is `{"mean", "low", "high", "n", "loss"}` on the validation data."""

    name: str
    settings: Trial
    path: Path | None  # of the checkpoint; None when the trial failed
    score: dict[str, float | int | None] | None
    seconds: float
    steps: int
    losses: tuple[float, ...]  # mean training loss of each epoch
    failure: str | None = None  # what stopped it, and where

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def write(self, folder: Path) -> None:
        content = dataclasses.asdict(self)
        content["path"] = None if self.path is None else self.path.name
        atomic.write_json(folder / f"{self.name}.json", {"format": FORMAT, **content})


def trial_name(number: int) -> str:
    return f"trial_{number:03d}"


def read_record(folder: Path, name: str) -> TrialRecord | None:
    """The record, or None when the trial has not finished or its checkpoint is gone."""
    file = folder / f"{name}.json"
    if not file.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        path = None if content["path"] is None else folder / content["path"]
        record = TrialRecord(
            name=content["name"],
            settings=Trial(**content["settings"]),
            path=path,
            score=content["score"],
            seconds=content["seconds"],
            steps=content["steps"],
            losses=tuple(content["losses"]),
            failure=content["failure"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(
            describe(
                str(file),
                expected="the record of a trial",
                found=f"{type(error).__name__}: {error}",
                fix="remove the file, and the trial is made again",
            )
        ) from error
    return record if path is None or path.exists() else None


def read_records(folder: str | Path) -> list[TrialRecord]:
    """All finished trials of a folder, in order."""
    names = sorted(file.stem for file in Path(folder).glob("trial_*.json"))
    return [record for name in names if (record := read_record(Path(folder), name)) is not None]


def as_score(scores: Scores) -> dict[str, float | int | None]:
    low, high = scores.interval()
    values = {"mean": scores.mean, "value": scores.mean, "low": low, "high": high, "n": scores.n, "loss": scores.loss}
    return {k: v if math.isfinite(v) else None for k, v in values.items()}

"""The folder of a search: whose trials it holds, which process works on which, and where they all started.

`out/` holds the checkpoints with their records. What it takes to continue is in `out/search/`, so that opening `out`
as a pool finds ingredients only. Several processes may work here at once: each claims a trial by a lock of the
kernel, which dies with its process, and writes nothing outside of its claim. Between machines this holds where the
shared file system passes locks on (NFS, GPFS, Lustre mounted with `flock`); where it has none, two processes may
train one trial, which costs time and gives the same result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stockpot import files
from stockpot.errors import RunError, StockpotError, describe
from stockpot.events import Event, Listener
from stockpot.task import Data, Scores
from stockpot.task.data import fingerprint
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.weights import read_file, write_file

FORMAT = 2
INTERVAL = 300.0  # seconds of work that a kill may cost
POLL = 0.2  # seconds between looks at what other processes hold
SHOWN = 8  # differences listed in one message
DEEP = 6  # levels of a plan; what lies deeper in a file of others is compared as text


# Records ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial. `score` is `{"value", "low", "high", "n", "loss"}` on the validation data."""

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
        files.write_json(folder / f"{self.name}.json", {"format": FORMAT, **content}, folder)


def as_score(scores: Scores) -> dict[str, float | int | None]:
    low, high = scores.interval()
    values = {"value": scores.value, "low": low, "high": high, "n": scores.n, "loss": scores.loss}
    return {k: v if math.isfinite(v) else None for k, v in values.items()}


def trial_name(number: int) -> str:
    return f"trial_{number:03d}"


def read_record(folder: Path, name: str) -> TrialRecord | None:
    """The record, or None when the trial has not finished or its checkpoint is gone."""
    file = folder / f"{name}.json"
    try:
        content = files.read_json(file, root=folder)
        if content["path"] not in (None, name, f"{name}.safetensors"):
            raise ValueError(f"the path {content['path']!r:.80}")
        score = content["score"]
        record = TrialRecord(
            name=name,
            settings=Trial(**content["settings"]),
            path=None if content["path"] is None else folder / content["path"],
            score=None if score is None else {key: _number(score[key]) for key in _SCORE},
            seconds=float(content["seconds"]),
            steps=int(content["steps"]),
            losses=tuple(float(loss) for loss in content["losses"]),
            failure=None if content["failure"] is None else str(content["failure"]),
        )
        gone = record.path is not None and not files.check_inside(folder, record.path).exists()
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, StockpotError) as error:
        raise RunError(
            describe(
                str(file),
                expected="the record of a trial",
                found=f"{type(error).__name__}: {error}",
                fix="remove the file, and the trial is made again",
            )
        ) from error
    return None if gone else record


_SCORE = ("value", "low", "high", "n", "loss")


def _number(value: Any) -> float | int | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{value!r:.80} for a number")


def read_records(folder: str | Path) -> list[TrialRecord]:
    """All finished trials of a folder, in order."""
    names = sorted(file.stem for file in Path(folder).glob("trial_*.json"))
    return [record for name in names if (record := read_record(Path(folder), name)) is not None]


# The folder -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """The state of an unfinished training run, in one safetensors file."""

    path: Path
    interval: float  # seconds between saves
    root: Path

    def save(self, tensors: Mapping[str, Tensor], values: dict[str, Any]) -> None:
        # Cloned: tied weights share their memory, which the format refuses.
        whole = {k: v.cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}
        write_file(self.path, whole, {"values": json.dumps(values)}, self.root)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        try:
            tensors, metadata = read_file(self.path, self.root)
            return tensors, dict(files.parse_json(metadata["values"]))
        except (RunError, KeyError, TypeError, ValueError):
            return None  # costs time, never the result: the trial starts again

    def clear(self) -> None:
        files.clear(self.path.parent, [self.path.name], self.root)


class Folder:
    """One search; `names` are those of its trials."""

    def __init__(self, out: Path, names: list[str]) -> None:
        self.out = out
        self.names = names
        self._inner = out / "search"
        self._plan = self._inner / "plan.json"
        self._start = self._inner / "start.safetensors"

    @contextlib.contextmanager
    def prepared_alone(self, listen: Listener) -> Iterator[None]:
        """For plan and start, which one process at a time looks at and writes; the others wait for it."""
        files.make_directory(self.out)
        lock = files.Lock(self.out)
        if not lock.try_acquire():
            listen(Event("waiting", {"trials": ["probe"]}))
            while not lock.try_acquire():
                time.sleep(POLL)
        try:
            self._sweep()
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what killed processes left half-written, unless another process is at work on a trial."""
        if not self._inner.is_dir():
            files.sweep(self.out)
            return
        with contextlib.ExitStack() as stack:
            if all(stack.enter_context(self.claimed(name)) for name in self.names):
                for folder in (self.out, self._inner):
                    files.sweep(folder, self.out)

    @contextlib.contextmanager
    def claimed(self, name: str) -> Iterator[bool]:
        """Whether the trial is ours for the block; not if another process has it."""
        lock = files.Lock(self._inner, f".{name}.lock", self.out)
        ours = lock.try_acquire()
        try:
            yield ours
        finally:
            lock.release()

    def begin(self, wanted: dict[str, Any]) -> None:
        """Write down what is searched (see `identity`), or find that the same is under way.

        More trials may be added; anything else that differs is refused.
        """
        there = self._read_plan()
        if there is not None:
            _check_same(self.out, there, wanted)
        elif any(self.out.glob("trial_*")):
            raise RunError(
                describe(
                    str(self.out),
                    expected="an empty folder, or one that a search has begun in",
                    found="trials without search/plan.json",
                    fix="choose another folder",
                )
            )
        if there != wanted:
            files.make_directory(self._inner, self.out)
            files.write_json(self._plan, wanted, self.out)

    def _read_plan(self) -> dict[str, Any] | None:
        try:
            content = files.read_json(self._plan, root=self.out)
            if content["format"] == FORMAT and isinstance(content["plan"]["trials"], list):
                return dict(content)
            found = f"format {content['format']!r:.80}"
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
        raise RunError(
            describe(
                str(self._plan), expected="the plan of a search", found=found, fix="choose another folder"
            )
        )

    def start(self) -> dict[str, Tensor] | None:
        """The weights every trial starts from, once they are known."""
        return read_file(self._start, self.out)[0] if self._start.exists() else None

    def write_start(self, weights: Mapping[str, Tensor]) -> None:
        write_file(self._start, weights, {"format": "pt"}, self.out)

    def check_start(self, given: Mapping[str, Tensor], stored: Mapping[str, Tensor], head: set[str]) -> None:
        """Outside the head, which the probe trains or chance made, a search goes on from the same model."""
        differing = [
            name
            for name in {**given, **stored}
            if name not in head
            and not (name in given and name in stored and torch.equal(given[name], stored[name]))
        ]
        if differing:
            raise RunError(
                describe(
                    str(self.out),
                    expected="the starting weights of the search that was begun here",
                    found=f"{len(differing)} of {len(stored)} tensors differ, such as {differing[0]}",
                    fix="start from the same weights (seed a random model before it is built), "
                    "or choose another folder",
                )
            )

    def saved(self, name: str, interval: float = INTERVAL) -> Saved:
        return Saved(self._inner / f"{name}.safetensors", interval, self.out)


# What makes two searches the same ---------------------------------------------------------------------


def identity(
    plan: Plan,
    train: Data,
    fit: Data | None,
    *,
    as_directories: bool,
    judge: Mapping[str, str | None],
    code: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that decides what comes out: the plan, every sample and label, how they are judged, the code.

    `judge` names the loss, the metric and the autocast type; `code` has a digest for each file of the user's own.
    """
    return {
        "format": FORMAT,
        "plan": plan.as_json(),
        "as_directories": as_directories,
        "train": {"samples": len(train), "content": fingerprint(train)},
        "fit": None if fit is None else {"samples": len(fit), "content": fingerprint(fit)},
        "judge": dict(judge),
        "code": dict(code),
    }


def _check_same(out: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    before, after = _flat(there), _flat(now)
    new = range(len(there["plan"]["trials"]), len(now["plan"]["trials"]))
    added = tuple(f"plan.trials.{number}." for number in new)
    differences = [
        f"{key}: {before.get(key, 'nothing'):.100} there, {after.get(key, 'nothing'):.100} now"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.startswith(added)
    ]
    if differences:
        more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
        raise RunError(
            describe(
                str(out),
                expected="the search that was begun here",
                found="another:\n    " + "\n    ".join(differences[:SHOWN] + more) + "\n ",
                fix="choose another folder, or go back to the settings, data and code there",
            )
        )


def _flat(value: Any, place: str = "") -> dict[str, str]:
    """Every plain value as JSON under its dotted place, such as `plan.trials.3.lr`."""
    if not isinstance(value, (dict, list)) or place.count(".") >= DEEP:
        return {place: json.dumps(value)}
    parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
    whole: dict[str, str] = {}
    for name, part in parts:
        said = json.dumps(str(name))[1:-1]  # no control characters of a stranger's file
        whole.update(_flat(part, f"{place}.{said}" if place else said))
    return whole

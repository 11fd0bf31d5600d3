"""The folder of a search: whose trials it holds, and where they started."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stockpot import atomic
from stockpot.disk import Lock
from stockpot.errors import RunError, describe
from stockpot.finetune.plan import Plan
from stockpot.finetune.saved import Saved
from stockpot.finetune.weights import read_file, write_file
from stockpot.pool.scan import raw_bytes
from stockpot.task import Data
from stockpot.task.batches import leaves

FORMAT = 1
SAMPLED = 256  # samples that stand for the whole data in its fingerprint
WORKERS = ".workers"  # locked by every worker process
SHOWN = 8  # differences listed in one message


class Folder:
    """`out/` holds the checkpoints with their records; `out/search/` what it takes to continue."""

    def __init__(self, out: Path) -> None:
        self.out = out
        # A folder of their own, so that opening `out` as a pool finds ingredients only.
        self._inner = out / "search"
        self._plan = self._inner / "plan.json"
        self._start = self._inner / "start.safetensors"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For one search at a time; workers of one that was killed are waited for, and its leftovers removed."""
        atomic.make_directory(self.out)
        lock = Lock(self.out)
        lock.acquire()
        try:
            if self._inner.is_dir():
                Lock(self._inner, WORKERS).wait()
            for folder in (self.out, self._inner):
                atomic.sweep(folder)
            yield
        finally:
            lock.release()

    def join(self) -> None:
        """A worker, for as long as it lives: nobody else may start meanwhile, though its search may be dead."""
        Lock(self._inner, WORKERS).share()

    def claim(
        self,
        plan: Plan,
        train: Data,
        fit: Data | None,
        *,
        as_directories: bool,
        judge: Mapping[str, str | None] | None = None,
    ) -> None:
        """Write down what is searched, or find that the same is under way; more trials may be added.

        `judge` names the loss, the metric and the autocast type.
        """
        wanted: dict[str, Any] = {
            "format": FORMAT,
            "plan": plan.as_json(),
            "as_directories": as_directories,
            "train": fingerprint(train),
            "fit": None if fit is None else fingerprint(fit),
            "judge": dict(judge or {}),
        }
        if self._plan.is_file():
            found = {"judge": wanted["judge"], **self._read_plan()}
            _check_same(self.out, found, wanted)
            if found == wanted:
                return
        elif self.out.is_dir() and any(self.out.glob("trial_*")):
            raise RunError(
                describe(
                    str(self.out),
                    expected="an empty folder, or one that a search has begun in",
                    found="trials without search/plan.json",
                    fix="choose another folder",
                )
            )
        atomic.make_directory(self._inner)
        atomic.write_json(self._plan, wanted)

    def _read_plan(self) -> dict[str, Any]:
        try:
            content = json.loads(self._plan.read_text(encoding="utf-8"))
            if content["format"] == FORMAT:
                return dict(content)
            found = f"format {content['format']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}: {error}"
        raise RunError(
            describe(
                str(self._plan), expected="the plan of a search", found=found, fix="choose another folder"
            )
        )

    def start(self) -> dict[str, Tensor] | None:
        """The weights every trial starts from, once they are known."""
        return read_file(self._start)[0] if self._start.is_file() else None

    def write_start(self, weights: Mapping[str, Tensor]) -> None:
        write_file(self._start, weights, {"format": "pt"})

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

    def saved(self, name: str, interval: float) -> Saved:
        return Saved(self._inner / f"{name}.safetensors", interval)


def fingerprint(data: Data) -> dict[str, Any]:
    """Size and content; of large data a regular sample, which is enough to notice that it is another."""
    rows = torch.linspace(0, len(data) - 1, min(SAMPLED, len(data))).round().long()
    total = hashlib.sha256()
    for place, leaf in leaves(data.batch(rows)):
        total.update(place.encode())
        if isinstance(leaf, Tensor):
            total.update(f"{leaf.dtype}{tuple(leaf.shape[1:])}".encode())
            total.update(raw_bytes(leaf).numpy().data)
    return {"samples": len(data), "content": total.hexdigest()[:16]}


def _check_same(out: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    before, after = _flat(there), _flat(now)
    count = len(there["plan"]["trials"])
    differences = [
        f"{key}: {_said(before, key)} there, {_said(after, key)} now"
        for key in {**before, **after}
        if _said(before, key) != _said(after, key) and not _is_new_trial(key, count)
    ]
    if differences:
        more = [f"and {len(differences) - SHOWN} more"] if len(differences) > SHOWN else []
        raise RunError(
            describe(
                str(out),
                expected="the search that was begun here",
                found="another:\n    " + "\n    ".join(differences[:SHOWN] + more) + "\n ",
                fix="choose another folder, or go back to the settings there",
            )
        )


def _is_new_trial(key: str, count: int) -> bool:
    parts = key.split(".")
    return parts[:2] == ["plan", "trials"] and int(parts[2]) >= count


def _said(values: dict[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = {str(index): part for index, part in enumerate(value)}.items()
    else:
        return {place: value}
    return {
        k: v for name, part in parts for k, v in _flat(part, f"{place}.{name}" if place else name).items()
    }

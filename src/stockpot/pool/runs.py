"""Folders that trainers leave: which of their checkpoints is the run's best, or its last.

Hugging Face's Trainer (checkpoint-N/), Lightning (checkpoints/*.ckpt), timm (model_best.pth.tar, checkpoint-N.pth.tar).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from stockpot.files import read_json
from stockpot.pool.source import is_directory, natural_key

_TRAINER = re.compile(r"checkpoint-\d+")
_TIMM = re.compile(r"(checkpoint-\d+|last|model_best)\.pth(\.tar)?")
_LAST = re.compile(r"last(-v\d+)?\.ckpt")


@dataclass(frozen=True)
class Run:
    """A training run on disk. `chosen` is among the steps, or a copy of one of them."""

    folder: Path
    steps: tuple[Path, ...]  # in the order of training
    chosen: Path
    why: str


def run_in(folder: Path) -> Run | None:
    """The run whose output folder this is; None where it is something else."""
    try:
        names = {entry.name: entry for entry in folder.iterdir()}
        if steps := [entry for name, entry in names.items() if _TRAINER.fullmatch(name) and is_directory(entry)]:
            return _trainer(folder, _ordered(steps))
        files = [entry for name, entry in names.items() if _TIMM.fullmatch(name)]
        if steps := [entry for entry in files if entry.name.startswith("checkpoint-")] or files:
            return _timm(folder, _ordered(steps), {entry.name.split(".")[0]: entry for entry in files})
        below = names.get("checkpoints")
        if below is not None and is_directory(below):
            files = [entry for entry in below.iterdir() if entry.suffix == ".ckpt"]
            if steps := [entry for entry in files if not _LAST.fullmatch(entry.name)] or files:
                return _lightning(folder, _ordered(steps), len(files) > len(steps))
    except OSError:
        pass  # whoever opens it says why it cannot be looked into
    return None


def _ordered(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural_key(path.name))


def _trainer(folder: Path, steps: list[Path]) -> Run:
    """The last checkpoint's trainer_state.json names the best one, where the Trainer was asked to look for it."""
    try:
        state = read_json(steps[-1] / "trainer_state.json")
        named = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    except (OSError, ValueError):
        named = None
    best = [step for step in steps if isinstance(named, str) and step.name == re.split(r"[/\\]", named)[-1]]
    return Run(folder, tuple(steps), (best or steps[-1:])[0], "its best, by trainer_state.json" if best else "its last")


def _timm(folder: Path, steps: list[Path], named: dict[str, Path]) -> Run:
    best = named.get("model_best")
    return Run(folder, tuple(steps), best or named.get("last") or steps[-1], "its best" if best else "its last")


def _lightning(folder: Path, steps: list[Path], with_last: bool) -> Run:
    """One file beside last.ckpt is the best that ModelCheckpoint kept; of several, only the order is known."""
    best = len(steps) == 1 and with_last
    return Run(folder, tuple(steps), steps[-1], "its best, beside last.ckpt" if best else "its last")

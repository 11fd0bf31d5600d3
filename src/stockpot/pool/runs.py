"""The output folders of trainers (Trainer of transformers, Lightning, timm): which checkpoint stands for a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stockpot.errors import CheckpointError
from stockpot.files import read_json
from stockpot.pool.source import is_directory, natural_key
from stockpot.pool.torch_files import values_of

_TRAINER = re.compile(r"checkpoint-\d+")
_TIMM = re.compile(r"(checkpoint-\d+|last|model_best)\.pth(\.tar)?")
_LAST = re.compile(r"last(-v\d+)?\.ckpt")
_LIGHTNING = re.compile(r"((.*[-_])?(epoch|step)=\d+.*|last(-v\d+)?|best(-v\d+)?)\.ckpt")
_VERSION = re.compile(r"version_\d+")
_LOGS, _INSIDE = "lightning_logs", "checkpoints"  # where Lightning's loggers put runs, and runs their files


@dataclass(frozen=True)
class Run:
    """A training run on disk. `chosen` is among the steps, or a copy of one of them."""

    folder: Path
    steps: tuple[Path, ...]  # in the order of training
    chosen: Path
    why: str


def runs_in(folder: Path) -> list[Run]:
    """The run whose output folder this is, or those that a logger of Lightning numbered in it; else nothing."""
    try:
        if (run := _run(folder)) is not None:
            return [run]
        for home in (folder, folder / _LOGS):
            if is_directory(home):
                below = [entry for entry in home.iterdir() if _VERSION.fullmatch(entry.name) and is_directory(entry)]
                if found := [run for entry in _ordered(below) if (run := _run(entry)) is not None]:
                    return found
    except OSError:
        pass  # whoever opens it says why it cannot be looked into
    return []


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint is a step of, by its name; None where that says enough by itself."""
    if not any(kind.fullmatch(checkpoint.name) for kind in (_TRAINER, _TIMM, _LIGHTNING)):
        return None
    home = checkpoint.parent
    return home.parent if home.name == _INSIDE else home


def _run(folder: Path) -> Run | None:
    names = {entry.name: entry for entry in folder.iterdir()}
    if steps := [entry for name, entry in names.items() if _TRAINER.fullmatch(name) and is_directory(entry)]:
        return _trainer(folder, _ordered(steps))
    files = [entry for name, entry in names.items() if _TIMM.fullmatch(name)]
    if steps := [entry for entry in files if entry.name.startswith("checkpoint-")] or files:
        return _timm(folder, _ordered(steps), {entry.name.split(".")[0]: entry for entry in files})
    below = names.get(_INSIDE)
    inside = list(below.iterdir()) if below is not None and is_directory(below) else []
    if files := [entry for entry in inside if entry.suffix == ".ckpt"]:
        return _lightning(folder, _ordered(files))
    files = [entry for entry in names.values() if entry.suffix == ".ckpt"]  # ModelCheckpoint(dirpath=...)
    if files and all(_LIGHTNING.fullmatch(entry.name) for entry in files):
        return _lightning(folder, _ordered(files))
    return None


def _ordered(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural_key(path.name))


def _in_training(files: list[Path]) -> list[Path]:
    """Lightning's files by their steps or epochs: other numbers may come first in their names."""
    for what in ("step", "epoch"):
        found = {file: re.search(rf"{what}=(\d+)", file.name) for file in files}
        known = {file: int(match[1]) for file, match in found.items() if match is not None}
        if len(known) == len(files):
            return sorted(_ordered(files), key=known.__getitem__)
    return _ordered(files)


def _trainer(folder: Path, steps: list[Path]) -> Run:
    """The last checkpoint's trainer_state.json names the best one, where the Trainer was asked to look for it."""
    try:
        state = read_json(steps[-1] / "trainer_state.json")
        named = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    except (OSError, ValueError):
        named = None
    best = [step for step in steps if step.name == _last_part(named)]
    return Run(folder, tuple(steps), (best or steps[-1:])[0], "its best, by trainer_state.json" if best else "its last")


def _timm(folder: Path, steps: list[Path], named: dict[str, Path]) -> Run:
    best = named.get("model_best")
    return Run(folder, tuple(steps), best or named.get("last") or steps[-1], "its best" if best else "its last")


def _lightning(folder: Path, files: list[Path]) -> Run:
    """`last.ckpt` is a copy of a step. The newest file holds what its ModelCheckpoint knew of the best."""
    copies = [file for file in files if _LAST.fullmatch(file.name)]
    steps = _in_training([file for file in files if file not in copies]) or files
    named = _best_of_lightning((copies or steps)[-1])
    if best := [step for step in steps if step.name == named]:
        return Run(folder, tuple(steps), best[0], "its best, by ModelCheckpoint")
    alone = len(steps) == 1 and steps != files
    return Run(folder, tuple(steps), steps[-1], "the one that is kept beside last.ckpt" if alone else "its last")


def _best_of_lightning(newest: Path) -> str | None:
    """The name of the file that all callbacks with a score call the best; None where they do not agree or say."""
    try:
        callbacks = values_of(newest).get("callbacks")
    except CheckpointError:  # opening it says what is wrong
        return None
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    scored = [one for one in states if isinstance(one, Mapping) and one.get("best_model_score") is not None]
    named = {_last_part(one.get("best_model_path")) for one in scored}
    return named.pop() if len(named) == 1 else None


def _last_part(path: object) -> str | None:
    """The last part of a path that was written anywhere."""
    return re.split(r"[/\\]", path)[-1] if isinstance(path, str) else None

"""The folder of a search: whose trials it holds, which process works on which, and what is known of each.

`out/` holds the checkpoints with their records. What it takes to continue is in `out/search/`, so that opening `out`
as a pool finds ingredients only. Several processes may work here at once: each claims a trial (claims.py), and writes
nothing outside of its claim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import files, words
from stockpot.errors import RunError, StockpotError, TaskError
from stockpot.events import Event, Listener
from stockpot.pool.source import listed
from stockpot.run.shapes import ANY, COUNT, NUMBER, SCORE, TEXT, check, flat
from stockpot.soup.contents import copy_companions
from stockpot.zoo.claims import Claims
from stockpot.zoo.plan import Trial


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything in the state dict that is a tensor; tied ones under each name."""
    return copied(model.state_dict())


def copied(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of the tensors among them, copies on the host that share no memory, which safetensors would refuse."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, subject: str = "starting weights") -> None:
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    fitting = {name for name in own.keys() & weights.keys() if own[name].shape == weights[name].shape}
    if wrong := [name for name in {**own, **weights} if name not in fitting]:
        expected = f"the {len(own)} tensors of {type(model).__name__}"
        found = f"others, or other shapes, for {listed(wrong, 4)}"
        raise TaskError.of(subject, expected=expected, found=found, fix="give the state dict of this very model")
    model.load_state_dict(dict(weights), strict=False)


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], root: Path) -> None:
    """One safetensors file, there whole or not at all."""
    with files.file(path, root) as place:
        save_file(dict(tensors), place, dict(metadata))


def read_file(path: Path, root: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(files.check_inside(root, path), framework="pt") as file:
            names = list(file.keys())
            # Copied: the file is mapped, and may be replaced or removed while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        expected, fix = "weights that an earlier run wrote", "remove the folder and start again"
        raise RunError.of(str(path), expected=expected, found=str(error), fix=fix) from error


def write_directory(path: Path, model: nn.Module, companions: Path | None, root: Path) -> None:
    """A model folder in Hugging Face form, with the config and tokenizer found in `companions`."""
    with files.directory(path, overwrite=True, root=root) as folder:
        save_file(weights_of(model), folder / "model.safetensors", {"format": "pt"})
        if companions is not None:
            copy_companions(companions, folder)
        to_json = getattr(getattr(model, "config", None), "to_json_string", None)
        if to_json is not None:
            # The model in memory may have another head than the folder it came from.
            config = {**json.loads(to_json(use_diff=False)), "architectures": [type(model).__name__]}
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


FORMAT = 2
INTERVAL = 300.0  # seconds of work that a kill may cost
POLL = 0.2  # seconds between looks at what other processes hold

Score = dict[str, Any]
_RECORD = {
    "format": COUNT, "name": TEXT, "settings": {"*": ANY}, "path": (None, TEXT), "score": SCORE, "seconds": NUMBER,
    "steps": COUNT, "losses": [NUMBER], "failure": (None, TEXT),
}  # fmt: skip


@dataclass(frozen=True)
class TrialRecord:
    """A finished trial. `score` is `{"value", "low", "high", "n", "loss"}` on the validation data."""

    name: str
    settings: Trial
    path: Path | None  # of the checkpoint; None when the trial failed
    score: Score | None
    seconds: float
    steps: int
    losses: tuple[float, ...]  # mean training loss of each epoch
    failure: str | None = None  # what stopped it, and where

    @property
    def failed(self) -> bool:
        return self.failure is not None

    def write(self, folder: Path) -> None:
        content = {**dataclasses.asdict(self), "format": FORMAT, "path": self.path and self.path.name}
        files.write_json(folder / f"{self.name}.json", content, folder)


def read_record(folder: Path, name: str) -> TrialRecord | None:
    """The record, or None when the trial has not finished or its checkpoint is gone."""
    file = folder / f"{name}.json"
    try:
        content = files.read_json(file, root=folder)
        check(content, _RECORD)
        del content["format"]
        if content["path"] not in (None, name, f"{name}.safetensors"):
            raise ValueError(f"the path {content['path']!r:.80}")
        path = None if content["path"] is None else files.check_inside(folder, folder / content["path"])
        settings, losses = Trial(**content["settings"]), tuple(content["losses"])
        record = TrialRecord(**{**content, "name": name, "path": path, "settings": settings, "losses": losses})
        return record if path is None or path.exists() else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, StockpotError) as error:
        fix = "remove the file, and the trial is made again"
        raise RunError.of(str(file), expected="the record of a trial", found=_said(error), fix=fix) from error


def _said(error: Exception) -> str:
    return str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"


def read_records(folder: str | Path) -> list[TrialRecord]:
    """All finished trials of a folder, in order."""
    names = sorted(file.stem for file in Path(folder).glob("trial_*.json"))
    return [record for name in names if (record := read_record(Path(folder), name)) is not None]


@dataclass(frozen=True)
class Saved:
    """The state of an unfinished training run, in one safetensors file."""

    path: Path
    interval: float  # seconds between saves
    root: Path

    def save(self, tensors: Mapping[str, Any], values: dict[str, Any]) -> None:
        write_file(self.path, copied(tensors), {"values": json.dumps(values)}, self.root)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        try:
            tensors, metadata = read_file(self.path, self.root)
            return tensors, dict(files.parse_json(metadata["values"]))
        except (RunError, KeyError, TypeError, ValueError):
            return None  # costs time, never the result: the trial starts again

    def clear(self) -> None:
        files.clear(self.path.parent, [self.path.name], self.root)


class Folder:
    """One search with `count` trials."""

    def __init__(self, out: Path, count: int) -> None:
        self.out = out
        self.names = [f"trial_{number:03d}" for number in range(count)]
        self.inner = out / "search"
        self.start = self.inner / "start.safetensors"  # the weights every trial starts from
        self._claims = Claims(out)

    @contextlib.contextmanager
    def prepared_alone(self, listen: Listener) -> Iterator[None]:
        """For plan and start, which one process at a time looks at and writes; the others wait for it."""
        files.make_directory(self.out)
        told = False
        while True:
            with self._claims.held(self.out) as ours:
                if ours:
                    self._sweep()
                    yield
                    return
            if not told:
                listen(Event("waiting", {"trials": ["probe"]}))
                told = True
            time.sleep(POLL)

    def _sweep(self) -> None:
        """What killed processes left half-written goes, unless another process is at work on a trial."""
        begun = [folder for folder in (self.out, self.inner) if folder.is_dir()]
        with contextlib.ExitStack() as claims:
            if len(begun) == 1 or all(claims.enter_context(self.claimed(name)) for name in self.names):
                for folder in begun:
                    files.sweep(folder, self.out)

    def claimed(self, name: str) -> AbstractContextManager[bool]:
        """Whether the trial is ours for the block; not if another process has it."""
        return self._claims.held(self.inner, name)

    def saved(self, name: str, interval: float = INTERVAL) -> Saved:
        return Saved(self.inner / f"{name}.safetensors", interval, self.out)

    def begin(self, identity: dict[str, Any]) -> None:
        """Write down what is searched, or find that the same is under way; only trials may be added.

        `identity` is everything that decides what comes out, as JSON values; the trials are at `["plan"]["trials"]`.
        """
        path, there, wanted = self.inner / "plan.json", None, {"format": FORMAT, **identity}
        try:
            there = files.read_json(path, root=self.out)
            if there["format"] != FORMAT or not isinstance(there["plan"]["trials"], list):
                raise ValueError(f"format {there['format']!r:.80}")
        except FileNotFoundError:
            if any(self.out.glob("trial_*")):
                expected = "an empty folder, or one that a search has begun in"
                found = "trials without search/plan.json"
                raise RunError.of(str(self.out), expected, found, "choose another folder") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunError.of(str(path), "the plan of a search", _said(error), "choose another folder") from error
        else:
            _check_same(self.out, there, wanted)
        if there != wanted:
            files.make_directory(self.inner, self.out)
            files.write_json(path, wanted, self.out)


def _check_same(out: Path, there: dict[str, Any], now: dict[str, Any]) -> None:
    before, after = flat(there), flat(now)
    new = range(len(there["plan"]["trials"]), len(now["plan"]["trials"]))
    added = tuple(f"plan.trials.{number}." for number in new)
    differences = [
        f"{key}: {before.get(key, 'nothing'):.100} there, {after.get(key, 'nothing'):.100} now"
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.startswith(added)
    ]
    if differences:
        found = f"another:\n    {words.first_of(differences)}\n "
        fix = "choose another folder, or go back to the settings, data and code there"
        raise RunError.of(str(out), expected="the search that was begun here", found=found, fix=fix)

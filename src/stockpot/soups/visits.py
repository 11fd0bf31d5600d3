"""What has been learned so far, block by block: enough to replay it, and to continue where a killed run was.

A finished visit is its raw coefficients; the soup follows from them and the checkpoints by the same operations in the
same order. So a state is kilobytes for any model.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from stockpot.errors import RunError, describe
from stockpot.signals import Stop, held
from stockpot.soups.setbacks import Setbacks
from stockpot.soups.settings_before import Settings
from stockpot.soups.state import StateStore
from stockpot.soups.track import Track

Partial = tuple[dict[str, Tensor], dict[str, Any]]


class Visits:
    """`done["t.n"]` holds the raw coefficients (b, G) that block t ended with on track n."""

    def __init__(
        self,
        blocks: list[list[int]],
        settings: Settings,
        store: StateStore,
        starts: Sequence[Sequence[int] | None] = (),
    ) -> None:
        self.blocks = blocks
        self.starts = starts  # of every track: kept because they were not cheap to find
        self.arranged = settings  # with what the memory plan decided
        self.history: list[Mapping[str, Any]] = []
        self.done: dict[str, Tensor] = {}
        self.partial: Partial | None = None  # of the visit under way
        self._values: dict[str, dict[str, Any]] = {}
        self._settings = settings
        self._store = store
        self._saved_at = time.monotonic()
        self._stop = Stop()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """While a visit is under way, a signal to stop waits until it can be saved."""
        with held() as self._stop:
            yield

    def add(self, key: str, raw: Tensor, track: Track) -> None:
        """What a track ended a visit with."""
        held_out = track.held_out_loss if math.isfinite(track.held_out_loss) else None
        self.done[key] = raw
        self._values[key] = {
            "temperature": track.temperature,
            "held_out": held_out,
            "setbacks": track.setbacks.to_json(),
        }
        self.partial = None
        self.save()

    def recall(self, key: str, track: Track) -> Tensor:
        """The coefficients a finished visit ended with; the track gets what else it had then."""
        values = self._values[key]
        track.temperature = values["temperature"]
        track.held_out_loss = float("inf") if values["held_out"] is None else values["held_out"]
        track.setbacks = Setbacks.from_json(values["setbacks"])
        return self.done[key]

    def finished(self, tracks: list[Track]) -> int:
        """Blocks that every track has visited."""
        t = 0
        while all(f"{t}.{track.number}" in self.done for track in tracks):
            t += 1
        return t

    def cut(self, size: int, tracks: list[Track]) -> None:
        """Blocks of at most `size` models from here on; visits that not every track has made are forgotten."""
        t = self.finished(tracks)
        rest = [block[i : i + size] for block in self.blocks[t:] for i in range(0, len(block), size)]
        if rest != self.blocks[t:]:
            self.blocks = self.blocks[:t] + rest
            self.done = {key: raw for key, raw in self.done.items() if int(key.split(".")[0]) < t}
            self.partial = None

    def due(self) -> bool:
        return self._stop.asked or time.monotonic() - self._saved_at > self._store.interval

    def save(self) -> None:
        tensors = {f"visit.{key}": tensor for key, tensor in self.done.items()}
        arranged = self.arranged
        values: dict[str, Any] = {
            "visits": self._values,
            "history": self.history,
            "blocks": self.blocks,
            "starts": [None if start is None else list(start) for start in self.starts],
            "settings": _plain(self._settings),
            "arranged": [arranged.directions, arranged.accumulate, arranged.low_memory],
            "partial": None,
        }
        if self.partial is not None:
            tensors.update({f"partial.{name}": tensor for name, tensor in self.partial[0].items()})
            values["partial"] = self.partial[1]
        self._store.save(tensors, values)
        self._saved_at = time.monotonic()
        self._stop.obey()

    def restore(self) -> None:
        saved = self._store.load()
        if saved is None:
            if any(start is not None for start in self.starts):
                self.save()
            return
        tensors, values = saved
        _check_same(values.get("settings"), _plain(self._settings))
        self.done = {n.removeprefix("visit."): x for n, x in tensors.items() if n.startswith("visit.")}
        self._values = values["visits"]
        self.history = list(values["history"])
        self.blocks = values["blocks"]
        directions, accumulate, low_memory = values["arranged"]
        self.arranged = dataclasses.replace(
            self._settings, directions=directions, accumulate=accumulate, low_memory=low_memory
        )
        if values["partial"] is not None:
            partial = {n.removeprefix("partial."): x for n, x in tensors.items() if n.startswith("partial.")}
            self.partial = (partial, values["partial"])


def _plain(settings: Settings) -> dict[str, Any]:
    """As JSON holds them."""
    return {
        name: "a function" if callable(value) else value
        for name, value in dataclasses.asdict(settings).items()
    }


def _check_same(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """What was learned one way is not continued in another, as after an update that changed a default."""
    if saved == now:
        return
    if saved is None:
        found = "settings that were not recorded, as earlier versions left them"
    else:
        keys = [key for key in now if saved.get(key) != now[key]]
        found = ", ".join(f"{key} {saved.get(key)!r}, now {now[key]!r}" for key in keys) or "others"
    raise RunError(
        describe(
            "the saved state of an unfinished method",
            expected="the settings that are to be used now",
            found=found,
            fix="start anew (cook and compare: --overwrite), or go on with the version of stockpot that began it",
        )
    )

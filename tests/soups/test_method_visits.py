"""What is known of finished visits: kept, recalled, cut and restored exactly."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot.soups.settings import settings_for
from stockpot.soups.track import Track
from stockpot.soups.visits import Visits

SETTINGS = settings_for("mehl+", steps=3)


class Store:
    """Keeps what was saved last, as a disk would: a copy."""

    def __init__(self, interval: float = 1000.0) -> None:
        self.interval = interval
        self.saved: Any = None

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return copy.deepcopy(self.saved)  # type: ignore[no-any-return]

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        self.saved = copy.deepcopy((tensors, values))


def track(number: int, temperature: float | None = None, held_out: float = float("inf")) -> Track:
    data: Any = None
    return Track(number, data, temperature=temperature, held_out_loss=held_out)


def visits(store: Store | None = None, blocks: list[list[int]] | None = None) -> Visits:
    return Visits(blocks or [[0, 1, 2, 3], [4, 5]], SETTINGS, store or Store())


def test_a_finished_visit_is_recalled_with_all_it_had() -> None:
    known = visits()
    raw = torch.arange(4.0)
    known.add("0.1", raw, track(1, temperature=2.5, held_out=0.75))
    known.add("1.1", raw + 1, track(1))
    again = track(1)
    assert torch.equal(known.recall("0.1", again), raw)
    assert (again.temperature, again.held_out_loss) == (2.5, 0.75)
    assert torch.equal(known.recall("1.1", again), raw + 1)
    assert (again.temperature, again.held_out_loss) == (None, float("inf"))


def test_a_block_is_finished_when_every_track_has_visited_it() -> None:
    known, tracks = visits(), [track(0), track(1)]
    assert known.finished(tracks) == 0
    known.add("0.0", torch.zeros(1), tracks[0])
    assert known.finished(tracks) == 0
    known.add("0.1", torch.zeros(1), tracks[1])
    assert known.finished(tracks) == 1
    known.add("1.0", torch.zeros(1), tracks[0])
    known.add("1.1", torch.zeros(1), tracks[1])
    assert known.finished(tracks) == 2


def test_cutting_keeps_finished_blocks_and_forgets_the_others() -> None:
    known, tracks = visits(blocks=[[0, 1], [2, 3, 4, 5], [6, 7, 8]]), [track(0), track(1)]
    for key, one in (("0.0", tracks[0]), ("0.1", tracks[1]), ("1.0", tracks[0])):
        known.add(key, torch.zeros(1), one)
    known.partial = ({}, {})
    known.cut(2, tracks)
    assert known.blocks == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert set(known.done) == {"0.0", "0.1"}
    assert known.partial is None


def test_cutting_to_what_already_fits_changes_nothing() -> None:
    known, tracks = visits(), [track(0), track(1)]
    known.add("0.0", torch.zeros(1), tracks[0])
    known.partial = ({}, {"step": 1})
    known.cut(4, tracks)
    assert known.blocks == [[0, 1, 2, 3], [4, 5]]
    assert set(known.done) == {"0.0"}
    assert known.partial == ({}, {"step": 1})


def test_what_is_saved_is_restored() -> None:
    store = Store()
    known = visits(store)
    known.arranged = dataclasses.replace(SETTINGS, directions="int8", accumulate=4, low_memory=True)
    known.history.append({"kind": "step", "loss": 1.0})
    known.add("0.0", torch.arange(3.0), track(0, temperature=1.5))
    known.partial = ({"raw": torch.ones(2), "best": torch.zeros(2)}, {"step": 7})
    known.save()
    again = visits(store, [[9]])
    again.restore()
    assert again.blocks == [[0, 1, 2, 3], [4, 5]]
    assert list(again.done) == ["0.0"]
    assert torch.equal(again.done["0.0"], torch.arange(3.0))
    assert again.history == [{"kind": "step", "loss": 1.0}]
    assert again.arranged == known.arranged
    assert again.partial is not None
    assert {name: x.tolist() for name, x in again.partial[0].items()} == {
        "raw": [1.0, 1.0],
        "best": [0.0, 0.0],
    }
    assert again.partial[1] == {"step": 7}
    back = track(0)
    again.recall("0.0", back)
    assert back.temperature == 1.5


def test_a_finished_visit_is_saved_at_once_and_ends_the_one_under_way() -> None:
    store = Store()
    known = visits(store)
    known.partial = ({"raw": torch.ones(1)}, {"step": 1})
    known.add("0.0", torch.zeros(1), track(0))
    assert set(store.saved[0]) == {"visit.0.0"}
    assert store.saved[1]["partial"] is None


def test_nothing_saved_is_nothing_restored() -> None:
    known = visits()
    known.restore()
    assert known.done == {}
    assert known.arranged == SETTINGS


@pytest.mark.parametrize(("interval", "answer"), [(1000.0, False), (-1.0, True)])
def test_a_save_is_due_after_its_interval(interval: float, answer: bool) -> None:
    known = visits(Store(interval))
    assert known.due() is answer
    known.save()
    assert known.due() is answer

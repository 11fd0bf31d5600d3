"""Folds that set out from different places are averaged where no hill lies between."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Event, Soup, cook
from stockpot.soup import weights
from stockpot.soups import averaging, guard
from stockpot.soups.averaging import Average
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.track import Track
from stockpot.task import Scores
from zoo import uneven, weights_of, zoo

BRIEF: dict[str, Any] = {"steps": 8, "batch_size": 16, "lr": 0.05, "evaluations": 4, "guard": False}


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Track]:
    """What the folds of the latest run learned."""
    tracks: list[Track] = []
    by_start = averaging.by_start

    def heard(given: list[Track]) -> list[list[Track]]:
        tracks[:] = given
        return by_start(given)

    monkeypatch.setattr(averaging, "by_start", heard)
    return tracks


def test_folds_from_different_places_are_averaged_where_that_is_no_worse(
    tmp_path: Path, learned: list[Track]
) -> None:
    pool, task = uneven(tmp_path)
    result = cook(pool, task, "crossfit", **{**BRIEF, "folds": 2, "start": "own-greedy"})
    (record,) = [h for h in result.history if h["kind"] == "average"]
    assert record["kept"] == "all"
    assert list(record["apart"]) == ["fold 1", "fold 2"]
    assert learned[0].start != learned[1].start
    assert record["together"] <= sum(record["apart"].values()) / 2
    parts = task.fit.folds(2, 0)
    for (_, outside), track, told in zip(parts, learned, record["apart"].values(), strict=True):
        Soup(pool, Kitchen(pool, task).layout("tensor"), track.W).load_into(task.model)
        assert task.score(indices=outside).loss == pytest.approx(told, rel=1e-5)  # where it did not learn
    assert torch.equal(weights_of(result), torch.stack([track.W for track in learned]).mean(dim=0))
    assert not any("in this soup" in note for note in result.notes)


def test_what_has_a_hill_between_is_not_averaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = uneven(tmp_path)
    kitchen = Kitchen(pool, task)
    events: list[Event] = []
    kitchen.listen = events.append
    with kitchen.live(kitchen.layout("tensor")) as live:
        tracks = []
        for number, samples in enumerate((10, 20, 30)):  # a fold has learned ingredient of its number
            track = Track(number, task.fit, task.fit.subset(torch.arange(samples)))
            track.W = weights.chosen(6, len(live.layout), [number])
            track.theta = live.mean([number]).clone()
            tracks.append(track)
        places = [[tracks[1]], [tracks[0], tracks[2]]]
        loss = 1.0  # of the average: a hill in the middle

        def scored(live: Any, W: Tensor) -> Any:
            assert torch.allclose(live.theta, live.mean([0, 1, 2]), atol=1e-6)  # what is scored is W's soup
            assert torch.equal(W, everything)
            return SimpleNamespace(loss=loss)

        everything = torch.stack([track.W for track in tracks]).mean(dim=0)
        monkeypatch.setattr(kitchen, "score_live", scored)
        held_out = [0.4, 0.6, 0.8]
        kept = averaging.checked(kitchen, live, places, held_out)
        assert kept.record == {
            "together": 1.0,
            "apart": {"fold 2": pytest.approx(0.6), "folds 1, 3": pytest.approx(0.7)},
            "kept": "fold 2",
        }
        assert kept.tracks == [tracks[1]]
        assert torch.equal(kept.W, tracks[1].W)
        assert kept.note == (
            "only fold 2 is in this soup: the average of all folds has a loss of 1 on the fitting data, the folds"
            " themselves 0.6667 on what they left out"
        )
        assert [event.data["kept"] for event in events if event.kind == "average"] == ["fold 2"]
        held_out = [0.4, 0.6, 0.6]  # 0.567 over all samples
        better = averaging.checked(kitchen, live, places, held_out)
        assert better.tracks == [tracks[0], tracks[2]]
        assert torch.equal(better.W, weights.chosen(6, len(live.layout), [0, 2]))
        for value, whole in ((0.56, True), (0.57, False), (float("nan"), False)):
            loss = value
            found = averaging.checked(kitchen, live, places, held_out)
            assert (found.note is None) == whole
            assert torch.equal(found.W, everything) == whole
        # Nothing to compare with: no reason to doubt.
        assert averaging.checked(kitchen, live, places, [float("nan")] * 3).note is None


def test_a_fold_that_knows_its_own_samples_too_well_is_no_reason(
    tmp_path: Path, learned: list[Track]
) -> None:
    """On what folds learned from, the average may be worse than they are without any hill between."""
    pool, task = uneven(tmp_path)
    result = cook(
        pool, task, "crossfit", **{**BRIEF, "folds": 4, "start": "own-greedy", "steps": 200, "evaluations": 1}
    )
    (record,) = [h for h in result.history if h["kind"] == "average"]
    on_fit = []
    for track in learned:
        Soup(pool, Kitchen(pool, task).layout("tensor"), track.W).load_into(task.model)
        on_fit.append(task.score().loss)
    assert sum(record["apart"].values()) > sum(on_fit)  # held out it looks worse, as it should
    assert record["kept"] == "all"


def test_a_soup_of_one_fold_says_so_and_has_its_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = uneven(tmp_path)
    temperatures: list[float] = []

    def last_alone(kitchen: Any, live: Any, found: list[list[Track]], held_out: Any) -> Average:
        temperatures[:] = [float(track.temperature or 0) for own in found for track in own]
        return Average(found[-1][0].W, found[-1], {"kept": "fold 2"}, "only fold 2 is in this soup")

    monkeypatch.setattr(averaging, "checked", last_alone)
    given = {**BRIEF, "folds": 2, "temperature": True, "lr": 0.2, "start": "own-greedy"}
    result = cook(pool, task, "crossfit", **given)
    assert result.soup is not None
    assert result.soup.temperature == temperatures[-1] != temperatures[0]
    assert result.notes[0] == "only fold 2 is in this soup"
    assert [h["kept"] for h in result.history if h["kind"] == "average"] == ["fold 2"]
    zeros, ones = (
        torch.zeros(len(task.fit), dtype=torch.float64),
        torch.ones(len(task.fit), dtype=torch.float64),
    )
    known = {"learned": Scores(zeros), "uniform": Scores(ones)}
    monkeypatch.setattr(guard, "decide_by_own", lambda *_: guard.Decision(known))
    other = cook(pool, task, "crossfit", **{**given, "guard": True})
    assert other.notes[0].startswith("the guard returned uniform")
    assert not any("in this soup" in note for note in other.notes)  # it is not in that soup
    assert other.soup is not None
    assert other.soup.temperature is None  # nor is what was learned for it


def test_the_average_has_the_mean_of_the_temperatures(tmp_path: Path, learned: list[Track]) -> None:
    pool, task = uneven(tmp_path)
    given = {**BRIEF, "folds": 2, "temperature": True, "lr": 0.2, "start": "greedy"}
    result = cook(pool, task, "crossfit", **given)
    one, other = (track.temperature for track in learned)
    assert one is not None
    assert other is not None
    assert one != other
    assert result.soup is not None
    assert result.soup.temperature == (one + other) / 2


def test_folds_from_one_place_need_no_evaluation(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "crossfit", **{**BRIEF, "folds": 2, "start": "greedy"})
    assert not [h for h in result.history if h["kind"] == "average"]


def test_folds_that_chose_the_same_soup_set_out_from_one_place(tmp_path: Path) -> None:
    _, task = zoo(tmp_path, 5)
    begins: list[tuple[int, ...] | None] = [(0,), (1, 2), (0,), None]
    tracks = [Track(number, task.fit, start=begin) for number, begin in enumerate(begins)]
    assert [[track.number for track in own] for own in averaging.by_start(tracks)] == [[0, 2], [1], [3]]

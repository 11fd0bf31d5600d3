"""Folds may go different ways in turn: where they set out, and whether a model moves as a whole. Then: the average."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Event, Soup, cook
from stockpot.errors import MethodError
from stockpot.methods import averaging, guard
from stockpot.methods.averaging import Average
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import settings_for
from stockpot.methods.track import Track
from stockpot.soup import weights
from stockpot.task import Scores
from zoo import uneven, weights_of, zoo

BRIEF: dict[str, Any] = {"steps": 8, "batch_size": 16, "lr": 0.05, "evaluations": 4, "guard": False}


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Track]:
    """What the folds of the latest run learned."""
    tracks: list[Track] = []
    kinds = averaging.kinds

    def heard(settings: Any, given: list[Track]) -> averaging.Kinds:
        tracks[:] = given
        return kinds(settings, given)

    monkeypatch.setattr(averaging, "kinds", heard)
    return tracks


def apart(W: Tensor) -> float:
    """How far the weights of one model differ over its tensors."""
    return float((W - W[:, :1]).abs().max())


def test_models_that_never_part_have_one_coefficient_each(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    given = {key: value for key, value in BRIEF.items() if key not in ("evaluations", "guard")}
    tied = weights_of(cook(pool, task, "hl+", coarse=1.0, **given))
    one = weights_of(cook(pool, task, "hl", **given))
    assert apart(tied) < 1e-6
    assert (tied - one).abs().max() < 1e-5
    assert apart(weights_of(cook(pool, task, "hl+", **given))) > 1e-2


@pytest.mark.parametrize("coarse", [(0.0, 1.0), [1, 0], (0.5, 1.0, 0.0)])
def test_folds_take_turns_at_moving_models_as_a_whole(
    tmp_path: Path, learned: list[Track], coarse: Any
) -> None:
    pool, task = zoo(tmp_path, 5)
    given = {**BRIEF, "folds": 3, "start": "mean", "lr": 0.2}
    cook(pool, task, "crossfit", coarse=coarse, **given)
    assert len(learned) == 3
    for track in learned:
        share = coarse[track.number % len(coarse)]
        if share == 1:
            assert apart(track.W) < 1e-6
            assert float((track.W - 0.2).abs().max()) > 1e-2  # it did learn
        else:
            assert apart(track.W) > 1e-2
    several = [track.W for track in learned]
    cook(pool, task, "crossfit", coarse=coarse[0], **given)
    assert torch.equal(several[0], learned[0].W)  # a fold does not care what the others do
    assert not torch.equal(several[1], learned[1].W)


def test_folds_of_different_kinds_are_averaged_where_that_is_no_worse(
    tmp_path: Path, learned: list[Track]
) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "crossfit", **{**BRIEF, "folds": 2, "start": "mean", "coarse": (0.0, 1.0)})
    (record,) = [h for h in result.history if h["kind"] == "average"]
    assert record["kept"] == "all"
    assert set(record["apart"]) == {"from mean", "from mean, whole models"}
    assert record["together"] <= sum(record["apart"].values()) / 2
    parts = task.fit.folds(2, 0)
    for (_, outside), track, told in zip(parts, learned, record["apart"].values(), strict=True):
        Soup(pool, Kitchen(pool, task).layout("tensor"), track.W).load_into(task.model)
        assert task.score(indices=outside).loss == pytest.approx(told, rel=1e-5)  # where it did not learn
    assert torch.equal(weights_of(result), torch.stack([track.W for track in learned]).mean(dim=0))
    assert not any("only the folds" in note for note in result.notes)


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
        kinds = {"from mean": [tracks[1]], "from greedy": [tracks[0], tracks[2]]}
        loss = 1.0  # of the average: a hill in the middle

        def scored(live: Any, W: Tensor) -> Any:
            assert torch.allclose(live.theta, live.mean([0, 1, 2]), atol=1e-6)  # what is scored is W's soup
            assert torch.equal(W, everything)
            return SimpleNamespace(loss=loss)

        everything = torch.stack([track.W for track in tracks]).mean(dim=0)
        monkeypatch.setattr(kitchen, "score_live", scored)
        held_out = [0.4, 0.6, 0.8]
        kept = averaging.checked(kitchen, live, kinds, held_out)
        assert kept.record == {
            "together": 1.0,
            "apart": {"from mean": 0.6, "from greedy": pytest.approx(0.7)},
            "kept": "from mean",
        }
        assert kept.tracks == [tracks[1]]
        assert torch.equal(kept.W, tracks[1].W)
        assert kept.note == (
            "only the folds from mean are in this soup: averaged with the others they have a loss of 1 on the fitting"
            " data, apart 0.6667 on what they left out"
        )
        assert [event.data["kept"] for event in events if event.kind == "average"] == ["from mean"]
        held_out = [0.4, 0.6, 0.6]  # 0.567 over all samples
        better = averaging.checked(kitchen, live, kinds, held_out)
        assert better.tracks == [tracks[0], tracks[2]]
        assert torch.equal(better.W, weights.chosen(6, len(live.layout), [0, 2]))
        for value, whole in ((0.56, True), (0.57, False), (float("nan"), False)):
            loss = value
            found = averaging.checked(kitchen, live, kinds, held_out)
            assert (found.note is None) == whole
            assert torch.equal(found.W, everything) == whole
        # Nothing to compare with: no reason to doubt.
        assert averaging.checked(kitchen, live, kinds, [float("nan")] * 3).note is None


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


def test_a_soup_of_one_kind_says_so_and_has_its_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, task = zoo(tmp_path, 5)
    temperatures: list[float] = []

    def last_alone(kitchen: Any, live: Any, kinds: averaging.Kinds, held_out: Any) -> Average:
        tracks = kinds["from mean"]
        temperatures[:] = [float(track.temperature or 0) for own in kinds.values() for track in own]
        return Average(tracks[0].W, tracks, {"kept": "from mean"}, "only the folds from mean")

    monkeypatch.setattr(averaging, "checked", last_alone)
    given = {**BRIEF, "folds": 2, "temperature": True, "lr": 0.2, "start": ("greedy", "mean")}
    result = cook(pool, task, "crossfit", **given)
    assert result.soup is not None
    assert result.soup.temperature == temperatures[-1] != temperatures[0]
    assert result.notes[0] == "only the folds from mean"
    assert [h["kept"] for h in result.history if h["kind"] == "average"] == ["from mean"]
    zeros, ones = (
        torch.zeros(len(task.fit), dtype=torch.float64),
        torch.ones(len(task.fit), dtype=torch.float64),
    )
    known = {"learned": Scores(zeros), "uniform": Scores(ones)}
    monkeypatch.setattr(guard, "decide", lambda *_: guard.Decision(known))
    other = cook(pool, task, "crossfit", **{**given, "guard": True})
    assert other.notes[0].startswith("the guard returned uniform")
    assert not any("only the folds" in note for note in other.notes)  # it is not in that soup


def test_folds_of_one_kind_need_no_evaluation(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)
    result = cook(pool, task, "crossfit", **{**BRIEF, "folds": 2, "start": "greedy", "coarse": 0.0})
    assert not [h for h in result.history if h["kind"] == "average"]


def test_kinds_are_named_in_words(tmp_path: Path) -> None:
    _, task = zoo(tmp_path, 5)

    def names(*begins: tuple[int, ...] | None, **settings: Any) -> dict[str, list[int]]:
        chosen = settings_for("crossfit", folds=len(begins), **settings)
        tracks = [Track(number, task.fit, start=begin) for number, begin in enumerate(begins)]
        return {name: [t.number for t in own] for name, own in averaging.kinds(chosen, tracks).items()}

    assert names((0,), (1, 2), (0,), (1, 2), start=("greedy", "top"), coarse=(0.0, 1.0, 0.5)) == {
        "from greedy": [0],
        "from top, whole models": [1],
        "from greedy, whole models for 0.5 of the steps": [2],
        "from top": [3],
    }
    # Of one name, but from different places.
    assert names((0,), (1, 2), (0,), start="own-greedy") == {
        "from own-greedy (fold 1, 3)": [0, 2],
        "from own-greedy (fold 2)": [1],
    }


@pytest.mark.parametrize("coarse", [1.5, -0.1, (0.0, 1.5), ()])
def test_shares_that_make_no_sense_are_refused(coarse: Any) -> None:
    with pytest.raises(MethodError, match="setting coarse: expected a share in"):
        settings_for("crossfit", coarse=coarse)


def test_only_folds_take_turns() -> None:
    with pytest.raises(
        MethodError, match=r"setting coarse: expected at most as many as there are folds.*\(1\)"
    ):
        settings_for("hl+", coarse=(0.0, 1.0))
    with pytest.raises(
        MethodError, match=r"setting coarse: expected at most as many as there are folds.*\(2\)"
    ):
        settings_for("crossfit", folds=2, coarse=(0, 1, 0))
    with pytest.raises(MethodError, match="setting apart: expected None, when coarse"):
        settings_for("crossfit", coarse=(0.0, 1.0), apart=0.25)

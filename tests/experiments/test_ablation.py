"""The bench for the default: what it compares is paired, what it judges on is new, and what it replaces is put back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import script
from studies import ablation, pools
from studies.ablation import Candidate, replacing, table
from studies.candidates import CANDIDATES

from stockpot.soups import stopping

TINY = replace(pools.POOLS["digits"], name="tiny-digits", models=3, fitted=40, epochs=1.0)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "POOLS", {TINY.name: TINY})


def row(pool: str, seed: int, candidate: str, score: float, **more: Any) -> dict[str, Any]:
    both = {"accuracy": True, "loss": 1.0, "seconds": 2.0, "steps": 10}
    return {"pool": pool, "seed": seed, "candidate": candidate, "score": score, **both, **more}


def test_every_candidate_is_run_once_on_each_draw(tmp_path: Path, tiny: None) -> None:
    candidates = {"default": Candidate(settings={"steps": 2, "folds": 2}), "greedy": Candidate("greedy")}
    told: list[str] = []
    results = tmp_path / "runs" / "x.jsonl"
    for _ in range(2):
        ablation.run([TINY.name], (0, 1), candidates, results, tmp_path / "made", told.append)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(rows) == len(told) == 4
    assert {(one["seed"], one["candidate"]) for one in rows} == {(s, c) for s in (0, 1) for c in candidates}
    assert rows[0]["steps"] == 4
    assert rows[0]["guard"] is not None
    assert 0.2 < rows[1]["score"] <= 1
    assert rows[0]["loss"] != rows[2]["loss"], "another draw"


def test_what_a_candidate_replaces_is_put_back_also_after_an_error() -> None:
    before = stopping.EVERY
    with replacing({"stopping.EVERY": 7}):
        assert stopping.EVERY == 7
    assert before == stopping.EVERY
    with pytest.raises(AttributeError), replacing({"stopping.EVERY": 7, "stopping.NOTHING": 1}):
        pass
    assert before == stopping.EVERY
    for candidate in CANDIDATES.values():
        with replacing(candidate.replaced):  # every name is one that there is
            pass


@pytest.mark.parametrize("name", pools.POOLS)
def test_samples_to_fit_on_and_to_judge_on_were_seen_by_no_model(name: str) -> None:
    small = pools.POOLS[name]
    parts = small.parts(0, small.fitted)
    seen = {part: {tuple(x.flatten().tolist()) for x in parts[part][0]} for part in parts}
    assert not seen["dev"] & (seen["fit"] | seen["train"] | seen["pretrain"])
    assert not seen["fit"] & (seen["train"] | seen["pretrain"])
    assert len(parts["fit"][0]) == small.fitted
    assert len(parts["dev"][0]) > 900
    assert not torch.equal(parts["fit"][0], small.parts(1, small.fitted)["fit"][0])
    assert torch.equal(parts["fit"][0], small.parts(0, small.fitted)["fit"][0])
    assert sum(p.numel() for p in small.build(small.outputs[1]).parameters()) > 1000


def test_differences_are_paired_and_in_points_or_per_cent_of_the_loss() -> None:
    rows = [
        *(row("a", seed, "default", score) for seed, score in enumerate((0.5, 0.9))),
        *(row("a", seed, "x", score, seconds=1.0, steps=7) for seed, score in enumerate((0.52, 0.92))),
        row("a", 2, "x", 0.0),  # nothing to compare it with
        row("b", 0, "default", -2.0, accuracy=False, loss=2.0),
        row("b", 0, "x", -2.2, accuracy=False, loss=2.2),
    ]
    head, _, default, x = table(rows)
    assert head == "| minus default | a | b | mean | worst | time | steps |"
    assert default == "| default | 70.00 (2) | -2.0000 (1) | – | – | 1.00 | 30 |"
    assert x == "| x | +2.00 (0.00) | -10.00 % (nan) | -4.00 (nan) | -10.00 | 0.67 | 24 |"


def test_pools_that_are_kept_apart_are_opened_only_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(ablation, "run", lambda names, *rest: opened.extend(names))
    command = script("ablation")
    apart = [name for name, one in pools.POOLS.items() if one.kept_apart]
    assert len(apart) >= 3
    assert command.main(["--runs", str(tmp_path)]) == 0
    assert opened == [name for name in pools.POOLS if name not in apart]
    opened.clear()
    assert command.main(["--runs", str(tmp_path), "--kept-apart"]) == 0
    assert opened == apart


def test_an_unknown_candidate_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert script("ablation").main(["--candidates", "defualt"]) == 1
    assert "no candidate 'defualt'; there are default, best" in capsys.readouterr().err

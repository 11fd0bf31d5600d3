"""The search over kinds of folds: a mixture is what the product would have learned, and the best one is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import turns
from learners.turns import KINDS, MIXTURES, mixed
from learners.turns import turns as in_turn
from study_zoo import make

from stockpot.methods import cook
from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_pool, build_task
from zoo import weights_of


def call(home: Path, *words: str) -> None:
    assert turns.main([*words, "--home", str(home)]) == 0


def test_a_mixture_is_what_folds_that_take_turns_would_learn(tmp_path: Path) -> None:
    home = make(tmp_path)
    call(home, "prepare", "tiny")
    call(home, "learn", "tiny", "--seed", "1", "--kind", *"gMto")
    folder = home / "runs" / "tiny" / "turns"
    found = {kind: torch.load(folder / f"folds-1-{turns._safe(kind)}.pt") for kind in "gMto"}
    recipe = load_recipe(home / "tiny" / "recipe.yaml", ["data.report=null"])
    settings: dict[str, Any] = {"steps": 8, "lr": 0.05, "batch_size": 16, "seed": 1, "guard": False}
    compared = []
    for mixture in ("g", "o", "M", "gt", "tM"):
        start = tuple(KINDS[kind].start for kind in mixture)
        coarse = tuple(KINDS[kind].coarse for kind in mixture)
        result = cook(
            build_pool(recipe),
            build_task(recipe, report=False),
            "crossfit",
            start=start,
            coarse=coarse,
            **settings,
        )
        (kept,) = [h["kept"] for h in result.history if h["kind"] == "average"] or ["all"]
        if kept == "all":
            wanted = mixed(found, next(in_turn(mixture, 4)))
            assert (weights_of(result) - wanted).abs().max() < 1e-6, mixture
            compared.append(mixture)
    assert {"g", "M", "gt"} <= set(compared)  # between others there may be a hill


def test_every_beginning_of_a_round_counts() -> None:
    assert list(in_turn("g", 4)) == ["gggg"]
    assert list(in_turn("gM", 4)) == ["gMgM", "MgMg"]
    assert list(in_turn("gtM", 4)) == ["gtMg", "tMgt", "MgtM"]
    assert list(in_turn("ggtM", 4)) == ["ggtM", "gtMg", "tMgg", "Mggt"]
    assert {kind for mixture in MIXTURES for kind in mixture} == set(KINDS)


def test_all_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = make(make(tmp_path), "other", 7)
    for zoo in ("tiny", "other"):
        call(home, "prepare", zoo)
        for seed in ("0", "1"):
            call(home, "learn", zoo, "--seed", seed, "--kind", "g", "m")
            call(home, "judge", zoo, "--seed", seed)
    capsys.readouterr()
    call(home, "choose", "tiny", "other", "-o", str(tmp_path / "table.json"))
    told = capsys.readouterr().out
    table = json.loads((tmp_path / "table.json").read_text())
    assert set(table["mixtures"]) == {"greedy", "uniform", "g", "m", "gm", "all of all"}
    assert told.splitlines()[-1] == f"best: {table['chosen']}"
    assert table["chosen"] in table["near"]
    for zoo in ("tiny", "other"):
        folder = home / "runs" / zoo / "turns"
        judged = [torch.load(folder / f"judged-{seed}.pt") for seed in (0, 1)]
        gain = sum(float((one["values"]["m"] - one["values"]["greedy"]).mean()) for one in judged) / 2
        assert table["mixtures"]["m"][zoo]["over_greedy"][0] == pytest.approx(gain, abs=1e-6)
        assert len(judged[0]["values"]["m"]) == 60  # the dev part
    assert table["mixtures"]["g"]["all"]["over_first"] == [0.0, 0.0]


def judged(folder: Path, accuracy: dict[str, float], loss: dict[str, float]) -> None:
    """As if 1,000 samples had been judged: so many of them right, the first ones."""
    folder.mkdir(parents=True)
    values = {name: (torch.arange(1000) < 1000 * share).float() for name, share in accuracy.items()}
    torch.save({"values": values, "loss": loss}, folder / "judged-0.pt")


def test_of_those_within_a_standard_error_the_lowest_loss_is_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracy = {"greedy": 0.9, "g": 0.91, "m": 0.919, "t": 0.92}
    judged(tmp_path / "runs" / "one" / "turns", accuracy, {"greedy": 0.5, "g": 0.3, "m": 0.4, "t": 0.45})
    call(tmp_path, "choose", "one")
    assert (
        capsys.readouterr().out.splitlines()[-1] == "best: m"
    )  # g is too far from the best, t has more loss
    judged(tmp_path / "runs" / "two" / "turns", {**accuracy, "m": 0.88}, dict.fromkeys(accuracy, 0.5))
    call(tmp_path, "choose", "one", "two")
    assert capsys.readouterr().out.splitlines()[-1] == "best: t"  # zoos count alike


def test_what_has_to_be_done_first_is_said(tmp_path: Path) -> None:
    home = make(tmp_path)
    with pytest.raises(
        SystemExit, match=r"scores of tiny, found none\.\n  Fix: run `.*turns.py prepare tiny` first"
    ):
        call(home, "learn", "tiny")
    call(home, "prepare", "tiny")
    with pytest.raises(
        SystemExit, match=r"folds of tiny with seed 3, found none\.\n  Fix: .* learn tiny --seed 3`"
    ):
        call(home, "judge", "tiny", "--seed", "3")
    with pytest.raises(
        SystemExit, match=r"every seed of tiny judged, kind g among them.*\n  Fix: .* judge tiny`"
    ):
        call(home, "choose", "tiny")

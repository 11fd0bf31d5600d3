"""Several ranks make the soup that one process makes, and only the first of them writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ranks.conftest import Torchrun


def made(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def alone(shared: Path, torchrun: Torchrun) -> Path:
    done = torchrun(1, "compare", "recipe.yaml", "--out", "alone")
    assert done.returncode == 0, done.stderr
    return shared / "alone"


@pytest.mark.parametrize("ranks", [2, 4])
def test_torchrun_makes_the_soups_of_one_process(ranks: int, shared: Path, alone: Path, torchrun: Torchrun) -> None:
    done = torchrun(ranks, "compare", "recipe.yaml", "--out", f"ranks{ranks}")
    assert done.returncode == 0, done.stderr
    run = shared / f"ranks{ranks}"
    assert made(run) == made(alone)
    for method in ("best", "uniform", "greedy", "hl-plus", "mehl-plus", "learned-plus", "crossfit"):
        found, wanted = (load_file(folder / "methods" / method / "weights.safetensors") for folder in (run, alone))
        assert (found["W"] - wanted["W"]).abs().max() <= 1e-12, method
    results = [json.loads((folder / "results.json").read_text()) for folder in (run, alone)]
    assert results[0]["recommended"] == results[1]["recommended"]
    for method in ("uniform", "greedy"):  # whose W is the same to the last bit
        records = [(folder / "methods" / method / "soup.json").read_bytes() for folder in (run, alone)]
        assert records[0] == records[1]
    assert f"{ranks} ranks on one host" in done.stderr
    assert done.stdout.count("Report: ") == 1  # only the first rank speaks


def test_a_rank_that_dies_ends_all_and_the_run_goes_on_to_the_same_soup(shared: Path, torchrun: Torchrun) -> None:
    loss = ["--set", "data.loss={python: toy:dies}", "--set", "method.methods=[mehl+, crossfit]"]
    whole = torchrun(2, "compare", "recipe.yaml", "--out", "whole", *loss)
    assert whole.returncode == 0, whole.stderr
    first = torchrun(2, "compare", "recipe.yaml", "--out", "killed", *loss, DIES="1", AT="60")
    assert first.returncode != 0
    assert "another rank has ended" in first.stderr
    assert "resume with: torchrun ... -m stockpot compare recipe.yaml" in first.stderr
    again = torchrun(2, "compare", "recipe.yaml", "--out", "killed", *loss)
    assert again.returncode == 0, again.stderr
    for method in ("mehl-plus", "crossfit"):
        found, wanted = (
            load_file(shared / run / "methods" / method / "weights.safetensors") for run in ("killed", "whole")
        )
        assert found["W"].equal(wanted["W"]), method


def test_an_error_of_one_rank_ends_all_and_is_said_once(torchrun: Torchrun) -> None:
    done = torchrun(
        2, "cook", "recipe.yaml", "--out", "picky", "--set", "data.loss={python: toy:picky}", "--set", "method.name=hl+"
    )
    assert done.returncode != 0
    assert (
        done.stderr.count("error: loss, which is your own code: expected a value, found ValueError: not on this host")
        == 1
    )


def test_an_error_of_all_ranks_is_said_once(torchrun: Torchrun) -> None:
    done = torchrun(2, "cook", "recipe.yaml", "--out", "wrong", "--set", "method.name=hl++")
    assert done.returncode != 0
    assert done.stderr.count("hl++") == 1

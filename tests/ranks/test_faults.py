"""What happens when one of several ranks fails or is killed."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file

from ranks.conftest import Torchrun


def test_a_rank_that_dies_ends_all_and_the_run_goes_on_to_the_same_soup(shared: Path, torchrun: Torchrun) -> None:
    loss = ["--set", "data.loss={python: toy:dies}", "--set", "method.methods=[mehl+, crossfit]"]
    whole = torchrun(2, "compare", "recipe.yaml", "--out", "whole", *loss)
    assert whole.returncode == 0, whole.stderr
    first = torchrun(2, "compare", "recipe.yaml", "--out", "killed", *loss, DIES="1", AT="60")
    assert first.returncode != 0
    assert first.stderr.count("stopped, because rank 1 on ") == 1
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

"""`inspect` against a recipe's model, and what people see who mix up names and places."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from cli.conftest import Answer, Stockpot
from stockpot.cli.recipes import title_of

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    for file in (folder / "pool").glob("*.safetensors"):
        save_file({change(name): tensor for name, tensor in load_file(file).items()}, file)


def test_inspect_says_that_the_pool_fits_the_model(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot("inspect", folder / "recipe.yaml")
    assert answer.code == 0
    assert "The pool fits the recipe's model (Sequential)." in answer.out
    value = json.loads(stockpot("inspect", folder / "recipe.yaml", "--json").out)
    assert value["model"]["fits"] is True
    assert "model" not in json.loads(stockpot("inspect", folder / "pool", "--json").out)


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda name: f"model.{name}", "pool.rename: {'model.': ''}"),
        (lambda name: f"net.{name.replace('0.', '5.')}", "pool.rename: {'net.': ''}); 2 would still not fit."),
        (lambda name: name.replace(".", "_"), "Fix: build the model exactly as it was fine-tuned"),
    ],
    ids=["a prefix", "a prefix and more", "other names"],
)
def test_inspect_says_how_the_pool_and_the_model_differ(
    change: Callable[[str], str], hint: str, folder: Path, stockpot: Stockpot
) -> None:
    renamed(folder, change)
    answer = stockpot("inspect", folder / "recipe.yaml")
    assert answer.code == 1
    assert "The pool does not fit the recipe's model; see the end (Sequential)." in answer.out
    assert "problem: the pool and the recipe's model (Sequential): expected the same 4 tensors" in answer.out
    assert f"the model lacks 4: {', '.join(sorted(map(change, NAMES)))}" in answer.out
    assert "the model has 4 more: 0.weight, 0.bias, 2.weight, 2.bias" in answer.out
    assert hint in answer.out


def test_the_hint_of_inspect_can_be_taken_as_it_is(folder: Path, stockpot: Stockpot) -> None:
    renamed(folder, lambda name: f"model.{name}")
    found = json.loads(stockpot("inspect", folder / "recipe.yaml", "--json").out)["model"]["rename"]
    assert found == {"model.": ""}
    hint = f"pool.rename={found}"
    assert stockpot("inspect", folder / "recipe.yaml", "--set", hint).code == 0


def test_inspect_shows_shapes_that_differ(folder: Path, stockpot: Stockpot) -> None:
    toy = (folder / "toy.py").read_text()
    (folder / "toy.py").write_text(toy.replace("nn.Linear(8, 3)", "nn.Linear(8, 5)"))
    answer = stockpot("inspect", folder / "recipe.yaml")
    assert answer.code == 1
    assert "2 with other shapes: 2.bias: model (5,), pool (3,); 2.weight: model (5, 8), pool (3, 8)" in answer.out
    assert "build the model with the sizes it was fine-tuned with" in answer.out


def test_inspect_names_a_prefix_to_add(folder: Path, stockpot: Stockpot) -> None:
    toy = (folder / "toy.py").read_text()
    wrapped = toy.replace("return nn.Seq", "inside = nn.Seq", 1).replace(
        "nn.Linear(8, 3))", "nn.Linear(8, 3))\n    return Whole(inside)", 1
    )
    whole = """
class Whole(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
"""
    (folder / "toy.py").write_text(wrapped + whole)
    answer = stockpot("inspect", folder / "recipe.yaml")
    assert answer.code == 1
    assert "pool.rename: {'': 'net.'}" in answer.out
    assert stockpot("inspect", folder / "recipe.yaml", "--set", "pool.rename={'': 'net.'}").code == 0


def test_inspect_has_the_norm_of_the_weights_beside_distances(folder: Path, stockpot: Stockpot) -> None:
    value = json.loads(stockpot("inspect", folder / "pool", "--json").out)
    weights = load_file(folder / "pool" / "model_1.safetensors").values()
    norm = sum(float(tensor.double().square().sum()) for tensor in weights) ** 0.5
    assert value["ingredients"][1]["norm"] == pytest.approx(norm, rel=1e-6)
    answer = stockpot("inspect", folder / "pool")
    assert "norm  distance to mean" in answer.out
    assert f"{norm:.4g}" in answer.out


def test_parameters_are_what_is_learned(tmp_path: Path, stockpot: Stockpot) -> None:
    for k in range(3):
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5))
        positions = {"positions": torch.arange(9)}
        save_file({**model.state_dict(), **positions}, tmp_path / f"{k}.safetensors")
    value = json.loads(stockpot("inspect", tmp_path, "--json").out)
    assert value["parameters"] == sum(p.numel() for p in model.parameters()) == 35
    assert "3 ingredients of 35 parameters in 8 tensors" in stockpot("inspect", tmp_path).out


def test_set_without_a_recipe_is_refused(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot("inspect", folder / "pool", "--set", "pool.key=x")
    assert answer.code == 2
    assert "there is no recipe" in answer.err


# Names, places, messages ---------------------------------------------------------------------------------


def test_a_recipe_called_recipe_is_titled_by_its_folder(tmp_path: Path) -> None:
    assert title_of(tmp_path / "digits" / "recipe.yaml") == "digits"
    assert title_of(tmp_path / "digits" / "small.yaml") == "small"
    assert title_of(Path("recipe.yaml")) == Path.cwd().name


def test_evaluating_what_is_not_there_says_what_could_be(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot("evaluate", folder / "nope", folder / "recipe.yaml")
    assert answer.code == 1
    assert "nope: expected a saved soup, a run directory or a checkpoint, found nothing at this path" in answer.err
    assert "RUN/methods/NAME/soup" in answer.err


def test_a_method_without_a_written_soup_is_told_to_be_rebuilt(
    shared: Path, compared: Answer, stockpot: Stockpot
) -> None:
    for path in (shared / "run" / "methods" / "greedy", shared / "run" / "methods" / "greedy" / "soup"):
        answer = stockpot("evaluate", path, shared / "recipe.yaml")
        assert answer.code == 1
        assert "this soup was not written; `stockpot rebuild" in answer.err
        assert "--method greedy` writes it" in answer.err
    assert stockpot("evaluate", shared / "run" / "methods" / "crossfit", shared / "recipe.yaml").code == 0


def test_cook_and_compare_do_not_share_a_directory(shared: Path, compared: Answer, stockpot: Stockpot) -> None:
    assert compared.code == 0
    answer = stockpot("cook", shared / "recipe.yaml")
    assert answer.code == 1
    assert "expected a directory of its own for cook, found an earlier run of compare" in answer.err
    assert "Fix: add --out run-cook, or replace that run with --overwrite" in answer.err

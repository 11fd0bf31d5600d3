"""`stockpot average` from the command line: what it says, and that the lines it shows load the soup."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.conftest import Stockpot, lines
from zoo import mlp


def test_the_three_lines_load_what_was_written(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot("average", f"{folder}/pool/model_[0-2].safetensors", "--out", folder / "soup")
    assert answer.code == 0, answer.err
    assert [line.split() for line in lines(answer.out)[:4]] == [
        ["model", "weight"],
        *([f"model_{k}", "0.3333"] for k in range(3)),
    ]
    names: dict[str, Any] = {"model": mlp()}
    code = answer.out.split("Load it:\n")[1]
    assert 1 <= len(lines(code)) <= 3
    exec(re.sub("^    ", "", code, flags=re.MULTILINE), names)
    saved = load_file(folder / "soup" / "model.safetensors")
    assert all(torch.equal(value, saved[name]) for name, value in names["model"].state_dict().items())


def test_weights_dtype_and_json(folder: Path, stockpot: Stockpot) -> None:
    arguments = ("average", folder / "pool", "--weights", "1,1,1,5", "--dtype", "bfloat16", "--json")
    answer = stockpot(*arguments, "--out", folder / "soup")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert [one["weight"] for one in found["ingredients"]] == ["0.125", "0.125", "0.125", "0.625"]
    assert load_file(folder / "soup" / "model.safetensors")["0.weight"].dtype == torch.bfloat16


def test_a_model_from_another_start_is_warned_of(folder: Path, stockpot: Stockpot) -> None:
    state = load_file(folder / "pool" / "model_0.safetensors")
    save_file({name: -value for name, value in state.items()}, folder / "pool" / "other.safetensors")
    answer = stockpot("average", folder / "pool", "--out", folder / "soup")
    assert "warning: other: farther from every other ingredient than from zero" in answer.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--weights", "a,b"), "expected numbers as in 0.2,0.8, found 'a,b'"),
        (("--dtype", "int8"), "expected float32, bfloat16, float16 or float64, found 'int8'"),
        (("--rename", "x"), "expected OLD=NEW, found 'x'"),
        (("--method", "slerp"), "expected one of uniform, weighted, ema, model_stock"),
    ],
)
def test_wrong_values(folder: Path, stockpot: Stockpot, arguments: tuple[str, ...], text: str) -> None:
    answer = stockpot("average", folder / "pool", "--out", folder / "soup", *arguments)
    assert answer.code != 0
    assert text in re.sub(r"[\s│]+", " ", answer.err)
    assert not (folder / "soup").exists()


@pytest.fixture
def folders(folder: Path) -> list[Path]:
    """The pool as Hugging Face folders."""
    made = []
    for file in sorted((folder / "pool").glob("*.safetensors")):
        made.append(folder / "models" / file.stem)
        made[-1].mkdir(parents=True)
        shutil.copy(file, made[-1] / "model.safetensors")
        (made[-1] / "config.json").write_text("{}")
    return made


def test_a_soup_goes_out_and_comes_back_in_other_forms(folder: Path, folders: list[Path], stockpot: Stockpot) -> None:
    assert stockpot("average", *folders, "--weights", "1,1,1,5", "--out", folder / "soup").code == 0
    soup = load_file(folder / "soup" / "model.safetensors")
    answer = stockpot("export", folder / "soup", folder / "merge.yaml")
    assert answer.code == 0, answer.err
    assert "    weight: 0.625" in (folder / "merge.yaml").read_text()
    answer = stockpot("average", folder / "merge.yaml", "--out", folder / "again")
    assert answer.code == 0, answer.err
    again = load_file(folder / "again" / "model.safetensors")
    assert all(torch.equal(soup[name], again[name]) for name in soup)
    for name, nested in (("a.pt", False), ("a.ckpt", True), ("a.pth.tar", True)):
        assert stockpot("export", folder / "soup", folder / name).code == 0
        state = torch.load(folder / name, weights_only=True)
        state = state["state_dict"] if nested else state
        assert all(torch.equal(soup[key], state[key]) for key in soup)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "soup", "a.onnx"), "expected an ending among .yaml, .yml, .pt, .pth, .bin, .pth.tar, .ckpt, found"),
        (("export", "soup", "toy.py.pt"), "toy.py.pt exists; add --overwrite to replace it"),
        (("export", "nothing", "a.pt"), "expected a saved soup with a soup.json, found none"),
        (("average", "recipe.yaml", "--out", "x"), "expected merge_method: linear, found None"),
        (("average", "recipe.yaml", "--decay", "0.5", "--out", "x"), "not with a mergekit configuration"),
        (("average", "none.yaml", "--out", "x"), "none.yaml: there is no such recipe"),
    ],
)
def test_wrong_forms(
    folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "toy.py.pt").touch()
    assert stockpot("average", "pool", "--out", "soup").code == 0
    answer = stockpot(*arguments)
    assert answer.code != 0
    assert text in re.sub(r"[\s│]+", " ", answer.err)
    assert (folder / "toy.py.pt").stat().st_size == 0

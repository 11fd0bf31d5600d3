"""`stockpot average` from the command line: what it says, and that the lines it shows load the soup."""

from __future__ import annotations

import json
import re
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
        (("--weights", "1", "1", "1"), "Invalid value for --weights: give all of them as in --weights 1,1,1"),
    ],
)
def test_wrong_values(folder: Path, stockpot: Stockpot, arguments: tuple[str, ...], text: str) -> None:
    answer = stockpot("average", folder / "pool", "--out", folder / "soup", *arguments)
    assert answer.code != 0
    assert text in re.sub(r"[\s│]+", " ", answer.err)
    assert not (folder / "soup").exists()


def test_what_a_mergekit_configuration_says_no_option_says(folder: Path, stockpot: Stockpot) -> None:
    for name, dtype in (("a", torch.float32), ("b", torch.bfloat16)):
        save_file({"w": torch.ones(2, 2, dtype=dtype)}, folder / f"{name}.safetensors")
    models = "".join(f"- {{model: '{folder / name}.safetensors', parameters: {{weight: 1}}}}\n" for name in "ab")
    (folder / "merge.yaml").write_text(f"merge_method: linear\nmodels:\n{models}")
    for option in (("--as", "merged"), ("--all-steps",), ("--weights", "1,1")):
        answer = stockpot("average", folder / "merge.yaml", "--out", folder / "soup", *option)
        assert answer.code == 2
        assert f"Invalid value for {option[0]}: not with a mergekit configuration" in answer.err
    assert "--mixed-dtypes" in stockpot("average", folder / "merge.yaml", "--out", folder / "soup").err
    assert stockpot("average", folder / "merge.yaml", "--out", folder / "soup", "--mixed-dtypes").code == 0

"""What a run writes it reads again; what anybody else wrote is believed only in the declared shape."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from stockpot import compare
from stockpot.errors import LinkError, RunError
from stockpot.run.record import curves, encode, read_ingredient_scores, read_run, trial_settings
from stockpot.run.shapes import ANY, COUNT, MAYBE, NUMBER, TEXT, check, clean
from stockpot.task import METRICS, Metric, Scores, Task
from zoo import mlp, samples, zoo

RUN_FILES = ("run.json", "pool.json", "results.json", "recipe.yaml")
METHOD_FILES = ("methods/crossfit/result.json", "methods/crossfit/weights.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small finished run; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    pool, task = zoo(folder / "pool", 4, report=samples(60, seed=5))
    compare(
        pool,
        task,
        ["best", "ensemble", "hl+", "crossfit"],
        run=folder / "run",
        steps=4,
        each={"crossfit": {"steps": 4}},
    )
    (folder / "run" / "recipe.yaml").write_text('{"method": {}}')
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    for file in finished.rglob("*"):
        if file.is_file() and "soup" not in file.parts:
            copy = tmp_path / "run" / file.relative_to(finished)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes())
    return tmp_path / "run"


def test_a_run_is_read_as_it_was_written(run: Path) -> None:
    found = read_run(run)
    assert [method.name for method in found.methods] == ["best", "ensemble", "hl+", "crossfit"]
    assert found.about["metric"] == "accuracy"
    assert found.about["unit"] == "%"
    assert found.results["compared_on"] == "report"
    assert set(found.results["differences"]) == {"ensemble", "hl+", "crossfit"}
    assert [len(sets["report"]) for sets in found.results["differences"].values()] == [3, 3, 3]
    assert len(found.pool["ingredients"]) == 4
    by_name = {method.name: method for method in found.methods}
    assert by_name["ensemble"].W is None
    W = by_name["hl+"].W
    assert W is not None
    assert W.shape == (4, len(by_name["hl+"].result["groups"]))
    np.testing.assert_allclose(W.sum(axis=0), 1)
    assert by_name["crossfit"].scores["report"].keys() == {"value", "low", "high", "n", "loss"}
    assert by_name["crossfit"].scores["report"]["n"] == 60
    assert {curve["fold"] for curve in by_name["crossfit"].result["curves"]["held_out"]} == {0, 1, 2, 3}
    assert found.recipe == '{"method": {}}'


def test_reading_needs_neither_torch_nor_the_metric(run: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from stockpot.run.record import read_run
print(len(read_run(Path({str(run)!r})).methods), "torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["4", "False"]


def test_parts_that_are_not_there_are_empty(run: Path) -> None:
    for name in ("pool.json", "results.json", "recipe.yaml", "methods/best/result.json"):
        (run / name).unlink()
    found = read_run(run)
    assert (found.pool, found.results, found.recipe) == ({}, {}, "")
    assert [method.name for method in found.methods] == ["ensemble", "hl+", "crossfit"]


@pytest.mark.parametrize("name", [*RUN_FILES, *METHOD_FILES, "methods", "methods/crossfit"])
def test_no_file_is_read_through_a_link(run: Path, name: str) -> None:
    (run / name).rename(run.parent / "elsewhere")
    (run / name).symlink_to(run.parent / "elsewhere")
    with pytest.raises((LinkError, RunError), match="is a symbolic link, which is never followed here"):
        read_run(run)


@pytest.mark.parametrize("name", [*RUN_FILES, *METHOD_FILES])
def test_no_pipe_is_waited_for(run: Path, name: str) -> None:
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises((LinkError, RunError), match=r"not a regular file|neither a regular file nor"):
        read_run(run)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "text that is not UTF-8"),
        (b"[1]", "it is a list instead of an object"),
        (b'{"a": 1, "a": 2}', "the key 'a' appears twice"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deeply"),
        (b'{"x": [' + b"[]," * 1_000_001 + b"1]}", "more values than such a file has"),
        (b'{"x": [' + b"1," * 8_000_001 + b"1]}", "more values than such a file has"),
        (b" " * (64 * 2**20 + 1), "more than such a file has"),
    ],
)
@pytest.mark.parametrize("name", ["pool.json", "results.json", "methods/best/result.json"])
def test_json_that_lies_or_never_ends_is_refused(run: Path, name: str, content: bytes, found: str) -> None:
    (run / name).write_bytes(content)
    with pytest.raises(RunError, match=rf"{name}: expected a file of a run record, found .*{found}"):
        read_run(run)


def damaged(value: Any, path: str = "") -> list[tuple[str, Any]]:
    """The same document with one value of it replaced by one of another kind, for every value."""
    out: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        for key in value:
            out += [(place, {**value, key: new}) for place, new in damaged(value[key], f"{path}.{key}")]
    elif isinstance(value, list) and value:
        out += [(place, [new, *value[1:]]) for place, new in damaged(value[0], f"{path}[0]")]
    odd: Any = {"odd": [1]} if not isinstance(value, dict) else "odd"
    return [*out, (path, odd)]


@pytest.mark.parametrize("name", ["run.json", "pool.json", "results.json", "methods/crossfit/result.json"])
def test_every_value_of_another_kind_is_refused_with_its_place(run: Path, name: str) -> None:
    value = json.loads((run / name).read_text())
    free = (".settings.", ".environment.", ".layout.", ".trial.")  # whatever JSON holds
    refused = 0
    for place, changed in damaged(value):
        (run / name).write_text(json.dumps(changed))
        if any(part in f"{place}." and place.strip(".") not in ("settings", "environment", "layout") for part in free):
            continue
        with pytest.raises(RunError) as caught:
            read_run(run)
        refused += 1
        assert name in str(caught.value)
    assert refused > 10


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "true", '"1"', "1" * 400])
def test_numbers_that_are_none_are_refused(run: Path, number: str) -> None:
    file = run / "methods" / "best" / "result.json"
    value = json.loads(file.read_text())
    value["seconds"] = 123456.5
    file.write_text(json.dumps(value).replace("123456.5", number))
    with pytest.raises(RunError, match=r"seconds is .* instead of a number"):
        read_run(run)
    value["settings"]["lr"], value["seconds"] = 123456.5, 1.0
    file.write_text(json.dumps(value).replace("123456.5", "NaN"))
    with pytest.raises(RunError, match=r"settings\.lr has a number that JSON does not have"):
        read_run(run)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda a: a | {"W": a["W"][:, :1]}, "no W with a column for each of the"),
        (lambda a: a | {"W": a["W"][:2]}, "and 4 ingredients"),
        (lambda a: a | {"W": np.full_like(a["W"], np.nan)}, "not finite"),
        (lambda a: a | {"W": a["W"].astype(np.float32)}, "W is F32"),
        (lambda a: a | {"W": a["W"][None]}, "W is F64 of shape"),
        (lambda a: {k: v for k, v in a.items() if k != "W"}, "no W"),
    ],
)
def test_mixing_weights_of_another_shape_are_refused(run: Path, change: Any, found: str) -> None:
    file = run / "methods" / "hl-plus" / "weights.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(RunError, match=rf"weights\.safetensors: expected a file of a run record, found .*{found}"):
        read_run(run)


def test_a_method_lies_in_its_own_folder(run: Path) -> None:
    (run / "methods" / "hl-plus").rename(run / "methods" / "uniform")
    with pytest.raises(RunError, match=r"it is of method 'hl\+'"):
        read_run(run)
    (run / "methods" / "uniform").rename(run / "methods" / "mine")  # nobody's
    assert "mine" not in [method.name for method in read_run(run).methods]


def test_names_from_strangers_are_made_harmless(run: Path) -> None:
    file = run / "pool.json"
    value = json.loads(file.read_text())
    value["ingredients"][0]["name"] = "a\x1b[31mb\u202ec"
    file.write_text(json.dumps(value))
    assert read_run(run).pool["ingredients"][0]["name"] == "a\ufffd[31mb\ufffdc"
    assert clean("\ud800") == "\ufffd"


@pytest.mark.parametrize(
    ("value", "shape", "found"),
    [
        ({"a": 1}, {"a": TEXT}, "a is 1 instead of a text"),
        ({"a": [1, "x"]}, {"a": [COUNT]}, r"a\[1\] is 'x' instead of a count"),
        ({"a": -1}, {"a": COUNT}, "a is -1 instead of a count"),
        ({"a": True}, {"a": NUMBER}, "a is True instead of a number"),
        ({"a": None}, {"a": {}}, "a is null instead of an object"),
        ({}, {"a": ANY}, "it has no 'a'"),
        ({"a": 1, "b": 2}, {"a": ANY}, "it has an unknown 'b'"),
        ({"x": {"y": "z"}}, {"*": {"*": MAYBE}}, r"x\.y is 'z' instead of null or a number"),
        ("x", (None, [TEXT]), "it is 'x' instead of null or a list"),
        ([1.0, None], [MAYBE] * 3, "it is a list instead of a list of 3 numbers"),
        ([1.0, None, "x"], [MAYBE] * 3, r"\[2\] is 'x' instead of null or a number"),
    ],
)
def test_the_checker_names_the_place(value: Any, shape: Any, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        check(value, shape)


def test_scores_that_are_not_finite_are_null() -> None:
    scores = Scores(torch.full((3, 1), math.nan, dtype=torch.float64), METRICS["accuracy"])
    assert encode(scores) == {"value": None, "low": None, "high": None, "n": 3, "loss": None}
    assert encode(None) is None


def test_a_curve_has_a_few_hundred_points_and_gaps_where_a_loss_was_none() -> None:
    history = [{"kind": "step", "fold": 0, "block": 1, "step": j, "loss": float(j)} for j in range(1000)]
    history += [{"kind": "held_out", "fold": 0, "block": 1, "step": 5, "loss": None}]
    found = curves(history)
    assert found["held_out"] == [{"fold": 0, "block": 1, "x": [5], "loss": [None]}]
    assert len(found["fit"][0]["x"]) == 200
    assert found["fit"][0]["x"][:2] == [5, 10]
    assert found["fit"][0]["loss"][0] == 2.0


def test_scores_of_ingredients_come_back_with_any_metric(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path / "pool", 3)
    ratio = Metric("ratio", lambda out, batch: torch.stack([out[:, 0], out[:, 1] ** 2], dim=1),
                   lambda table: float(table[:, 0].sum() / table[:, 1].sum()))  # fmt: skip
    task = Task(mlp(), samples(), metric=ratio)
    compared = compare(pool, task, ["best", "uniform"], run=tmp_path / "run")
    known = read_ingredient_scores(tmp_path / "run", task.metric, 3)
    assert known is not None
    scores, seconds = known
    assert seconds > 0
    fit = compared["best"].fit
    assert fit is not None
    assert max(one.value for one in scores) == fit.value
    with pytest.raises(RunError, match="scores of 3 ingredients, of 4"):
        read_ingredient_scores(tmp_path / "run", task.metric, 4)


@pytest.mark.parametrize("content", ["{}", "[]", '{"settings": 3}', "no", '{"settings": {"lr": NaN}}'])
def test_what_lies_beside_a_checkpoint_is_taken_for_its_training_only_where_it_is(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert trial_settings(tmp_path / "a.safetensors") in (None, {"lr": None})


@pytest.mark.timeout(60)
def test_a_curve_of_a_block_that_no_run_has_is_refused(run: Path) -> None:
    """A chart has a place for each block: a number of a stranger must not decide how many."""
    file = run / METHOD_FILES[0]
    result = json.loads(file.read_text())
    result["curves"]["fit"][0]["block"] = 2**60
    file.write_text(json.dumps(result))
    with pytest.raises(RunError, match="a curve of a block beyond 100,000"):
        read_run(run)

"""A recipe and Python give the same run, and the command line adds nothing to it but words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from stockpot import Pool, Task, compare
from stockpot.cli.app import app
from stockpot.run.record import read_run
from torture.cases import prepare
from torture.evidence import facts

METHODS = ["best", "uniform", "greedy", "hl+", "mehl+", "crossfit"]
OPTIONS: dict[str, Any] = {"folds": 2, "steps": 5, "block_size": 3, "batch_size": 16, "seed": 4}
EACH: dict[str, Any] = {"crossfit": {"steps": 4, "folds": 3}, "hl+": {"steps": 3, "lr": 0.02}}


def from_python(folder: Path, run: Path) -> None:
    scope: dict[str, Any] = {}
    exec((folder / "toy.py").read_text(), scope)
    task = Task(scope["normed"](), scope["data"]("fit"), report=scope["data"]("report"), device="cpu")
    pool = Pool.open(folder / "pool_normed")
    compare(pool, task, METHODS, run=run, each=EACH, **OPTIONS)


def from_recipe(folder: Path, run: Path, *more: str) -> str:
    (folder / "recipe.yaml").write_text(
        json.dumps(
            {
                "pool": {"path": "pool_normed"},
                "model": {"python": "toy:normed", "device": "cpu"},
                "data": {"python": "toy:data"},
                "method": {
                    **{key: value for key, value in OPTIONS.items() if key != "seed"},
                    "methods": METHODS,
                    "each": EACH,
                },
                "output": {"dir": "unused", "seed": OPTIONS["seed"]},
            }
        )
    )
    done = CliRunner().invoke(app, ["compare", str(folder / "recipe.yaml"), "--out", str(run), *more])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_comparison_with_folds_is_the_same_run_from_python_and_from_a_recipe(tmp_path: Path) -> None:
    prepare(tmp_path, 0)
    from_python(tmp_path, tmp_path / "python")
    from_recipe(tmp_path, tmp_path / "recipe")
    first, second = (facts(tmp_path / name) for name in ("python", "recipe"))
    only = {"recipe.yaml", "report.html", "report.md"}  # which the command line writes
    assert set(second) - set(first) == only
    assert first["run.json"] | {"recipe_digest": ""} == second["run.json"] | {"recipe_digest": ""}
    other = {"run.json", "methods/best/soup/README.md"}  # the card gets the report's table
    assert {k: v for k, v in first.items() if k not in other} == {
        k: v for k, v in second.items() if k not in only | other
    }
    abouts = [read_run(tmp_path / name).about for name in ("python", "recipe")]
    for key in ("settings", "layout", "metric", "unit", "seed", "kind", "fit_digest", "report_digests"):
        assert abouts[0][key] == abouts[1][key]
    assert abouts[0]["settings"]["mehl+"]["folds"] == 2
    assert abouts[0]["settings"]["crossfit"]["folds"] == 3


def test_the_command_line_says_what_the_record_says(tmp_path: Path) -> None:
    prepare(tmp_path, 0)
    said = from_recipe(tmp_path, tmp_path / "run", "--json")
    results = read_run(tmp_path / "run").results
    summary = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert summary["recommended"] == results["recommended"]
    assert summary["verdict"] == results["verdict"]
    assert Path(summary["soup"]).is_dir()

"""The examples run as their READMEs say, only shorter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Stockpot

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["pytorch", "text", "vision"])
def test_example(tmp_path: Path, stockpot: Stockpot, name: str) -> None:
    if name != "pytorch":
        pytest.importorskip("transformers")
    if name == "vision":
        pytest.importorskip("PIL")
    readme = (EXAMPLES / name / "README.md").read_text()
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("pool", "run", "base", "pictures"))
    prepared = subprocess.run([sys.executable, "prepare.py"], cwd=folder, capture_output=True, text=True)
    assert prepared.returncode == 0, prepared.stderr
    assert "python prepare.py" in readme
    recipe = folder / "recipe.yaml"
    given = ("method.steps=5", "method.each={crossfit: {steps: 5}}", "method.methods=[best, uniform, crossfit]")
    short = [part for one in given for part in ("--set", one)]
    for command, *options in (
        ("finetune", recipe, "--trials", 3, "--set", "finetune.epochs=1"),
        ("inspect", recipe),
        ("compare", recipe, *short),
        ("evaluate", folder / "run", recipe),
        ("rebuild", folder / "run"),
    ):
        answer = stockpot(command, *options)
        assert answer.code == 0, answer.err
        assert f"stockpot {command}" in readme
    if name != "pytorch":  # a soup of Hugging Face folders is such a folder
        soup = next((folder / "run" / "methods").glob("*/soup"))
        assert (soup / "config.json").exists()

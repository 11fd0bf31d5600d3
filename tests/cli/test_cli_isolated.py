"""A stranger's folder does not decide what the command runs, wherever it is started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PLANTED = ("yaml", "typing", "pydantic", "typer", "rich", "random", "difflib", "json", "torch", "numpy", "resource")


@pytest.mark.parametrize("command", ["module", "script"])
def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path, command: str) -> None:
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r})")
    (tmp_path / "recipe.yaml").write_text("pool: {path: p}\nmodel: {timm: m}\ndata: {arrays: a}\n")
    script = shutil.which("stockpot", path=str(Path(sys.executable).parent))
    if command == "script" and script is None:
        pytest.skip("the command is not installed here")
    start = [sys.executable, "-m", "stockpot"] if command == "module" else [str(script)]
    done = subprocess.run(
        [*start, "inspect", "recipe.yaml"], cwd=tmp_path, capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 1
    assert "no files match" in done.stderr or "nothing at this path" in done.stderr, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_a_recipe_finds_its_own_modules_wherever_it_is_started(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("raise RuntimeError('loaded')")
    recipe = "pool: {path: p}\nmodel: {python: 'net:a'}\ndata: {python: 'net:b'}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    (tmp_path / "p").mkdir()
    code = (
        "from stockpot.recipe import load_recipe; from stockpot.recipe.build import build_model;"
        "build_model(load_recipe('recipe.yaml'))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert "RuntimeError: loaded" in done.stderr

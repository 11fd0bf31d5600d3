"""Type information as a user's own type checker sees it: the README and the examples, strictly or as they are."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WRONG = """
from stockpot import Pool, Task, cook
import torch

task = Task(torch.nn.Linear(2, 2), (torch.zeros(4, 2), torch.zeros(4)), metric=3)
score: str = cook(Pool.open("pool"), task).score.value
"""


def checked(file: Path) -> str:
    """What mypy says of a stranger's file, strictly; torch is analysed once, by `make check`."""
    command = [sys.executable, "-m", "mypy", "--strict", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280).stdout


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "readme.py").write_text("\n".join(blocks))
    return tmp_path / "readme.py"


def test_what_the_readme_shows_has_types(readme: Path) -> None:
    assert checked(readme) == "Success: no issues found in 1 source file\n"


def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG)
    said = checked(tmp_path / "wrong.py")
    assert 'Argument "metric" to "Task" has incompatible type "int"' in said
    assert 'expression has type "float", variable has type "str"' in said


def test_every_example_of_a_task_is_checked_with_the_package() -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    assert '"examples/tasks"]' in settings
    (names,) = re.findall(r"annotated, .*\nmodule = \[(.*)\]", settings)
    assert sorted(re.findall(r'"(\w+)"', names)) == sorted(file.stem for file in (ROOT / "examples/tasks").glob("*.py"))


def test_the_wheel_says_that_it_is_typed() -> None:
    assert (ROOT / "src/stockpot/py.typed").is_file()

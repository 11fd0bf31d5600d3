"""One version in one place, and what the package needs said alike everywhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import stockpot
from test_architecture import imports, modules

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no reader of TOML")
ROOT = Path(__file__).parents[1]


def conda() -> Any:
    return yaml.safe_load((ROOT / "release/conda/meta.yaml").read_text())


def test_the_version_is_that_of_one_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == stockpot.__version__ == conda()["package"]["version"]
    assert citation["license"] == project["license"] == conda()["about"]["license"]


def test_what_is_required_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["cli"]]
    names = {re.split(r"\W", one)[0].lower().replace("pyyaml", "yaml") for one in required}
    sources = [path.read_text() for path in modules()]
    imported = {name.split(".")[0] for source in sources for _, name in imports(ast.parse(source))}
    imported |= {name for source in sources for name in re.findall(r"need\(\"(\w+)", source)}
    assert names - imported == set()


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"pyyaml": "PyYAML", "pytorch": "torch"}
    needed = {*project["dependencies"], *project["optional-dependencies"]["cli"]}
    recipe = [re.fullmatch(r"(\S+) (>=\S+)", line) for line in conda()["requirements"]["run"]]
    found = {f"{names.get(one[1], one[1])}{one[2]}" for one in recipe if one is not None}
    assert found == needed | {f"python{project['requires-python']}"}
    assert conda()["build"]["entry_points"] == [f"stockpot = {project['scripts']['stockpot']}"]

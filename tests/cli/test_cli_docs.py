"""What the documentation shows is what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer.main

from stockpot.cli.app import app
from stockpot.recipe import make_recipe
from stockpot.recipe.load import parse

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "examples").glob("*/README.md"), ROOT / "README.md"])


def options() -> dict[str, set[str]]:
    group = typer.main.get_command(app)
    commands: dict[str, object] = group.commands  # type: ignore[attr-defined]
    return {
        name: {flag for parameter in command.params for flag in parameter.opts}  # type: ignore[attr-defined]
        for name, command in commands.items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_in_the_documentation_exist(page: Path) -> None:
    known = options()
    for line in re.findall(r"(?:^ {4}|^|`)stockpot ([a-z].*?)(?:`|$)", page.read_text(), flags=re.MULTILINE):
        command, *words = line.split("#")[0].split()
        assert command in known, line
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known[command] | {"--help"}, line


def test_the_check_above_can_see() -> None:
    text = (ROOT / "docs" / "tutorial.md").read_text()
    assert len(re.findall(r"(?:^ {4}|^|`)stockpot ([a-z].*?)(?:`|$)", text, flags=re.MULTILINE)) > 8
    assert "--budget" in options()["inspect"]


def test_recipes_in_the_tutorial_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    whole = parse(blocks[0], "tutorial")[0]
    make_recipe(whole, tmp_path)
    for block in blocks[1:]:
        make_recipe({**whole, **parse(block, "tutorial")[0]}, tmp_path)


def test_data_sections_of_the_page_on_language_models_are_valid(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "language-models.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 7
    whole = parse(blocks[0], "page")[0]
    for block in blocks:
        make_recipe({**whole, **parse(block, "page")[0]}, tmp_path)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"

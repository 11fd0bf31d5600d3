"""What the documentation names is there: files, tests, modules and targets of make."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "SECURITY.md"])
MODULES = sorted((ROOT / "src").rglob("*.py"))
# A path starts at the repository, such as `tests/soups/test_laws.py`, or at the package, such as `soups/mehl.py`.
BASES = (ROOT, ROOT / "src" / "stockpot")
GONE = {"experiments/search.py", "atomic.py", "small_files.py"}  # the text says that they are deleted
PATH = re.compile(r"(?<![\w./-])((?:[\w-]+/)+[a-z0-9_-]+\.py|docs/\w+\.md)(?:::(test_\w+))?")
FILE = re.compile(r"`([a-z_]+\.py)`")
TEST = re.compile(r"`(?:::)?(test_[a-z0-9_]+)`")
MODULE = re.compile(r"(?:`|python -m )((?:torture|attacks)\.[a-z_]+)")
MAKE = re.compile(r"(?:`|^ {4})make ([a-z-]+)", re.MULTILINE)

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def absent(text: str) -> list[str]:
    """Every path in the text that leads nowhere, and every path::test without that test."""
    wrong = []
    for name, test in PATH.findall(text):
        path = next((base / name for base in BASES if (base / name).is_file()), None)
        if path is None:
            missing = name not in GONE
        else:
            missing = bool(test) and f"def {test}(" not in path.read_text()
        if missing:
            wrong.append(f"{name}::{test}" if test else name)
    return wrong


@by_page
def test_paths_that_the_documentation_names_exist(page: Path) -> None:
    assert absent(page.read_text()) == []


def test_paths_that_comments_and_docstrings_name_exist() -> None:
    assert [(path.name, name) for path in MODULES for name in absent(path.read_text())] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_page_holds_the_marks_of_a_merge(page: Path) -> None:
    assert re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(), re.MULTILINE) == []


@by_page
def test_what_the_documentation_names_without_a_path_exists(page: Path) -> None:
    text = page.read_text()
    files = [path for top in ("src", "tests", "benchmarks", "experiments") for path in (ROOT / top).rglob("*.py")]
    assert set(FILE.findall(text)) <= {path.name for path in files} | GONE | {"mine.py"}  # the reader's own
    code = "\n".join(path.read_text() for path in files)
    arrays = {"test_x", "test_y"}  # names in a reader's file, in recipe.md
    assert set(TEST.findall(text)) - arrays <= set(re.findall(r"^def (test_\w+)\(", code, re.MULTILINE))
    for module in MODULE.findall(text):
        assert (ROOT / "tests" / f"{module.replace('.', '/')}.py").is_file(), module
    assert set(MAKE.findall(text)) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize(
    "text",
    [
        "`soups/gone.py`",
        "`methods/setbacks.py`",
        "see src/stockpot/gone.py.",
        "`tests/soups/test_gone.py`, and",
        "(docs/gone.md)",
        "`tests/test_docs.py::test_gone`",
    ],
)
def test_the_search_would_find_it(text: str) -> None:
    assert len(absent(text)) == 1


def test_the_search_sees_enough() -> None:
    assert sum(len(PATH.findall(page.read_text())) for page in PAGES) > 100
    assert absent("`soups/mehl.py`, `tests/test_docs.py::test_the_search_sees_enough`, `docs/recipe.md`") == []

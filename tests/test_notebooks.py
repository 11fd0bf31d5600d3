"""The notebooks of examples/notebooks: kept without outputs, listed, and executed by a real kernel."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def test_the_list_of_notebooks_is_that_of_the_folder() -> None:
    assert NAMES == ["adapters", "text", "vision"]
    listed = re.findall(r"\((\w+)\.ipynb\)", (FOLDER / "README.md").read_text())
    assert sorted(listed) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_whole_and_without_outputs(name: str) -> None:
    book = read(name)
    nbformat.validate(book)
    assert book.cells[0].source.startswith("# ")
    for cell in book.cells:
        if cell.cell_type == "code":
            assert (cell.outputs, cell.execution_count) == ([], None)
            compile(cell.source, f"{name}.ipynb", "exec")


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_run_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    book = read(name)
    NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    said = [one.text for cell in code for one in cell.outputs if one.get("name") == "stderr"]
    warned = [text for text in said if "IProgress not found" not in text]  # tqdm, where there are no ipywidgets
    assert warned == []
    pages = [one.data["text/html"] for cell in code for one in cell.outputs if "text/html" in one.get("data", {})]
    (table,) = (page for page in pages if page.startswith("<table"))  # progress is HTML, too
    assert "crossfit" in table
    assert (tmp_path / f"{name}-run" / "soup" / "soup.json").is_file()

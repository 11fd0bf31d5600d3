"""Notebooks as pages: their text as it is, their code as blocks."""

from __future__ import annotations

import json
from pathlib import Path


def pages(folder: Path) -> dict[str, str]:
    return {f"notebooks/{path.stem}.md": _page(path) for path in sorted(folder.glob("*.ipynb"))}


def _page(path: Path) -> str:
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    note = (
        f"Run it: `jupyter lab examples/notebooks/{path.name}`. On a laptop without a GPU it takes less than a minute."
    )
    return "\n\n".join([parts[0], note, *parts[1:]]) + "\n"

"""The README's Python runs as it stands, with the toy pool of the tutorial."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
EXAMPLE = "from stockpot import Pool, Task, cook"


def blocks() -> list[str]:
    text = README.read_text() + TUTORIAL.read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_the_readme_is_short_and_begins_with_a_picture_and_three_commands() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    picture = re.fullmatch(r"!\[.+\]\((.+\.svg)\)", lines[2])
    assert picture
    assert (ROOT / picture[1]).is_file()
    assert [line.split()[:2] for line in lines[4:7]] == [
        ["stockpot", name] for name in ("average", "inspect", "compare")
    ]


def test_the_ten_line_example_has_ten_lines() -> None:
    example = next(block for block in blocks() if EXAMPLE in block)
    assert len([line for line in example.splitlines() if line.strip()]) <= 10


def test_every_python_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a fresh folder: first the block that makes a toy pool, then the others in their order."""
    monkeypatch.chdir(tmp_path)
    found = sorted(blocks(), key=lambda block: "torch.save" not in block)
    assert len(found) >= 2
    names: dict[str, Any] = {}
    for block in found:
        exec(compile(block, str(README), "exec"), names)
    result = names["result"]
    assert result.report is not None
    assert result.report.value > 0.5
    assert "on report data" in capsys.readouterr().out
    assert (tmp_path / "soup" / "model.safetensors").is_file()

    from stockpot import Pool, Soup

    soup = Soup.load(tmp_path / "soup")
    assert soup.pool.names == tuple(f"run_{k}" for k in range(6))
    again = Pool.open(tmp_path / "soup", tmp_path / "checkpoints" / "run_0.pt")
    assert again.specs == soup.pool.specs

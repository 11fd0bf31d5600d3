"""The Lightning example of docs/training.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from stockpot import Soup

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*workers.*")
@pytest.mark.filterwarnings("ignore:.*number of training batches.*")
def test_the_example_for_lightning_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    block = next(b for b in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S) if "pl.Trainer" in b)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, str(PAGE), "exec"), names)
    assert "on held-out data, 8 models" in capsys.readouterr().out
    assert len(Soup.load(tmp_path / "soups" / "soup").pool) == 8

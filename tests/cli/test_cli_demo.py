"""The demo, made short: it ends with a table, a soup, a report and what to do next; and repeats itself exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli.conftest import Stockpot
from stockpot.events import Listener

pytest.importorskip("sklearn")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from stockpot import demo
    from stockpot.demo import pretrain, recipe, zoo
    from stockpot.demo.digits import SIZES

    def small(out: Path, *, seed: int, parallel: int, listen: Listener) -> zoo.Zoo:
        return zoo.make_zoo(
            out, seed=seed, trials=3, listen=listen
        )  # in this process, where the rest is patched too

    monkeypatch.setattr(pretrain, "EPOCHS", 1.0)
    monkeypatch.setattr(zoo, "SPACES", {**zoo.SPACES, "epochs": 1})
    monkeypatch.setattr(demo, "make_zoo", small)
    monkeypatch.setattr(recipe, "STEPS", 3)
    for split in SIZES:
        monkeypatch.setitem(SIZES, split, 80)


def without_clocks(text: str) -> str:
    return re.sub(r"[\d.]+ (s|min|MiB|GiB)\b", "", text.replace("second", "first"))


@pytest.mark.usefixtures("short")
def test_the_demo_says_what_it_made_and_makes_it_again(tmp_path: Path, stockpot: Stockpot) -> None:
    first = stockpot("demo", "--out", tmp_path / "first")
    assert first.code == 0, first.err
    results = json.loads((tmp_path / "first" / "run" / "results.json").read_text())
    assert len(results["methods"]) == 11
    assert results["failed"] == {}
    assert set(results["growth"]) == {"uniform", "greedy", "crossfit"}
    for part in ("vs. best single", results["verdict"], "report.html", "Took", "Next:", "stockpot cook"):
        assert part in first.out
    again = stockpot("demo", "--out", tmp_path / "first")
    assert "3 of 3 trials finished earlier" in again.err
    assert "crossfit: finished earlier" in again.err
    second = stockpot("demo", "--out", tmp_path / "second")
    assert without_clocks(second.out).split() == without_clocks(first.out).split()
    for file in (tmp_path / "first").rglob("weights.safetensors"):
        assert file.read_bytes() == (tmp_path / "second" / file.relative_to(tmp_path / "first")).read_bytes()
    # What it tells the reader to run next runs.
    cooked = stockpot("cook", tmp_path / "first" / "recipe.yaml", "--out", tmp_path / "soup")
    assert cooked.code == 0, cooked.err

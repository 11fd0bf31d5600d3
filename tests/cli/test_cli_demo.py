"""The demo, made short: it ends with a table, a soup, a report and what to do next; and repeats itself exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cli.conftest import Stockpot
from stockpot.zoo.demo import MARKED, MARKER

pytest.importorskip("sklearn")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from stockpot.zoo import demo

    make = demo.make_demo_pool

    def small(out: Path, **options: Any) -> Any:
        # In this process, where the rest is patched too.
        return make(out, trials=3, **options)

    monkeypatch.setattr(demo, "EPOCHS", 1.0)
    monkeypatch.setattr(demo, "SPACES", {**demo.SPACES, "epochs": 1})
    monkeypatch.setattr(demo, "make_demo_pool", small)
    monkeypatch.setattr(demo, "STEPS", 3)
    monkeypatch.setattr(demo, "OWN_STEPS", 3)
    for split in demo.SIZES:
        monkeypatch.setitem(demo.SIZES, split, 80)


def without_clocks(text: str) -> str:
    return re.sub(r"[\d.]+ (s|min|MiB|GiB)\b", "", text.replace("second", "first"))


@pytest.mark.usefixtures("short")
def test_the_demo_says_what_it_made_and_makes_it_again(tmp_path: Path, stockpot: Stockpot) -> None:
    first = stockpot("demo", "--out", tmp_path / "first")
    assert first.code == 0, first.err
    results = json.loads((tmp_path / "first" / "run" / "results.json").read_text())
    assert len(results["methods"]) == 9
    assert results["failed"] == {}
    assert set(results["absent"]) == {"mehl", "mehl+"}
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
    # Made anew where it is told to: by the flag, and only what it made.
    (tmp_path / "first" / "notes.txt").write_text("mine")
    anew = stockpot("demo", "--out", tmp_path / "first", "--overwrite")
    assert anew.code == 0, anew.err
    assert "finished earlier" not in anew.err
    assert (tmp_path / "first" / "notes.txt").read_text() == "mine"


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("flag", [(), ("--overwrite",)])
@pytest.mark.parametrize("name", ["pool/mine.safetensors", "run/report.md", "recipe.yaml", "pretrained.safetensors"])
def test_what_no_demo_made_is_neither_run_nor_removed(
    tmp_path: Path, stockpot: Stockpot, name: str, flag: tuple[str, ...]
) -> None:
    file = tmp_path / "work" / name
    file.parent.mkdir(parents=True)
    file.write_text("pool: {path: pool}\nmodel: {python: 'evil:model'}\ndata: {python: 'evil:data'}\n")
    (tmp_path / "work" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    before = content(tmp_path / "work")
    answer = stockpot("demo", "--out", tmp_path / "work", *flag)
    assert answer.code == 1
    assert f"found {name.partition('/')[0]} that no demo made" in answer.err
    assert "Fix: choose another directory with --out; nothing was changed" in answer.err
    assert content(tmp_path / "work") == before
    assert not (tmp_path / "ran").exists()


def test_a_recipe_in_a_demos_folder_is_not_run_as_the_demo(tmp_path: Path, stockpot: Stockpot) -> None:
    """Also where a stranger has put our marker beside it."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / MARKER).write_bytes(MARKED)
    (folder / "recipe.yaml").write_text("model: {python: 'evil:model'}\ndata: {python: 'evil:data'}\nfinetune: {}\n")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    before = content(folder)
    answer = stockpot("demo", "--out", folder)
    assert answer.code == 1
    assert "expected the recipe of the demo with seed 0, found another one" in answer.err
    assert f"stockpot compare {folder / 'recipe.yaml'}" in answer.err.replace("\n", "")
    assert content(folder) == before
    assert not (tmp_path / "ran").exists()


def test_checkpoints_in_a_demos_pool_are_not_removed(tmp_path: Path, stockpot: Stockpot) -> None:
    folder = tmp_path / "work"
    (folder / "pool").mkdir(parents=True)
    (folder / MARKER).write_bytes(MARKED)
    (folder / "pool" / "mine.safetensors").write_bytes(b"mine")
    before = content(folder)
    answer = stockpot("demo", "--out", folder, "--overwrite")
    assert answer.code == 1
    assert "mine.safetensors, which no demo made" in answer.err
    assert content(folder) == before


@pytest.mark.usefixtures("short")
def test_a_module_of_our_name_in_the_folder_does_not_run(tmp_path: Path, stockpot: Stockpot) -> None:
    folder = tmp_path / "work"
    (folder / "stockpot" / "zoo").mkdir(parents=True)
    (folder / "stockpot" / "zoo" / "demo.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    answer = stockpot("demo", "--out", folder)
    assert answer.code == 0, answer.err
    assert not (tmp_path / "ran").exists()

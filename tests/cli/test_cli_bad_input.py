"""Wrong input gets a short message that says what to do, on stderr, with exit code 1 and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.conftest import Stockpot

TOY = "model: {python: 'toy:model'}\n"
DATA = "data: {python: 'toy:data'}\n"
POOL = "pool: {path: pool}\n"
TABLE = "model: {python: 'toy:model'}\ndata: {table: t.csv, features: [a, b, c, d, e, f], label: y}\n"

CASES = {
    "wrong YAML": ("pool: [a, b\nmodel: x", ["not valid YAML", "line 2, column"]),
    "not a recipe": ("just a sentence", ["expected sections such as pool, model and data"]),
    "unknown key": (
        POOL + TOY + DATA + "method: {bloc_size: 3}",
        ["method.bloc_size: unknown key; did you mean block_size?"],
    ),
    "wrong type": (POOL + TOY + DATA + "method: {lr: fast}", ["method.lr: expected a number, found 'fast'"]),
    "two problems at once": (
        POOL + TOY + DATA + "method: {lr: fast}\noutput: {sed: 1}",
        ["2 problems", "method.lr", "output.sed: unknown key; did you mean seed?"],
    ),
    "no model": (POOL + DATA, ["model: required, but not there"]),
    "missing pool": ("pool: {path: nowhere/*.pt}\n" + TOY + DATA, ["nowhere/*.pt", "no files match"]),
    "missing module": (POOL + "model: {python: 'gone:model'}\n" + DATA, ["gone", "no such module"]),
    "file for a module": (
        POOL + "model: {python: 'toy.py:model'}\n" + DATA,
        ["the name of a file", "Fix: write toy:model"],
    ),
    "missing function": (POOL + "model: {python: 'toy:modle'}\n" + DATA, ["a function modle", "functions"]),
    "missing extra": (
        POOL + "model: {timm: vit_tiny_patch16_224}\ndata: {images: pictures}",
        ["library timm", "pip install 'stockpot[vision]'"],
    ),
    "missing data file": (POOL + TABLE.replace("t.csv", "gone.csv"), ["gone.csv"]),
    "missing column": (POOL + TABLE.replace("label: y", "label: z"), ["z", "a, b, c, d, e, f, y"]),
    "labels beyond the head": (POOL + TABLE.replace("t.csv", "wide.csv"), ["label", "3 classes"]),
    "another model": (POOL + "model: {python: 'toy:other'}\n" + DATA, ["expected", "Fix:"]),
    "impossible device": (
        POOL + TOY.replace("}", ", device: cuda}") + DATA,
        ["device: expected a device of this machine", "found cuda ("],
    ),
    "output in the recipe's folder": (POOL + TOY + DATA + "output: {dir: .}", ["expected a directory of its own"]),
    "output over foreign files": (
        POOL + TOY + DATA + "output: {dir: pool}",
        ["found other files", "choose another directory with --out"],
    ),
    "tensorboard without the extra": (
        POOL + TOY + DATA + "output: {track: tensorboard}",
        ["pip install 'stockpot[tensorboard]'"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_recipes(folder: Path, stockpot: Stockpot, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text, expected = CASES[case]
    if "extra" in case:  # whatever is installed here
        for name in ("timm", "tensorboard"):
            monkeypatch.setitem(__import__("sys").modules, name, None)
    (folder / "bad.yaml").write_text(text)
    rows = [",".join([*["0.5"] * 6, str(k % 3)]) for k in range(30)]
    (folder / "t.csv").write_text("\n".join(["a,b,c,d,e,f,y", *rows]))
    wide = [",".join([*["0.5"] * 6, str(k % 5)]) for k in range(30)]
    (folder / "wide.csv").write_text("\n".join(["a,b,c,d,e,f,y", *wide]))
    with (folder / "toy.py").open("a") as file:
        file.write("\ndef other():\n    return nn.Linear(6, 3)\n")
    answer = stockpot("compare", folder / "bad.yaml")
    assert answer.code == 1
    assert answer.out == ""
    for part in expected:
        assert part in answer.err, answer.err
    assert "Traceback" not in answer.err
    assert len(answer.err.splitlines()) < 15


def test_a_recipe_that_is_not_there(tmp_path: Path, stockpot: Stockpot) -> None:
    answer = stockpot("cook", tmp_path / "no.yaml")
    assert answer.code == 1
    assert "there is no such recipe" in answer.err


def test_bad_overrides(folder: Path, stockpot: Stockpot) -> None:
    for given, expected in (
        ("method.lrr=1", "method.lrr: unknown key; did you mean lr?"),
        ("method.lr", "expected key=value, such as method.lr=0.02"),
        ("method.name=crosfit", "did you mean 'crossfit'?"),
    ):
        answer = stockpot("cook", folder / "recipe.yaml", "--set", given)
        assert answer.code == 1
        assert expected in answer.err


def test_another_run_in_the_way(folder: Path, stockpot: Stockpot) -> None:
    recipe = folder / "recipe.yaml"
    assert stockpot("cook", recipe, "--set", "method.name=uniform").code == 0
    refused = stockpot("cook", recipe, "--set", "method.name=best")
    assert refused.code == 1
    assert "method.name: uniform -> best" in refused.err
    assert stockpot("cook", recipe, "--set", "method.name=best", "--overwrite").code == 0


@pytest.mark.parametrize("given", [("--overwrite",), ("--set", "output.overwrite=true")])
def test_a_folder_that_was_never_a_run_is_not_cleared(folder: Path, stockpot: Stockpot, given: tuple[str, ...]) -> None:
    """By the flag as little as by the recipe."""
    mine = [folder / "mine" / name for name in ("methods/notes.txt", "recipe.yaml", "growth/x", "tensorboard/y")]
    for file in mine:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
    answer = stockpot("cook", folder / "recipe.yaml", "--out", folder / "mine", *given)
    assert answer.code == 1
    assert "found other files" in answer.err
    assert "--overwrite" not in answer.err  # which would not help
    assert all(file.read_text() == "mine" for file in mine)
    assert len(list((folder / "mine").iterdir())) == 4


def test_things_that_are_no_runs(tmp_path: Path, stockpot: Stockpot) -> None:
    for command in ("report", "rebuild"):
        answer = stockpot(command, tmp_path)
        assert answer.code == 1
        assert "Fix:" in answer.err


def test_a_mistake_of_ours_says_where_the_details_are(
    folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ZeroDivisionError("spoons / 0")

    monkeypatch.setattr("stockpot.cooking.compare", fail)
    answer = stockpot("compare", folder / "recipe.yaml")
    assert answer.code == 1
    assert "unexpected ZeroDivisionError: spoons / 0" in answer.err
    assert "Traceback" not in answer.err
    assert "stockpot doctor" in answer.err
    file = Path(answer.err.split("Details were written to ")[1].split(".txt")[0] + ".txt")
    assert "ZeroDivisionError: spoons / 0" in file.read_text()
    file.unlink()

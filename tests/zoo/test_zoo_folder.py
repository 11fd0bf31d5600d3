"""Claims about the folder of a search: only the same search goes on in it, and nothing in it leads outside."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot.errors import RunError, StockpotError
from stockpot.zoo.folder import TrialRecord, read_records
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.search import finetune
from zoo import mlp, samples

PLAN = Plan((Trial(lr=0.1, epochs=1), Trial(lr=0.2, epochs=1)), batch_size=64, probe=None)


def search(out: Path, plan: Plan = PLAN, **options: Any) -> list[TrialRecord]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = mlp()
    train = options.pop("train", samples(48))
    return finetune(model, train, options.pop("fit", None), out, plan, **options)


# The same search --------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["inputs", "labels"])
@pytest.mark.parametrize("row", [0, 1, 777, 1498, 1499])
def test_one_other_label_or_pixel_is_another_search(tmp_path: Path, part: str, row: int) -> None:
    """Also where a regular sample of 256 rows would not look."""
    x, y = samples(1500)
    search(tmp_path, train=(x, y), fit=(x, y))
    x, y = x.clone(), y.clone()
    if part == "labels":
        y[row] = (y[row] + 1) % 3
    else:
        x[row, 2] += 1e-6
    with pytest.raises(RunError, match=r'train.content: "\w+" there, "\w+" now'):
        search(tmp_path, train=(x, y), fit=samples(1500))
    with pytest.raises(RunError, match=r'fit.content: "\w+" there, "\w+" now'):
        search(tmp_path, train=samples(1500), fit=(x, y))


def test_other_code_is_another_search(tmp_path: Path) -> None:
    search(tmp_path, code={"model.py": "aa", "data.py": "bb"})
    search(tmp_path, code={"data.py": "bb", "model.py": "aa"})
    with pytest.raises(RunError) as caught:
        search(tmp_path, code={"model.py": "cc", "data.py": "bb"})
    assert 'code.model.py: "aa" there, "cc" now' in str(caught.value)
    assert "data.py" not in str(caught.value)
    assert "go back to the settings, data and code there" in str(caught.value)
    with pytest.raises(RunError, match=r'code.data.py: "bb" there, nothing now'):
        search(tmp_path, code={"model.py": "aa"})


def test_more_trials_are_the_same_search_and_fewer_are_not(tmp_path: Path) -> None:
    search(tmp_path)
    more = dataclasses.replace(PLAN, trials=(*PLAN.trials, *(Trial(lr=0.3, epochs=1, seed=n) for n in range(9))))
    assert len(search(tmp_path, more)) == 11
    with pytest.raises(RunError, match=r"plan.trials.2.lr: 0.3 there, nothing now"):
        search(tmp_path)


# Files of others --------------------------------------------------------------------------------------


def _change(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: {**record, "path": "../outside.safetensors"}, "found the path '../outside"),
        (lambda record: {**record, "path": "trial_000.safetensors"}, "found the path 'trial_000"),
        (lambda record: {**record, "path": 3}, "found path is 3 instead of null or a text"),
        (lambda record: {**record, "settings": {"lr": "x"}}, "MethodError: setting lr"),
        (lambda record: {**record, "settings": {"learning": 1}}, "TypeError"),
        (
            lambda record: {**record, "score": {**record["score"], "value": "high"}},
            "score.value is 'high' instead of null or a number",
        ),
        (lambda record: {**record, "losses": 3}, "losses is 3 instead of a list"),
        (lambda record: {**record, "seconds": "long"}, "seconds is 'long' instead of a number"),
        (lambda record: [record], "it is a list instead of an object"),
        (lambda record: None, "it is null instead of an object"),
        (lambda record: {}, "it has no 'format'"),
    ],
)
def test_a_record_that_lies_is_refused(tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    search(tmp_path, fit=samples(48))
    _change(tmp_path / "trial_001.json", change)
    for read in (lambda out: search(out, fit=samples(48)), read_records):
        with pytest.raises(RunError, match=r"trial_001.json: expected the record of a trial") as caught:
            read(tmp_path)
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"format": 1, "plan": {"trials": []}}', "found format 1"),
        ('{"format": 2, "plan": {"trials": 3}}', "found format 2"),
        ('{"format": 2}', "KeyError: 'plan'"),
        ('{"format": 2, "format": 2}', "appears twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path: Path, content: str, said: str) -> None:
    search(tmp_path)
    (tmp_path / "search" / "plan.json").write_text(content)
    with pytest.raises(RunError, match=r"plan.json: expected the plan of a search") as caught:
        search(tmp_path)
    assert said in str(caught.value)


def test_names_in_a_plan_of_others_are_shown_without_control_characters(tmp_path: Path) -> None:
    search(tmp_path)
    deep: Any = "\x1b[2J"
    for _ in range(300):
        deep = {"a": deep}
    _change(tmp_path / "search" / "plan.json", lambda plan: {**plan, "\x1b]0;": "\x1b[2J" * 99, "deep": deep})
    with pytest.raises(RunError, match="expected the search that was begun here, found another") as caught:
        search(tmp_path)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 2000


def _link(place: Path, target: Path) -> None:
    if place.is_dir():
        for entry in sorted(place.rglob("*"), reverse=True):
            entry.unlink()
        place.rmdir()
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "search",
        ".lock",
        "search/.trial_000.lock",
        "search/plan.json",
        "search/start.safetensors",
        "search/trial_000.safetensors",
        "trial_000.json",
        "trial_000.safetensors",
    ],
)
def test_no_link_in_the_folder_is_followed(tmp_path: Path, place: str, missing: bool) -> None:
    out, outside = tmp_path / "pool", tmp_path / "outside"
    search(out)
    outside.mkdir()
    target = outside / "victim"
    if not missing and place == "search":
        target.mkdir()
        (target / "plan.json").write_text("{}")
    elif not missing:
        source = out / place
        target.write_bytes(source.read_bytes() if source.is_file() else b"export PATH=mine\n")
    (out / "trial_001.json").unlink()  # there is something left to do
    if "trial_000" in place:
        (out / "trial_000.json").unlink(missing_ok=True)
    before = _contents(outside)
    _link(out / place, target)
    # A link where a file is to be written may give way to it; everywhere else it is refused.
    with contextlib.suppress(StockpotError):
        records = search(out)
        assert [record.path for record in records] == [out / f"trial_00{n}.safetensors" for n in (0, 1)]
        assert not any(path.is_symlink() for path in out.glob("trial_*"))
    assert _contents(outside) == before
    assert target.exists() is not missing


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "place", [".lock", "search/.trial_001.lock", "search/plan.json", "search/start.safetensors", "trial_001.json"]
)
def test_no_fifo_is_waited_for(tmp_path: Path, place: str) -> None:
    search(tmp_path)
    (tmp_path / "trial_001.json").unlink()
    (tmp_path / place).unlink(missing_ok=True)
    os.mkfifo(tmp_path / place)
    with pytest.raises(StockpotError):
        search(tmp_path)

"""A run directory is made, recognised or refused; never mixed up, never shared. Nothing but a run is ever cleared."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stockpot import __version__, files
from stockpot.errors import LinkError, RunError, WriteError
from stockpot.events import Event
from stockpot.run.directory import RecipeFacts, RunDirectory, check_recipe
from stockpot.run.record import read_about
from stockpot.run.state import Journal
from torture.evidence import read_events

RECIPE = {"method": {"lr": 0.01}, "output": {"dir": "a"}}
FACTS: dict[str, Any] = {
    "kind": "compare", "title": "first", "seed": 0, "metric": "accuracy", "unit": "%", "settings": {}, "layout": {},
    "fit_digest": "", "report_digests": {},
}  # fmt: skip
FIRST = (FACTS, RecipeFacts(digest="1", resolved=RECIPE))
OTHER = (
    {**FACTS, "title": "other"},
    RecipeFacts(digest="2", resolved={"method": {"lr": 0.02}, "output": {"dir": "b"}}),
)
Run = tuple[dict[str, Any], RecipeFacts]
TREASURE = "what only the user has"


def make(path: Path, run: Run = FIRST, overwrite: bool = False) -> None:
    with RunDirectory(path, *run, overwrite=overwrite) as directory:
        directory.begin({})
        directory.note(status="done")


def stopped(path: Path, by: BaseException) -> None:
    with RunDirectory(path, *FIRST) as directory:
        directory.begin({})
        raise by


def used(path: Path, run: Run = FIRST, overwrite: bool = False) -> None:
    """Touch every file that a directory has of its own."""
    with RunDirectory(path, *run, overwrite=overwrite) as directory:
        directory.begin({"python": "3"})
        directory.journal(Event("start"))
        directory.same_pool([], [])


def cooked(path: Path, run: Run = FIRST) -> None:
    """A run with a result in it."""
    make(path, run)
    (path / "methods" / "best").mkdir(parents=True)
    (path / "methods" / "best" / "result.json").write_text("{}")


def everything(folder: Path) -> dict[str, Any]:
    found = {str(file.relative_to(folder)): file for file in sorted(folder.rglob("*"))}
    return {name: file.read_bytes() if file.is_file() else None for name, file in found.items()}


def test_the_same_run_is_continued_and_keeps_its_birth(tmp_path: Path) -> None:
    make(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    with RunDirectory(tmp_path / "run", *FIRST) as directory:
        directory.begin({})
        assert directory.about["status"] == "running"
        assert directory.about["created"] == before["created"]
    assert json.loads((tmp_path / "run" / "recipe.yaml").read_text()) == RECIPE


def test_claiming_changes_nothing(tmp_path: Path) -> None:
    cooked(tmp_path / "run")
    before = everything(tmp_path)
    for run, overwrite in ((FIRST, False), (FIRST, True), (OTHER, True)):
        with RunDirectory(tmp_path / "run", *run, overwrite=overwrite):
            pass
    assert everything(tmp_path) == before


def test_another_recipe_is_refused_and_the_difference_shown(tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(RunError) as caught:
        make(tmp_path / "run", OTHER)
    text = str(caught.value)
    assert "found another run" in text
    assert "method.lr: 0.01 -> 0.02" in text
    assert "output.dir" not in text  # where results go does not make it another run
    assert "--overwrite" in text


def test_another_recipe_is_refused_before_anything_is_read_for_it(tmp_path: Path) -> None:
    check_recipe(tmp_path / "run", FIRST[1])  # there is nothing
    assert not (tmp_path / "run").exists()
    facts = {**FACTS, "kind": "cook"}
    first, other = (RecipeFacts(kind="cook", digest=n, resolved={"method": {"lr": n}}) for n in "12")
    cooked(tmp_path / "run", (facts, first))
    before = everything(tmp_path)
    check_recipe(tmp_path / "run", first)
    check_recipe(tmp_path / "run", other, overwrite=True)
    with pytest.raises(RunError, match=r"found another run[\s\S]*method\.lr: 1 -> 2"):
        check_recipe(tmp_path / "run", other)
    with pytest.raises(RunError, match="found an earlier run of cook"):
        check_recipe(tmp_path / "run", RecipeFacts(kind="compare", digest="1"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(RunError, match=r"found other files: thesis\.tex"):
        check_recipe(tmp_path / "mine", first, overwrite=True)
    shutil.rmtree(tmp_path / "mine")
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"kind": "cook"}, r"a directory of its own for cook, found an earlier run of compare"),
        ({"metric": "r2"}, r"found another run[\s\S]*    metric: accuracy -> r2"),
        ({"layout": {"exclude": ["head.*"]}}, r"    layout\.exclude\.0: not there -> head\.\*"),
        ({"layout": {"donor": 2}}, r"    layout\.donor: not there -> 2"),
        ({"settings": {"hl": {"lr": 0.5}}}, r"found other ones[\s\S]*    hl\.lr: 0\.1 -> 0\.5\n  Nothing was touched"),
        ({"settings": {}}, r"    hl\.lr: 0\.1 -> not there"),
        ({"fit_digest": "b" * 64}, r"fitting data this run was started with, found other samples[\s\S]*a{12} -> b{12}"),
        ({"report_digests": {"report": "b" * 64}}, r"report data this run was[\s\S]*fingerprint None -> b{12}"),
        ({"report_digests": {"shifted": "b" * 64}}, r"report data 'shifted' this run was started with"),
        ({"code": {"toy.py": "2"}}, r"found other code[\s\S]*    what toy\.py does"),
        ({"code": {}}, r"found other code[\s\S]*    what toy\.py does"),
    ],
)  # fmt: skip
def test_whatever_makes_it_another_run_is_refused(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    facts = {**FACTS, "settings": {"hl": {"lr": 0.1}}, "fit_digest": "a" * 64}
    first = (facts, RecipeFacts(code={"toy.py": "1"}))
    make(tmp_path / "run", first)
    before = everything(tmp_path)
    code = change.get("code", {"toy.py": "1"})
    changed = {key: value for key, value in change.items() if key != "code"}
    with pytest.raises(RunError, match=found):
        make(tmp_path / "run", ({**facts, **changed}, RecipeFacts(code=code)))
    assert everything(tmp_path) == before
    make(tmp_path / "run", first)


def test_a_recipe_that_means_something_else_by_now_is_refused_with_both_versions(tmp_path: Path) -> None:
    make(tmp_path / "run", ({**FACTS, "settings": {"hl": {"lr": 0.1}}}, FIRST[1]))
    run = tmp_path / "run" / "run.json"
    run.write_text(run.read_text().replace(f'"stockpot": "{__version__}"', '"stockpot": "0.0.1"'))
    expected = r"found other defaults of stockpot \(begun by stockpot 0\.0\.1, this is "
    with pytest.raises(RunError, match=expected):
        make(tmp_path / "run", ({**FACTS, "settings": {"hl": {"lr": 0.2}}}, FIRST[1]))


def test_a_run_that_failed_before_its_first_result_is_in_nobodys_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="a typo"):
        stopped(run, ValueError("a typo in the recipe"))
    (run / "mine.txt").write_text("keep me")
    with RunDirectory(run, *OTHER) as directory:
        directory.begin({})
        assert directory.about["title"] == "other"
        directory.method("best").mkdir(parents=True)
    assert (run / "mine.txt").read_text() == "keep me"
    with pytest.raises(RunError, match="found another run"):  # there is work in it now
        make(run, FIRST)


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cooked(run)
    (run / "mine.txt").write_text("keep me")
    make(run, OTHER, overwrite=True)
    assert json.loads((run / "run.json").read_text())["title"] == "other"
    assert not (run / "methods").exists()
    assert (run / "mine.txt").read_text() == "keep me"


def test_a_run_of_an_older_format_can_be_replaced_and_is_not_continued(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cooked(run)
    (run / "run.json").write_text('{"format": 1, "stockpot": "0.1", "kind": "compare"}')
    with pytest.raises(RunError, match="expected a run of format 3, found format 1"):
        make(run)
    make(run, overwrite=True)
    assert not (run / "methods").exists()
    (run / "run.json").write_text('{"format": 99, "stockpot": "9.0"}')
    for overwrite in (False, True):  # what a later version writes, and so what to clear, is not known here
        with pytest.raises(RunError, match="expected a run of format 3, found format 99"):
            make(run, overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("own", ["methods", "tensorboard", "recipe.yaml", "run.json", ".clearing", "x"])
def test_a_folder_that_never_was_a_run_is_refused_whatever_is_asked(tmp_path: Path, own: str, overwrite: bool) -> None:
    """Before, --overwrite removed a user's methods/ and the refusal itself recommended it."""
    if own in ("methods", "tensorboard"):
        (tmp_path / own).mkdir()
        (tmp_path / own / "thesis.tex").write_text(TREASURE)
    else:
        (tmp_path / own).write_text('{"format": 2}')
    before = everything(tmp_path)
    with pytest.raises(RunError) as caught:
        make(tmp_path, overwrite=overwrite)
    assert "overwrite" not in str(caught.value)
    assert everything(tmp_path) == before  # not even a lock is left


def test_a_file_in_the_way_and_no_run_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="expected a place to write to"):
        make(tmp_path / "file")
    with pytest.raises(RunError, match=r"expected a run with its run\.json, found no such directory"):
        read_about(tmp_path / "nowhere")


def test_overwriting_that_was_killed_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an earlier run must be taken neither for a run nor for somebody's files."""
    run = tmp_path / "run"
    cooked(run)
    clear = files.clear

    def killed(folder: Path, names: Any, root: Path) -> None:
        clear(folder, list(names)[:4], root)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stockpot.files.clear", killed)
        with pytest.raises(KeyboardInterrupt):
            make(run, OTHER, overwrite=True)
    assert not (run / "recipe.yaml").exists()
    assert (run / "methods").exists()
    make(run, OTHER)  # without --overwrite: that was said before
    assert sorted(path.name for path in run.iterdir()) == [".lock", "recipe.yaml", "run.json"]


def test_a_run_killed_at_its_first_write_is_in_nobodys_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    half = run / f".run.json.{'0a' * 8}.writing"
    half.write_text('{"form')
    (run / ".lock").write_text("1\n")
    make(run)
    assert not half.exists()


def test_what_killed_processes_left_half_written_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cooked(run)
    folder = run / "methods" / "best"
    half = folder / f".soup.{'0a' * 8}.writing"
    half.mkdir()
    (half / "shard-0").write_text("half")
    (folder / f".state.safetensors.{'0b' * 8}.writing").write_text("half")
    (folder / ".mine").write_text("keep me")
    make(run)
    assert sorted(path.name for path in folder.iterdir()) == [".mine", "result.json"]


def test_an_error_while_the_disk_is_full_is_not_hidden_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def failing() -> None:
        with RunDirectory(tmp_path / "run", *FIRST) as directory:
            directory.begin({})
            monkeypatch.setattr("os.fsync", full)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        failing()
    monkeypatch.undo()
    make(tmp_path / "run")  # the lock was let go


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        stopped(tmp_path / "run", KeyboardInterrupt())
    assert read_about(tmp_path / "run")["status"] == "interrupted"


HOLD = """
import sys, time
from stockpot.run.directory import RecipeFacts, RunDirectory
held = RunDirectory(sys.argv[1], eval(sys.argv[2]), RecipeFacts(digest="1"))
held.begin({})
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run), repr(FACTS)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"found one in use by process {holder.pid}"):
            make(run)
        with pytest.raises(RunError, match="in use"):
            make(run, overwrite=True)
    finally:
        holder.kill()  # no chance to clean up: the lock must go by itself
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    make(run)


# Links, and other things that are no files ---------------------------------------------------------------


@pytest.mark.parametrize("name", [".lock", "run.json", "recipe.yaml", "events.jsonl", "pool.json", "methods"])
@pytest.mark.parametrize("target", ["file", "folder", "nothing"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_planted_link_leads_nowhere(tmp_path: Path, name: str, target: str, overwrite: bool) -> None:
    """Nothing outside of the directory is read, written, created or deleted, in a new run and in a continued one."""
    outside = tmp_path / "outside"
    (outside / "folder" / "best").mkdir(parents=True)
    (outside / "folder" / "best" / "result.json").write_text(TREASURE)
    (outside / "file").write_text(TREASURE)
    before = everything(outside)
    for continued in (False, True):
        run = tmp_path / f"run-{continued}"
        if continued:
            make(run)
        run.mkdir(exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(outside / target)
        with contextlib.suppress(RunError, LinkError, WriteError):
            used(run, overwrite=overwrite)
        assert everything(outside) == before


@pytest.mark.parametrize("name", [".lock", "run.json", "recipe.yaml", "events.jsonl", "pool.json"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(tmp_path: Path, name: str) -> None:
    make(tmp_path / "run")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)
    wanted = OTHER if name == "recipe.yaml" else FIRST  # it is read to show what differs
    with pytest.raises((RunError, LinkError, WriteError), match=name):
        used(tmp_path / "run", wanted)


# events.jsonl --------------------------------------------------------------------------------------------


def test_the_journal_survives_a_torn_line_and_holds_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path, tmp_path)
    journal(Event("step", {"loss": float("nan"), "ends": [float("inf"), {"deep": float("-inf")}]}))
    journal(Event("progress", {"done": 1}))
    journal.close()
    with path.open("a") as file:
        file.write('{"time": 1, "ki')
    assert [event["kind"] for event in read_events(path)] == ["step"]
    again = Journal(path, tmp_path)
    again(Event("cooked", {"method": "best"}))
    again.close()
    events = read_events(path)
    assert [event["kind"] for event in events] == ["step", "cooked"]
    assert events[0]["loss"] is None
    assert events[0]["ends"] == [None, {"deep": None}]


def test_zeros_that_a_power_cut_left_in_the_journal_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "step"}\n' + b"\0" * 40 + b'\n{"kind": "lost"}\n')
    journal = Journal(path, tmp_path)
    journal(Event("cooked", {"method": "best"}))
    journal.close()
    assert [event["kind"] for event in read_events(path)] == ["step", "cooked"]

"""A run directory is made, recognised or refused; never mixed up, never shared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stockpot.errors import RunError
from stockpot.events import Event
from stockpot.run import Identity, RunDirectory
from stockpot.run.journal import Journal, read_events

FIRST = Identity(
    "compare", "first", recipe={"method": {"lr": 0.01}, "output": {"dir": "a"}}, recipe_digest="1"
)
OTHER = Identity(
    "compare", "other", recipe={"method": {"lr": 0.02}, "output": {"dir": "b"}}, recipe_digest="2"
)


def make(path: Path, identity: Identity = FIRST, overwrite: bool = False) -> None:
    with RunDirectory.create(path, identity, overwrite=overwrite) as directory:
        directory.set_status("done")


def test_the_same_run_is_continued_and_keeps_its_birth_and_command(tmp_path: Path) -> None:
    make(tmp_path / "run")
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    with RunDirectory.create(tmp_path / "run", FIRST) as directory:
        assert directory.run["status"] == "running"
        assert directory.run["created"] == before["created"]


def test_another_recipe_is_refused_and_the_difference_shown(tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(RunError) as caught:
        make(tmp_path / "run", OTHER)
    text = str(caught.value)
    assert "found another run" in text
    assert "method.lr: 0.01 -> 0.02" in text
    assert "output.dir" not in text  # where results go does not make it another run
    assert "--overwrite" in text


def test_a_run_that_failed_before_its_first_result_is_in_nobodys_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(ValueError, match="a typo"), RunDirectory.create(run, FIRST):
        raise ValueError("a typo in the recipe")
    (run / "mine.txt").write_text("keep me")
    with RunDirectory.create(run, OTHER) as directory:
        assert directory.run["title"] == "other"
        directory.method("best").mkdir(parents=True)
    assert (run / "mine.txt").read_text() == "keep me"
    with pytest.raises(RunError, match="found another run"):  # there is work in it now
        make(run, FIRST)


def test_overwrite_replaces_the_run_and_nothing_else(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make(run)
    (run / "methods" / "best").mkdir(parents=True)
    (run / "methods" / "best" / "result.json").write_text("{}")
    (run / "mine.txt").write_text("keep me")
    make(run, OTHER, overwrite=True)
    assert json.loads((run / "run.json").read_text())["title"] == "other"
    assert not (run / "methods").exists()
    assert (run / "mine.txt").read_text() == "keep me"


def test_foreign_files_are_refused_unless_told(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match=r"found other files: thesis\.tex\.\n  Fix: .*--overwrite"):
        make(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["thesis.tex"]
    make(tmp_path, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_file_in_the_way_and_a_run_of_the_future_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="expected a place to write to"):
        make(tmp_path / "file")
    make(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text('{"format": 99}')
    with pytest.raises(RunError, match="expected a run of format 1, found 99"):
        make(tmp_path / "run")
    with pytest.raises(RunError, match=r"expected a run directory with a run\.json, found nothing"):
        RunDirectory.open(tmp_path / "nowhere")


def test_overwriting_that_was_killed_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of an earlier run must be taken neither for a run nor for somebody's files."""
    run = tmp_path / "run"
    make(run)
    (run / "methods" / "best").mkdir(parents=True)
    (run / "methods" / "best" / "result.json").write_text("{}")

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("stockpot.run.directory.shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            make(run, OTHER, overwrite=True)
    assert not (run / "run.json").exists()
    assert (run / "methods").exists()
    make(run, OTHER)  # without --overwrite: that was said before
    assert sorted(path.name for path in run.iterdir()) == [".lock", "recipe.yaml", "run.json"]


def test_a_run_killed_at_its_first_write_is_in_nobodys_way(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".run.json.writing").write_text('{"form')
    (run / ".lock").write_text("1\n")
    make(run)
    assert not (run / ".run.json.writing").exists()


def test_what_killed_processes_left_half_written_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with RunDirectory.create(run, FIRST) as directory:
        directory.method("hl+").mkdir(parents=True)
    half = run / "methods" / "hl-plus" / ".soup.writing"
    half.mkdir()
    (half / "shard-0").write_text("half")
    (run / "methods" / "hl-plus" / ".state.safetensors.writing").write_text("half")
    (run / "methods" / "hl-plus" / ".mine").write_text("keep me")
    make(run)
    assert [path.name for path in (run / "methods" / "hl-plus").iterdir()] == [".mine"]


def test_an_error_while_the_disk_is_full_is_not_hidden_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    def failing() -> None:
        with RunDirectory.create(tmp_path / "run", FIRST):
            monkeypatch.setattr("os.fsync", full)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        failing()
    monkeypatch.undo()
    make(tmp_path / "run")  # the lock was let go


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunDirectory.create(tmp_path / "run", FIRST):
        raise KeyboardInterrupt
    assert RunDirectory.open(tmp_path / "run").run["status"] == "interrupted"


HOLD = """
import sys, time
from stockpot.run import Identity, RunDirectory
RunDirectory.create(sys.argv[1], Identity("compare", "t"))
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    identity = Identity("compare", "t")
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunError, match=f"found one in use by process {holder.pid}"):
            make(run, identity)
        with pytest.raises(RunError, match="in use"):
            make(run, identity, overwrite=True)
    finally:
        holder.kill()  # no chance to clean up: the lock must go by itself
        holder.wait()
        assert holder.stdout is not None
        holder.stdout.close()
    make(run, identity)


def test_the_journal_survives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    journal = Journal(path)
    journal(Event("step", {"loss": float("nan")}))
    journal(Event("progress", {"done": 1}))
    journal.close()
    with path.open("a") as file:
        file.write('{"time": 1, "ki')
    assert [event["kind"] for event in read_events(path)] == ["step"]
    again = Journal(path)
    again(Event("cooked", {"method": "best"}))
    again.close()
    events = read_events(path)
    assert [event["kind"] for event in events] == ["step", "cooked"]
    assert events[0]["loss"] is None


def test_zeros_that_a_power_cut_left_in_the_journal_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "step"}\n' + b"\0" * 40 + b'\n{"kind": "lost"}\n')
    journal = Journal(path)
    journal(Event("cooked", {"method": "best"}))
    journal.close()
    assert [event["kind"] for event in read_events(path)] == ["step", "cooked"]

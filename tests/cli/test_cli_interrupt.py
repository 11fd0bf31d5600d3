"""Ctrl-C, SIGTERM or no memory: the run continues later to the same numbers, and the terminal is as it was."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from safetensors import safe_open

from cli.conftest import Stockpot
from stockpot.engine.loader import Loader

SLOW = ["--set", "method.steps=2000", "--set", "method.methods=[best, hl]", "--set", "method.batch_size=16"]


def started(
    folder: Path, on_start: Callable[[], None] = lambda: None, options: Sequence[str] = (), **streams: int
) -> subprocess.Popen[str]:
    """A comparison in a process of its own, in the middle of learning."""
    recipe = str(folder / "recipe.yaml")
    events = folder / "run" / "events.jsonl"
    before = events.read_text().count('"step"') if events.exists() else 0
    process: subprocess.Popen[str] = subprocess.Popen(
        [sys.executable, "-m", "stockpot", "compare", recipe, *SLOW, *options],
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"},
        **streams,  # type: ignore[call-overload]
    )
    on_start()
    deadline = time.monotonic() + 60
    while not (events.exists() and events.read_text().count('"step"') > before):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process


def test_a_stopped_run_says_how_to_continue_and_does(folder: Path, stockpot: Stockpot) -> None:
    for number, word, code, options in (
        (signal.SIGINT, "interrupted", 130, ("--overwrite",)),
        (signal.SIGTERM, "terminated", 143, ()),
    ):
        process = started(folder, options=options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        assert f"{word}; resume with: stockpot compare" in err
        assert "--overwrite" not in err  # it would throw away what is to be continued
        assert "Traceback" not in err
        assert out == ""
        assert json.loads((folder / "run" / "run.json").read_text())["status"] == "interrupted"
        # Saved when it was asked to stop, long before the next save was due.
        state = folder / "run" / "methods" / "hl" / "state.safetensors"
        with safe_open(state, framework="pt") as file:
            assert len(file.get_tensor("history")) > 0
        offered = re.search(r"the best soup so far, without going on: stockpot (rebuild \S+) --out best-so-far", err)
        assert offered is not None
        out_there = folder / f"best-{word}"
        built = stockpot(*shlex.split(offered[1]), "--out", out_there)
        assert built.code == 0, built.err
        assert json.loads((out_there / "soup.json").read_text())["about"]["stopped"]
    again = stockpot("compare", folder / "recipe.yaml", *SLOW)
    assert again.code == 0
    assert "best: finished earlier, not repeated" in again.err
    whole = stockpot("compare", folder / "recipe.yaml", *SLOW, "--out", folder / "whole")
    assert whole.code == 0
    for method in ("best", "hl"):
        name = f"methods/{method}/weights.safetensors"
        assert (folder / "run" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_the_terminal_gets_its_cursor_back(folder: Path) -> None:
    ours, theirs = pty.openpty()
    parts: list[bytes] = []

    def drain() -> None:
        """Everything written to the terminal; one that nobody reads would stop the process."""
        with contextlib.suppress(OSError):  # the other side has gone
            while part := os.read(ours, 1 << 16):
                parts.append(part)

    reader = threading.Thread(target=drain)
    process = started(folder, reader.start, stdout=theirs, stderr=theirs)
    process.send_signal(signal.SIGTERM)
    os.close(theirs)
    process.wait(timeout=60)
    reader.join(timeout=60)
    os.close(ours)
    shown = b"".join(parts).decode(errors="replace")
    hidden, back = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
    assert hidden >= 0  # a bar was drawn
    assert back > hidden
    assert "resume with: stockpot compare" in shown[back:]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_no_memory_on_the_host_is_said_in_our_words_and_costs_nothing(
    folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    quick = ("--set", "method.methods=[best, greedy, hl+]")
    load = Loader.load

    def none_left(self: Loader, *args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(Loader, "load", none_left)
    failed = stockpot("compare", folder / "recipe.yaml", *quick)
    assert failed.code == 1
    assert "error: out of memory; load fewer models at a time with --set method.block_size=2" in failed.err
    assert "What was done is kept; resume with: stockpot" in failed.err
    monkeypatch.setattr(Loader, "load", load)
    again = stockpot("compare", folder / "recipe.yaml", *quick)
    assert again.code == 0, again.err
    assert "greedy: finished earlier, not repeated" in again.err


def test_a_damaged_record_is_named(folder: Path, stockpot: Stockpot) -> None:
    quick = ("--set", "method.methods=[best, uniform]")
    assert stockpot("compare", folder / "recipe.yaml", *quick).code == 0
    weights = folder / "run" / "methods" / "best" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    answer = stockpot("compare", folder / "recipe.yaml", *quick)
    assert answer.code == 1
    assert f"error: {weights}: expected a file of a run record" in answer.err

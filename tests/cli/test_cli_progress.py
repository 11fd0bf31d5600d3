"""The command line shows progress: live on a terminal, and from the run's own figures."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path


def test_a_terminal_gets_a_live_bar_and_colours(shared: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "stockpot", "cook", str(shared / "recipe.yaml"), "--out", str(tmp_path / "run")]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0
    text = seen.decode()
    assert "\x1b[" in text
    assert "\u2501" in text  # the bar
    assert text.rstrip().endswith("from its record")
    assert "\x1b[?25h" in text  # the cursor is back


def test_a_run_tells_how_many_folds_and_blocks_there_are(shared: Path, compared: object) -> None:
    lines = (shared / "run" / "events.jsonl").read_text().splitlines()
    start = next(event for event in map(json.loads, lines) if event["kind"] == "start")
    assert start["folds"]["crossfit"] == 4
    assert start["folds"]["hl+"] == start["blocks"]["hl+"] == 1
    assert start["blocks"]["greedy"] == 0

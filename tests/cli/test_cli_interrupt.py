"""Ctrl-C in the middle leaves a run that continues to the same numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.conftest import Stockpot


def test_ctrl_c_leaves_a_resumable_run(folder: Path, stockpot: Stockpot) -> None:
    slow = [
        "--set",
        "method.steps=2000",
        "--set",
        "method.methods=[best, hl]",
        "--set",
        "method.batch_size=16",
    ]
    command = [
        sys.executable,
        "-m",
        "stockpot.cli",
        "compare",
        str(folder / "recipe.yaml"),
        *slow,
        "--overwrite",
    ]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    events = folder / "run" / "events.jsonl"
    deadline = time.monotonic() + 60
    while not (events.exists() and '"step"' in events.read_text()):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted; resume with: stockpot compare" in err
    assert "--overwrite" not in err  # it would throw away what is to be continued
    assert "Traceback" not in err
    assert out == ""
    assert json.loads((folder / "run" / "run.json").read_text())["status"] == "interrupted"
    again = stockpot("compare", folder / "recipe.yaml", *slow)
    assert again.code == 0
    assert "best: finished earlier, not repeated" in again.err
    whole = stockpot("compare", folder / "recipe.yaml", *slow, "--out", folder / "whole")
    assert whole.code == 0
    for method in ("best", "hl"):
        file = f"methods/{method}/weights.safetensors"
        assert (folder / "run" / file).read_bytes() == (folder / "whole" / file).read_bytes()

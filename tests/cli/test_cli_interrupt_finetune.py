"""Ctrl-C reaches every process of the terminal; only one of them answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.test_cli_whole_way import prepare


@pytest.mark.parametrize("wait_for", ["search/start.safetensors", "trial_000.json"])
def test_ctrl_c_during_parallel_trials_is_one_short_message(tmp_path: Path, wait_for: str) -> None:
    recipe = prepare(tmp_path, "plain")
    long = (
        "--set",
        "finetune.parallel=2",
        "--set",
        "finetune.listed=[{epochs: 3}, {epochs: 9000}, {epochs: 9000}]",
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "stockpot.cli", "finetune", str(recipe), *long],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives one
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "pool" / wait_for).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    if wait_for.startswith("search"):
        time.sleep(0.8)  # the workers are loading torch now
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.count("interrupted; resume with: stockpot finetune") == 1

"""Ctrl-C reaches every process of the terminal; each says once how to go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cli.test_cli_whole_way import prepare


def test_ctrl_c_during_a_trial_is_one_short_message(tmp_path: Path) -> None:
    recipe = prepare(tmp_path, "plain")
    long = ("--set", "finetune.listed=[{epochs: 3}, {epochs: 9000}, {epochs: 9000}]")
    process = subprocess.Popen(
        [sys.executable, "-m", "stockpot", "finetune", str(recipe), *long],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal gives one
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 90
    while not (tmp_path / "pool" / "trial_000.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.count("interrupted; resume with: stockpot finetune") == 1

"""A little of `make torture`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def tortured(script: str, *arguments: str) -> str:
    """What the script says; it exits with 1 when anything is lost."""
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", f"torture.{script}", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_commands_end_like_uninterrupted_ones() -> None:
    said = tortured("kills", "--kills", "8", "--only", "cook mehl+ in shards", "finetune with BatchNorm")
    assert "\n0 mismatches" in said


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_killed_ranks_end_all_and_the_run_resumes_to_the_same_soup() -> None:
    said = tortured("rank_kills", "--kills", "2", "--cases", "1")
    assert "\n0 mismatches" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_full_disk_costs_nothing_but_time() -> None:
    said = tortured("full_disk", "--only", "cook mehl+", "--pages", "12", "--calls", "150")
    assert "\n0 failures" in said


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_many_runs_in_one_process_leave_no_handles_threads_or_children() -> None:
    said = tortured("soak", "--runs", "4", "--warm", "2", "--charts", "0")
    assert "\n0 leaks" in said


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory as Unix does")
def test_damaged_data_is_refused_or_read() -> None:
    assert "\n320 damaged data files, seed 7, 0 failures" in tortured("mutated_data", "--count", "320", "--seed", "7")


@pytest.mark.skipif(sys.platform == "win32", reason="measures memory as Unix does")
def test_damaged_adapters_are_refused_or_right() -> None:
    said = tortured("mutated_adapters", "--count", "300", "--seed", "7")
    assert "300 damaged adapters, seed 7, 0 failures" in said


@pytest.mark.skipif(sys.platform != "linux", reason="makes links, FIFOs and devices")
def test_damaged_run_directories_are_refused_or_right() -> None:
    said = tortured("mutated_runs", "--count", "60", "--seed", "3")
    assert "60 damaged runs, seed 3, 0 failures" in said

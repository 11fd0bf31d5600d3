"""Two workers that exchange coefficient gradients only learn what one process learns."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_distributed import RUNS, run

from stockpot import __version__
from zoo import fine_tunes, mlp, normed, write


def test_distributed_equals_single_process(tmp_path: Path) -> None:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    for build in (mlp, normed):
        states = [{n: v.double() if v.is_floating_point() else v for n, v in s.items()} for s in fine_tunes(build, 5)]
        write(tmp_path / build.__name__, states)
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    workers = [
        subprocess.Popen(
            [sys.executable, str(here.with_name("worker_distributed.py")), str(rank), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    alone: dict[str, Any] = {name: run(tmp_path, name) for name in RUNS}
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        check_refused(found.pop("refused"))
    assert first == second  # the workers agree to the last bit
    for name in RUNS:
        found, wanted = (torch.tensor(which[name]["W"], dtype=torch.float64) for which in (first, alone))
        assert (found - wanted).abs().max() <= 1e-12, name
        assert (wanted - 0.2).abs().max() > 1e-3, name
        assert first[name]["losses"] == pytest.approx(alone[name]["losses"], rel=1e-9), name
        assert first[name]["order"] == alone[name]["order"], name
        assert first[name]["skipped"] == alone[name]["skipped"], name
    assert len(first["bad numbers"]["skipped"]) > 3
    assert set(first["mehl+"]["sent"]) == {2 * 4 + 2, 1 * 4 + 2}  # b x G and two sums; the last block has one model
    assert len(first["mehl+"]["sent"]) == 3 * 5  # one exchange per step
    meeting = 2  # exchanges by which the ranks find each other, once
    assert first["mehl+ for longer"]["told"] == first["mehl+"]["told"][meeting:]  # no other one, however many steps
    for apart in ("crossfit by folds", "hl+ by folds", "batch normalisation"):
        assert first[apart]["sent"] == [], apart
    learned = [which["learned"]["beta"] for which in (first, alone)]
    assert learned[0] == pytest.approx(learned[1], rel=1e-9)
    assert abs(learned[1] - 1) > 1e-3


def check_refused(said: dict[str, str]) -> None:
    """Ranks that are about to do different things stop before they begin, with the difference."""
    host = re.escape(f"({socket.gethostname()})")
    for name, wanted in {
        "settings": rf"settings\.hl\+\.lr: 0\.1 on rank 0 {host}, 1\.1 on rank 1 {host}",
        "data": rf"fit_digest: \S+ on rank 0 {host}, \S+ on rank 1 {host}",
        "ingredient": rf"differences:\n    ingredient model_2: \w{{16}} on rank 0 {host}, \w{{16}} on rank 1 {host}\n ",
        "version": rf"stockpot: {re.escape(__version__)} on rank 0 {host}, 0\.0 on rank 1 {host}",
    }.items():
        assert "expected the same versions, files, data and settings on all of them" in said[name], name
        assert re.search(wanted, said[name]), said[name]


def test_ranks_that_do_not_meet_are_told_where_and_how_many(tmp_path: Path) -> None:
    script = """
import os, sys
from datetime import timedelta
from stockpot import ranks
from stockpot.errors import RunError

ranks._MEETING = timedelta(seconds=1)
os.environ["WORLD_SIZE"] = "2"
for rank, port in (("0", None), ("0", sys.argv[1]), ("1", sys.argv[1])):
    os.environ["RANK"] = rank
    if port is not None:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        ranks.join()
    except RunError as error:
        print(error)
    if rank == "0" and port is not None:
        sys.argv[1] = str(int(port) + 1)
"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "SLURM_", "TORCHELASTIC"))}
    done = subprocess.run([sys.executable, "-c", script, port], env=known, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "found no MASTER_ADDR and no MASTER_PORT" in done.stdout
    assert f"expected 2 that meet at 127.0.0.1:{port} within 1 s, found Timed out after" in done.stdout
    assert done.stdout.count("expected 2 that meet at 127.0.0.1:") == 2  # who waits, and who finds nobody
    assert done.stdout.count("start as many as WORLD_SIZE") == 2

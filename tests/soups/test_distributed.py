"""Two workers that exchange coefficient gradients only learn what one process learns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_distributed import RUNS, run

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

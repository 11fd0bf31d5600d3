"""Memory while learning grows with b, not with K."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from measure_memory import build
from safetensors.torch import save_file

from stockpot.soups.result import anonymous_bytes

pytestmark = pytest.mark.skipif(not anonymous_bytes(), reason="needs /proc/self/status with RssAnon")


def test_peak_memory_does_not_grow_with_the_number_of_models(tmp_path: Path) -> None:
    """K = 8 and K = 32 with b = 4; of the 32, eight files each appear under four names, to spare the disk."""
    base = {name: value.detach() for name, value in build().state_dict().items()}
    size = sum(value.nbytes for value in base.values())
    for models in (8, 32):
        (tmp_path / str(models)).mkdir()
    for k in range(8):
        file = tmp_path / "8" / f"model_{k}.safetensors"
        save_file({name: value + 0.01 * torch.randn_like(value) for name, value in base.items()}, file)
        for n in range(4):
            os.link(file, tmp_path / "32" / f"model_{k}_{n}.safetensors")

    def measure(models: int) -> tuple[int, int]:
        command = [sys.executable, str(Path(__file__).with_name("measure_memory.py")), str(tmp_path / str(models))]
        # Freed memory goes back at once: what an allocator keeps for later is not what learning takes.
        env = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["models"] == models
        return int(found["peak"]), int(found["peak"] - found["before"])

    (few, few_added), (many, many_added) = measure(8), measure(32)
    assert few_added > 4 * size  # b models at least: the measurement sees what it should
    assert abs(many - few) < 0.1 * few
    assert abs(many_added - few_added) < 0.1 * few_added  # also without what Python and torch hold anyway

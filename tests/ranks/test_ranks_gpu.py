"""Ranks on a GPU: a world of one under NCCL, a model divided over a mesh of one, and two ranks of gloo on one GPU.

Run on a machine with a GPU: `pytest -m gpu tests/ranks`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_zoo import adapter_pool
from ranks.worker_gpu import RUNS
from ranks.worker_shards import Blocks
from zoo import fine_tunes, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]
Found = dict[str, dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """What a process alone found, and each of two ranks; all three at work at once."""
    folder, here = tmp_path_factory.mktemp("gpu"), Path(__file__)
    states = fine_tunes(Blocks, 5)
    for dtype in (torch.float32, torch.bfloat16):
        write(folder / str(dtype).removeprefix("torch."), [{n: v.to(dtype) for n, v in s.items()} for s in states])
    modules = {"embed": 2, "blocks.0": 2, "blocks.1": 3, "head": 1}
    adapter_pool(folder / "lora", Blocks, [modules] * 4, torch.float32)
    paths = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    which = [(0, 1), (0, 2), (1, 2)]
    started = [
        subprocess.Popen(
            [sys.executable, str(here.with_name("worker_gpu.py")), str(rank), str(size), str(folder)],
            env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True,
        )
        for rank, size in which
    ]  # fmt: skip
    try:
        for one in started:
            _, errors = one.communicate(timeout=240)
            assert one.returncode == 0, errors
    finally:
        for one in started:
            one.kill()
    return [torch.load(folder / f"rank_{rank}_of_{size}.pt") for rank, size in which]


def check_same(some: dict[str, dict[str, Any]], wanted: dict[str, dict[str, Any]]) -> None:
    for name, one in some.items():
        bound = 5e-3 if name == "in bf16" else 1e-5
        assert (wanted[name]["W"] - 0.2).abs().max() > 1e-3, name
        assert (one["W"] - wanted[name]["W"]).abs().max() <= bound, name
        assert one["loss"] == pytest.approx(wanted[name]["loss"], rel=100 * bound), name


def test_a_world_of_one_under_nccl_learns_the_same_and_keeps_cuda_graphs(found: list[Found]) -> None:
    alone, data = found[0]["alone"], found[0]["data"]
    assert alone.keys() == data.keys() == RUNS.keys()
    check_same(data, alone)
    for name in RUNS:
        assert data[name]["path"] == alone[name]["path"] == ["CUDA graph"], name


def test_a_model_divided_over_a_mesh_of_one_learns_the_same(found: list[Found]) -> None:
    assert found[0]["shards"].keys() == RUNS.keys()
    check_same(found[0]["shards"], found[0]["alone"])
    assert {one["path"][0] for one in found[0]["shards"].values()} == {"eager"}


@pytest.mark.parametrize("way", ["data", "folds", "shards"])
def test_two_ranks_on_one_gpu_learn_the_same(way: str, found: list[Found]) -> None:
    if way == "shards" and "cannot shard" in found[1]:
        pytest.skip(f"gloo divides no model on a GPU: {found[1]['cannot shard']}")
    first, second = (each[way] for each in found[1:])
    assert first.keys() == (RUNS.keys() if way != "folds" else {"crossfit"})
    check_same(first, found[0]["alone"])
    for name, one in first.items():
        assert one["W"].equal(second[name]["W"]), name

"""Four ranks make the soup that one process makes, in every way to share the work; most of it about divided models."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ranks.worker_shards import apart, bound, held, loaded, recorded, run, write_pools
from stockpot import Settings
from stockpot.errors import MethodError, TaskError
from stockpot.task.shards import shard
from zoo import Tied, normed

SOUP = "soup/model.safetensors"
SAMPLE = (  # `make torture` has all of it, with two ranks and with four
    "shards: hl+ by two and two", "shards: mehl+ in fp32", "shards: learned+", "shards: crossfit", "shards: greedy",
    "shards: adapters", "shards: tokens", "shards: one sample per batch", "shards: accumulated",
    "data: hl+", "data: mehl+ in fp32", "data: learned+", "data: crossfit", "data: greedy", "data: adapters",
    "data: tokens", "data: one sample per batch", "folds: hl+ in folds", "folds: crossfit", "folds: adapters in folds",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    folder = tmp_path_factory.mktemp("shards")
    write_pools(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of four ranks found."""
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(here.with_name("worker_shards.py")), "4", str(folder), *SAMPLE],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"rank_{rank}_of_4.pt") for rank in range(4)]


@pytest.mark.parametrize("sampled", SAMPLE)
def test_ranks_make_the_soup_of_one_process(sampled: str, folder: Path, ranks: list[dict[str, Any]]) -> None:
    name = sampled.partition(": ")[2]
    wanted = run(folder, name)
    assert (wanted["W"] - 1 / len(wanted["W"])).abs().max() > 1e-3
    for found in ranks:
        assert apart(found[sampled], wanted) <= bound(name)


def test_what_shards_cannot_do_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        said = found["refused"]
        assert "expected a loss that calls model(...) as a whole" in said["own way"]
        assert "expected a loss that adds up over the parts of a batch" in said["contrastive"]
        assert "expected a number that divides the 4 ranks, found 3" in said["three of four"]
        assert "found data for mehl+" in said["not all alike"]
        assert "expected a model that every rank has all of, found parallel: shards" in said["hl+"]


def test_a_rank_holds_its_part_of_model_directions_and_soup(folder: Path, ranks: list[dict[str, Any]]) -> None:
    alone = held(folder)
    assert alone > 1e5
    assert ranks[0]["held"] <= 0.3 * alone


def test_a_step_exchanges_the_gradients_of_the_coefficients_and_two_sums(ranks: list[dict[str, Any]]) -> None:
    G = 12
    for found in ranks:
        assert len(found["exchanged"]) == 3 * 6  # one exchange per step
        assert set(found["exchanged"]) == {("all_reduce", 2 * G + 2), ("all_reduce", G + 2)}  # the last block has one


def test_a_model_that_does_not_fit_one_device_is_divided_unasked(folder: Path, ranks: list[dict[str, Any]]) -> None:
    wanted = run(folder, "hl+")["W"]
    for found in ranks:
        assert (found["unasked"]["W"] - wanted).abs().max() <= 1e-12
        assert found["unasked"]["shards"] == 2
        assert "unasked where it does not fit one device, found data for hl+" in found["unasked"]["said"]


def test_a_divided_model_takes_whole_tensors(folder: Path, ranks: list[dict[str, Any]]) -> None:
    wanted = loaded(folder)
    assert wanted[0] != pytest.approx(wanted[1], rel=1e-3)
    for found in ranks:
        assert found["loaded"] == pytest.approx(wanted, rel=1e-12)


def test_files_are_those_of_one_process(folder: Path, ranks: list[dict[str, Any]]) -> None:
    del ranks  # by now they have written theirs
    for method in ("greedy", "hl"):
        recorded(folder, method)
        found, wanted = (folder / f"{method}_of_{n}" / "methods" / method for n in (4, 1))
        made = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (found, wanted)]
        assert made[0] == made[1]
        W, weights = ([load_file(root / name) for root in (found, wanted)] for name in ("weights.safetensors", SOUP))
        assert (W[0]["W"] - W[1]["W"]).abs().max() <= 1e-12
        if method == "greedy":  # whose W is the same to the last bit
            assert (found / SOUP).read_bytes() == (wanted / SOUP).read_bytes()
        for name, tensor in weights[1].items():
            assert (weights[0][name] - tensor).abs().max() <= 1e-12, name


class Sevens(nn.Module):
    """Two blocks, and what is added to them."""

    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        for name, value in more.items():
            setattr(self, name, value)


def tied() -> nn.Module:
    model = Sevens(head=nn.Linear(7, 7))
    model.head.weight = model.blocks[0].weight  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Tied(), "of which one is gathered at a time, found none"),
        (nn.Sequential(nn.Linear(6, 8), *normed().children(), nn.Linear(3, 3)), "running statistics (2.running_mean)"),
        (tied(), "found head.weight, tied across"),
        (Sevens(scale=nn.Parameter(torch.tensor(1.0))), "expected parameters with rows, found scale, a single number"),
        (Sevens(norm=nn.LayerNorm(7).half(), head=nn.Linear(7, 3)), "one dtype in each Sevens, found float16, float32"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_divided_are_refused(model: nn.Module, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        shard(model, torch.device("cpu"))
    assert said in str(caught.value)


def test_a_number_of_shards_needs_shards() -> None:
    with pytest.raises(MethodError, match="expected parallel: shards beside it, found 'parallel: data'"):
        Settings(parallel="data", shards=2)

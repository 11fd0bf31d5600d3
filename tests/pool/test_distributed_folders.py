"""Folders of torch.distributed.checkpoint are read exactly, and nothing in their table is ever run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot import average
from stockpot.errors import CheckpointError
from stockpot.pool import Pool, open_checkpoint
from stockpot.pool.pickles import Made, Pairs, PickleError, pickled_values

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:TypedStorage"),
]
# What two ranks of an FSDP training save: the model in pieces, also uneven and in two dimensions, and the optimiser.
TRAINING = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
for seed in (0, 1):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).to(torch.bfloat16 if seed else None)
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    fully_shard(model[0], mesh=mesh), fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    save({"model": weights, "optim": states, "epoch": 3}, checkpoint_id=f"{folder}/run-{seed}")
    columns = {name: distribute_tensor(value, mesh, [Shard(value.dim() - 1)]) if value.dim() else value
               for name, value in weights.items() if not hasattr(value, "full_tensor")}
    columns |= {name: distribute_tensor(value.full_tensor(), mesh, [Shard(value.dim() - 1)])
                for name, value in weights.items() if hasattr(value, "full_tensor")}
    save(columns, checkpoint_id=f"{folder}/columns-{seed}")
    if rank == 0:
        torch.save({name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
                    for name, value in weights.items()}, f"{folder}/whole-{seed}.pt")
    else:
        {name: value.full_tensor() for name, value in weights.items() if hasattr(value, "full_tensor")}
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp")
    (folder / "training.py").write_text(TRAINING)
    command = [sys.executable, str(folder / "training.py"), str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return folder


def saved(folder: Path, state: dict[str, Any]) -> Path:
    from torch.distributed.checkpoint import FileSystemWriter, save  # type: ignore[attr-defined]

    save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return folder


def state() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).state_dict()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("kind", ["run", "columns"])
def test_what_several_ranks_saved_is_the_model_they_had(trained: Path, kind: str, seed: int) -> None:
    found, whole = open_checkpoint(trained / f"{kind}-{seed}"), torch.load(trained / f"whole-{seed}.pt")
    assert set(found.specs) == set(whole)
    assert len(found.files) == 3  # the table, and one file for each rank
    for name, value in whole.items():
        assert found.tensor(name).dtype == value.dtype
        assert torch.equal(found.tensor(name), value), name
    assert found.key == ("model" if kind == "run" else None)  # not the optimiser's state, which is larger


def test_they_are_ingredients_like_any_other(trained: Path, tmp_path: Path) -> None:
    saved(tmp_path / "runs" / "a", {"model": state(), "epoch": 1})
    saved(tmp_path / "runs" / "b", {"model": {name: value + 1 for name, value in state().items()}})
    torch.save({name: value + 5 for name, value in state().items()}, tmp_path / "runs" / "c.pt")
    pool = Pool.open(tmp_path / "runs")
    assert pool.names == ("a", "b", "c")
    soup = average([tmp_path / "runs"], tmp_path / "soup")
    assert torch.allclose(soup.state_dict()["0.weight"], state()["0.weight"] + 2)
    with pytest.raises(CheckpointError, match="weights under the key 'ema'"):
        open_checkpoint(tmp_path / "runs" / "a", key="ema")


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self.path),)


def test_a_table_that_would_run_something_runs_nothing(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", state())
    with (folder / ".metadata").open("rb") as file:
        about = pickle.load(file)
    about.planner_data["0.weight"] = ("0.weight",)
    about.storage_meta = Hostile(tmp_path / "made")  # what is not needed is not even looked at
    (folder / ".metadata").write_bytes(pickle.dumps(about))
    assert torch.equal(open_checkpoint(folder).tensor("0.weight"), state()["0.weight"])
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="it describes something else"):
        open_checkpoint(folder)
    assert not (tmp_path / "made").exists()


def _move(about: Any) -> None:
    next(iter(about.storage_data.values())).relative_path = "../a.distcp"


def _grow(about: Any) -> None:
    about.state_dict_metadata["0.weight"].size = torch.Size([2**40, 2**40])


def _beyond(about: Any) -> None:
    next(iter(about.storage_data.values())).offset = 10**9


def _twice(about: Any) -> None:
    about.state_dict_metadata["0.weight"].chunks *= 2


def _huge(about: Any) -> None:
    one = about.state_dict_metadata["0.weight"]
    one.size = one.chunks[0].sizes = torch.Size([2**20, 2**20])


def _nowhere(about: Any) -> None:
    about.storage_data = {}


def _squeezed(about: Any) -> None:
    for one in about.storage_data.values():
        one.transform_descriptors = ["zstd"]


def _other(about: Any) -> None:
    properties = about.state_dict_metadata["0.weight"].properties
    properties.dtype = torch.int32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_move, "no .distcp file of this folder"),
        (_grow, "do not make up the whole tensor"),
        (_beyond, "would be outside of __0_0.distcp"),
        (_twice, "do not make up the whole tensor"),
        (_huge, "would be larger than its"),
        (_nowhere, "it does not say where a piece of"),
        (_squeezed, "is compressed or transformed"),
    ],
)
def test_tables_that_lie_are_refused(tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    folder = saved(tmp_path / "a", state())
    with (folder / ".metadata").open("rb") as file:
        about = pickle.load(file)
    change(about)
    (folder / ".metadata").write_bytes(pickle.dumps(about))
    with pytest.raises(CheckpointError, match=r"expected the table of a torch\.distributed\.checkpoint") as caught:
        open_checkpoint(folder)
    assert said in str(caught.value)
    assert f"dcp_to_torch {folder} model.pt" in str(caught.value)


def test_pieces_that_are_something_else_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", state())
    with (folder / ".metadata").open("rb") as file:
        about = pickle.load(file)
    _other(about)
    (folder / ".metadata").write_bytes(pickle.dumps(about))
    with pytest.raises(CheckpointError, match=r"pieces as the table says, int32 \[3, 4\], found a piece of float32"):
        open_checkpoint(folder).tensor("0.weight")
    (folder / "__0_0.distcp").write_bytes(bytes((folder / "__0_0.distcp").stat().st_size))
    with pytest.raises(CheckpointError, match=r"a whole file of torch\.save"):
        open_checkpoint(folder).tensor("0.bias")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04.",
        b"\x80\x04K\x01K\x02.",
        b"\x80\x04h\x05.",
        b"\x80\x04t.",
        b"\x80\x04R.",
        b"\x80\x04\x8c\x01ab.",
    ],
)
def test_what_is_no_pickle_is_said_so(content: bytes) -> None:
    with pytest.raises(PickleError):
        pickled_values(content)


def test_values_are_described_and_not_made() -> None:
    made = pickled_values(pickle.dumps({"a": [1, None, True], "b": (torch.Size([2]), {"c": 1.5})}, protocol=4))
    assert isinstance(made, Pairs)
    assert made[0] == ("a", [1, None, True])
    size, inner = made[1][1]
    assert isinstance(size, Made)
    assert (size.name, size.arguments, inner) == ("torch.Size", ((2,),), [("c", 1.5)])
    for protocol in (2, 3, 4, 5):
        assert pickled_values(pickle.dumps(("x", b"y", 2**40, False), protocol=protocol)) is not None

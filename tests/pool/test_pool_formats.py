"""Every format gives back exactly what was saved, without copying it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_files import DTYPES, State, bits, state, write, write_shards
from torch import Tensor, nn

from stockpot.errors import CheckpointError
from stockpot.pool import TensorSpec, open_checkpoint

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> State:
    names = draw(st.lists(st.text("ab.1é ", min_size=1, max_size=6), min_size=1, max_size=5, unique=True))
    result = {}
    for name in names:
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        spec = TensorSpec(dtype, shape)
        content = draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
        if dtype == torch.bool:
            content = bytes(byte & 1 for byte in content)
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        result[f"x{name}"] = flat.reshape(shape).clone()
    return result


@settings(max_examples=40, deadline=None)
@given(states(), st.sampled_from([".safetensors", ".pt"]))
def test_bytes_dtypes_and_shapes_survive_the_round_trip(tensors: State, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write(Path(folder) / f"m{suffix}", tensors))
        assert set(checkpoint.specs) == set(tensors)
        for name, saved in tensors.items():
            assert checkpoint.specs[name] == TensorSpec(saved.dtype, tuple(saved.shape))
            read = checkpoint.tensor(name)
            assert (read.dtype, read.shape, bits(read)) == (saved.dtype, saved.shape, bits(saved))
        assert checkpoint.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_shards_are_one_checkpoint(tmp_path: Path, suffix: str) -> None:
    folder = write_shards(tmp_path / "hf", state(), suffix)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == ("safetensors-sharded" if suffix == ".safetensors" else "torch-sharded")
    assert {name: bits(checkpoint.tensor(name)) for name in checkpoint.specs} == {
        name: bits(tensor) for name, tensor in state().items()
    }
    assert len(checkpoint.files) == 4, "three shards and the index"


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "pytorch_model.bin",
        "diffusion_pytorch_model.safetensors",
        "open_clip.safetensors",
    ],
)
def test_a_directory_with_one_weights_file_is_a_checkpoint(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, state())
    write(tmp_path / "optimizer.pt", {"m": torch.ones(1)})
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.path == tmp_path
    assert checkpoint.files == (tmp_path / name,)
    assert set(checkpoint.specs) == set(state())


def test_the_order_of_names_does_not_depend_on_the_file(tmp_path: Path) -> None:
    tensors = {f"layers.{k}.w": torch.ones(k + 1) for k in (10, 2, 1)}
    for suffix in (".pt", ".safetensors"):
        checkpoint = open_checkpoint(write(tmp_path / f"m{suffix}", tensors))
        assert list(checkpoint.specs) == ["layers.1.w", "layers.2.w", "layers.10.w"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_reading_takes_no_anonymous_memory(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"m{suffix}", {f"t{k}": torch.full((2**20,), float(k)) for k in range(16)})
    before = _anonymous()
    checkpoint = open_checkpoint(path)
    tensors = [checkpoint.tensor(name) for name in checkpoint.specs]
    total = sum(float(tensor.sum()) for tensor in tensors)
    assert total == 2**20 * sum(range(16))
    assert _anonymous() - before < 8 * 2**20, "64 MB were read"


def _anonymous() -> int:
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("needs /proc")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_open_checkpoints_hold_no_file_handles(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"m{suffix}", state())
    before = len(list(Path("/dev/fd").iterdir()))
    opened = [open_checkpoint(path) for _ in range(80)]
    assert all(bits(checkpoint.tensor("steps")) == bits(torch.tensor(7)) for checkpoint in opened)
    assert len(list(Path("/dev/fd").iterdir())) < before + 10


def test_parameters_and_strided_views_are_read_as_plain_tensors(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    number = torch.complex(torch.ones(2), torch.ones(2))
    path = tmp_path / "m.pt"
    torch.save({"p": nn.Parameter(matrix), "t": matrix.t(), "c": number.conj()}, path)
    checkpoint = open_checkpoint(path)
    assert type(checkpoint.tensor("p")) is Tensor
    assert not checkpoint.tensor("p").requires_grad
    assert checkpoint.tensor("t").tolist() == matrix.t().tolist()
    assert checkpoint.tensor("c").tolist() == [1 - 1j, 1 - 1j]
    assert not checkpoint.tensor("c").is_conj()


def test_aliases_are_names_of_one_tensor_not_views_of_one_storage(tmp_path: Path) -> None:
    shared = torch.arange(4.0).reshape(2, 2)
    path = tmp_path / "m.pt"
    torch.save(
        {"a": shared, "b": shared, "top": shared[0], "turned": shared.t(), "copy": shared.clone()}, path
    )
    assert open_checkpoint(path).aliases == (("a", "b"),)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3).to_sparse(), "a sparse tensor (sparse_coo)"),
        (torch.ones(3, device="meta"), "a tensor without data (device meta)"),
        (torch.ones(1).expand(10**12), "with more data than the whole file"),
    ],
    ids=["sparse", "meta", "expanded"],
)
def test_tensors_that_cannot_be_averaged_are_refused(tmp_path: Path, value: Tensor, words: str) -> None:
    path = tmp_path / "m.pt"
    torch.save({"good": torch.ones(2), "odd": value}, path)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert words in str(caught.value)
    assert "m.pt, tensor 'odd': expected an ordinary dense tensor" in str(caught.value)


def test_nested_tensors_are_refused_before_they_are_built(tmp_path: Path) -> None:
    odd = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    torch.save({"odd": odd}, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match=r"the file asks for torch\.nested\."):
        open_checkpoint(tmp_path / "m.pt")


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*", "ignore:TypedStorage", "ignore:.*torch.ao.*")
def test_quantised_tensors_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)}, path)
    with pytest.raises(CheckpointError, match=r"a quantised tensor \(quint8\)"):
        open_checkpoint(path)


def test_an_unknown_ending_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.h5").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"ends in one of .safetensors, .pt.*found the ending '.h5'"):
        open_checkpoint(tmp_path / "m.h5")

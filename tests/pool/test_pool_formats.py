"""Every format gives back exactly what was saved, wherever in the file it was, without copying it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_files import DTYPES, State, bits, state, write, write_shards
from torch import Tensor, nn

from stockpot.errors import CheckpointError, PoolError
from stockpot.pool import Checkpoint, TensorSpec, open_checkpoint

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
    "name", ["model.safetensors", "pytorch_model.bin", "diffusion_pytorch_model.safetensors", "open_clip.safetensors"]
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
    torch.save({"a": shared, "b": shared, "top": shared[0], "turned": shared.t(), "copy": shared.clone()}, path)
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


# Where the weights are found in the files that trainers write.

RAW = {"w": torch.zeros(2)}
EMA = {"w": torch.ones(2)}


def opened(tmp_path: Path, saved: Any, **how: Any) -> Checkpoint:
    path = tmp_path / "m.ckpt"
    torch.save(saved, path)
    return open_checkpoint(path, **how)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", "weights", "net"])
def test_known_keys_are_found(tmp_path: Path, key: str) -> None:
    found = opened(tmp_path, {"epoch": 3, key: RAW, "optimizer": {"state": {0: {"m": torch.ones(9)}}}})
    assert (found.key, list(found.specs)) == (key, ["w"])


@pytest.mark.parametrize("ema", ["state_dict_ema", "model_ema", "ema_state_dict", "ema"])
def test_raw_weights_win_over_averaged_ones_unless_asked(tmp_path: Path, ema: str) -> None:
    saved = {ema: EMA, "state_dict": RAW}
    plain = opened(tmp_path, saved)
    assert (plain.key, plain.tensor("w").tolist()) == ("state_dict", [0, 0])
    average = opened(tmp_path, saved, key="ema")
    assert (average.key, average.tensor("w").tolist()) == (ema, [1, 1])
    alone = opened(tmp_path, {ema: EMA, "epoch": 1})
    assert alone.key == ema


def test_a_flat_state_dict_is_itself(tmp_path: Path) -> None:
    found = opened(tmp_path, {"model": torch.ones(1), "ema": torch.ones(2)})
    assert (found.key, list(found.specs)) == (None, ["ema", "model"])


def test_a_tensor_beside_the_weights_does_not_hide_them(tmp_path: Path) -> None:
    assert opened(tmp_path, {"best_score": torch.tensor(0.9), "model": RAW}).key == "model"


def test_the_users_path_wins(tmp_path: Path) -> None:
    saved = {"state_dict": RAW, "trainer": {"student": {"w": torch.full((2,), 5.0)}}, "a.b": {"c": EMA}}
    assert opened(tmp_path, saved, key="trainer.student").tensor("w").tolist() == [5, 5]
    assert opened(tmp_path, saved, key="a.b.c").tensor("w").tolist() == [1, 1]
    assert opened(tmp_path, saved).key == "state_dict"


def test_four_keys_deep_is_deeper_than_real_files_go(tmp_path: Path) -> None:
    three = {"model": {"module": {"state_dict": RAW}}}
    assert opened(tmp_path, three).key == "model.module.state_dict"
    with pytest.raises(CheckpointError):
        opened(tmp_path, {"net": three})


def test_nested_known_keys_give_a_dotted_path(tmp_path: Path) -> None:
    found = opened(tmp_path, {"model": {"state_dict": RAW, "ema": EMA}})
    assert found.key == "model.state_dict"


def test_entries_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    found = opened(tmp_path, {"state_dict": {"w": torch.ones(1), "epoch": 3, "note": None, 5: torch.ones(1)}})
    assert list(found.specs) == ["w"]
    assert found.ignored == ("epoch", "note", "5")


@pytest.mark.parametrize(
    ("saved", "key", "words"),
    [
        ({"state_dict": RAW}, "teacher", "weights under the key 'teacher', found nothing there"),
        ({"state_dict": RAW}, "teacher", "Fix: use one of the keys with weights: state_dict."),
        ({"state_dict": RAW, "epoch": 3}, "epoch", "an object of type int there"),
        ({"state_dict": RAW}, "ema", "weights under the key 'ema', found nothing there"),
        ({"student": RAW, "epoch": 3}, None, "Fix: name the place of the weights, for example key='student'."),
        ([torch.ones(2)], None, "an object of type list"),
        ({}, None, "an empty mapping"),
        ({5: torch.ones(1)}, None, "no tensors at all"),
    ],
)
def test_weights_that_are_not_there(tmp_path: Path, saved: Any, key: str | None, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, saved, key=key)
    assert words in str(caught.value)


def test_a_key_for_a_flat_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", state())
    with pytest.raises(CheckpointError, match=r"under the key 'ema', found a flat checkpoint \(safetensors\)"):
        open_checkpoint(path, key="ema")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_wrapper_prefixes_go_when_all_names_have_them(tmp_path: Path, prefix: str, suffix: str) -> None:
    path = write(tmp_path / f"m{suffix}", {prefix + name: tensor for name, tensor in state().items()})
    found = open_checkpoint(path)
    assert set(found.specs) == set(state())
    assert found.tensor("steps").item() == 7
    write(path, {prefix + "a": torch.ones(1), "b": torch.ones(1)})
    assert set(open_checkpoint(path).specs) == {prefix + "a", "b"}


def test_a_name_that_is_only_a_wrapper_keeps_it(tmp_path: Path) -> None:
    assert list(open_checkpoint(write(tmp_path / "m.pt", {"module.": torch.ones(1)})).specs) == ["module."]


def test_rename_by_the_longest_prefix_or_a_function(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", {f"module.{name}": torch.ones(1) for name in ("net.a", "net.x.b", "c")})
    by_map = open_checkpoint(path, rename={"net.": "", "net.x.": "deep."})
    assert list(by_map.specs) == ["a", "c", "deep.b"]
    by_function = open_checkpoint(path, rename=lambda name: name.upper())
    assert list(by_function.specs) == ["C", "NET.A", "NET.X.B"]


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"a.": "", "b.": ""}, "'a.w' and 'b.w' both become 'w'"),
        (lambda name: None, "a name for the tensor 'a.w' from rename, found None"),
        ({"a.w": ""}, "a name for the tensor 'a.w' from rename, found ''"),
    ],
)
def test_renaming_that_loses_names_is_refused(tmp_path: Path, rename: Any, words: str) -> None:
    path = write(tmp_path / "m.pt", {"a.w": torch.ones(1), "b.w": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, rename=rename)
    assert words in str(caught.value)


def test_rename_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"rename: expected a map of prefixes or a function, found 'model\.'"):
        open_checkpoint(tmp_path / "m.pt", rename="model.")  # type: ignore[arg-type]


def test_averaged_weights_are_known_anywhere_on_their_path(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"params_ema": {"model": {"w": torch.ones(1)}}}, path)
    assert open_checkpoint(path, key="ema").key == "params_ema.model"


def test_the_advice_names_a_place_with_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"epoch": {"number": 3}, "trainer": {"w": torch.ones(1)}}, path)
    with pytest.raises(CheckpointError, match="for example key='trainer'"):
        open_checkpoint(path)


def test_what_was_found_instead_is_outlined(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for saved, words in (
        ({"epoch": 3, 7: "x"}, "found a mapping with the keys epoch, 7"),
        ({}, "found an empty mapping"),
        ([1], "found an object of type list"),
    ):
        torch.save(saved, path)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)


def test_weights_beside_a_table_of_settings_are_found(tmp_path: Path) -> None:
    """A table under `params` took the place of the weights, which were passed over."""
    flat = {"w": torch.ones(30, 10), "b": torch.ones(10), "params": {"lr": torch.tensor([0.1]), "steps": torch.ones(3)}}
    found = opened(tmp_path, flat)
    assert (found.key, list(found.specs), found.ignored) == (None, ["b", "w"], ("params",))
    nested = opened(tmp_path, {"model": {"w": torch.ones(30, 10), "net": {"lr": torch.tensor([0.1])}}})
    assert (nested.key, list(nested.specs)) == ("model", ["w"])


def test_what_trainers_write_beside_the_weights_does_not_hide_them(tmp_path: Path) -> None:
    beside = {"rng": torch.get_rng_state(), "class_weights": torch.ones(3), "best": torch.tensor(0.9)}
    assert opened(tmp_path, {**beside, "state_dict": {"w": torch.ones(30, 10)}}).key == "state_dict"


def test_weights_in_two_places_are_not_guessed(tmp_path: Path) -> None:
    saved = {"w": torch.ones(2), "params": {"w": torch.zeros(2)}}
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, saved)
    assert "expected weights in one place, found tensors at the top and about as many numbers under 'params'" in str(
        caught.value
    )
    assert "key='params'" in str(caught.value)
    assert opened(tmp_path, saved, key="params").tensor("w").tolist() == [0, 0]


def test_a_name_that_no_soup_could_have_is_refused_unless_it_is_renamed(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", {"w": torch.ones(1), "__metadata__": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"names of tensors that a safetensors file can have .* '__metadata__'"):
        open_checkpoint(path)
    assert list(open_checkpoint(path, rename={"__metadata__": "meta"}).specs) == ["meta", "w"]


def test_wrappers_in_wrappers_without_end_take_no_time(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", {"module." * 50_000 + "w": torch.ones(1)})
    start = time.process_time()
    assert list(open_checkpoint(path).specs) == ["w"]
    assert time.process_time() - start < 2

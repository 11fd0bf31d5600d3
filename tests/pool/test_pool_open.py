"""Finding checkpoints, naming them, comparing them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import State, bits, state, write, write_shards

from stockpot.errors import ChangedError, CheckpointError, MismatchError, PoolError
from stockpot.events import Event
from stockpot.pool import Pool, TensorSpec, open_checkpoint
from stockpot.pool.discover import is_leftover, weights_of
from stockpot.pool.source import looks_like, stays_inside


def refusal(*sources: object, kind: type[PoolError] = PoolError, **how: object) -> str:
    with pytest.raises(PoolError) as caught:
        Pool.open(*sources, **how)  # type: ignore[arg-type]
    assert type(caught.value) is kind
    return str(caught.value)


def folder_of(tmp_path: Path, *suffixes: str) -> list[Path]:
    return [write(tmp_path / f"m_{k}{suffix}", state(k)) for k, suffix in enumerate(suffixes)]


def test_a_folder_in_natural_order_whatever_else_is_in_it(tmp_path: Path) -> None:
    for name in ("m_10.pt", "m_2.safetensors", "m_1.ckpt", "optimizer_adam.pt"):
        write(tmp_path / name, state())
    write_shards(tmp_path / "m_3", state())
    write(tmp_path / "deep" / "er" / "m_5.pt", state())
    for leftover in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin", ".hidden.pt"):
        write(tmp_path / leftover, {"x": torch.ones(1)})
    for note in ("notes.txt", "README.md", "results.json"):
        (tmp_path / note).write_text("{}")
    pool = Pool.open(tmp_path)
    assert pool.names == ("m_1", "m_2", "m_3", "m_10", "optimizer_adam")
    assert len(pool) == 5
    assert [checkpoint.format for checkpoint in pool.checkpoints] == [
        "torch",
        "safetensors",
        "safetensors-sharded",
        "torch",
        "torch",
    ]


def test_sources_keep_their_order_and_patterns_theirs(tmp_path: Path) -> None:
    for k in (1, 2, 10):
        write(tmp_path / f"a_{k}.pt", state(k))
    last = write(tmp_path / "b.pt", state())
    assert Pool.open(str(tmp_path / "a_*.pt"), last).names == ("a_1", "a_2", "a_10", "b")
    assert Pool.open([last, [tmp_path / "a_2.pt"]]).names == ("b", "a_2")


def test_a_pattern_ignores_what_is_no_checkpoint_and_a_literal_name_wins(tmp_path: Path) -> None:
    for name in ("m[1].pt", "m1.pt", "m2.pt"):
        write(tmp_path / name, state())
    (tmp_path / "m3.json").write_text("{}")
    assert Pool.open(str(tmp_path / "m*")).names == ("m1", "m2", "m[1]")
    assert Pool.open(str(tmp_path / "m[1].pt"), tmp_path / "m2.pt").names == ("m[1]", "m2")


def test_names_are_made_unique_by_their_parents(tmp_path: Path) -> None:
    paths = [
        write(tmp_path / "x" / "seed_1" / "model.pt", state()),
        write(tmp_path / "x" / "seed_2" / "model.pt", state()),
        write(tmp_path / "y" / "seed_2" / "model.pt", state()),
        write(tmp_path / "a.pt", state()),
        write(tmp_path / "a.safetensors", state()),
    ]
    names = Pool.open(paths).names
    assert names == ("seed_1/model", "x/seed_2/model", "y/seed_2/model", "a.pt", "a.safetensors")


def test_directories_keep_dots_in_their_names(tmp_path: Path) -> None:
    for rate in ("0.1", "0.2"):
        write(tmp_path / f"lr_{rate}" / "model.safetensors", state())
    assert Pool.open(tmp_path).names == ("lr_0.1", "lr_0.2")


def test_a_folder_of_checkpoints_one_of_which_is_called_model(tmp_path: Path) -> None:
    for name in ("model.safetensors", "other.safetensors"):
        write(tmp_path / name, state())
    assert Pool.open(tmp_path).names == ("model", "other")


def test_what_the_pool_says_of_itself(tmp_path: Path) -> None:
    pool = Pool.open(folder_of(tmp_path, ".pt", ".safetensors"), rename={"layer.": "l."})
    assert pool.specs == {
        "l.bias": TensorSpec(torch.float32, (4,)),
        "l.weight": TensorSpec(torch.float32, (4, 3)),
        "steps": TensorSpec(torch.int64, ()),
    }
    assert pool.nbytes == 4 * 4 + 12 * 4 + 8
    assert bits(pool.tensor(1, "l.weight")) == bits(state(1)["layer.weight"])
    assert pool.opened_with == {"key": None, "rename": {"layer.": "l."}, "mixed_dtypes": False}
    assert Pool.open(tmp_path, rename=str).opened_with["rename"] == "custom"


def test_opening_reads_no_tensor_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stockpot.pool import Checkpoint

    folder_of(tmp_path, ".pt", ".safetensors")
    monkeypatch.setattr(Checkpoint, "tensor", lambda *_: pytest.fail("read a tensor"))
    assert len(Pool.open(tmp_path)) == 2


def test_progress_counts_files(tmp_path: Path) -> None:
    events: list[Event] = []
    Pool.open(folder_of(tmp_path, ".pt", ".pt", ".pt"), listen=events.append)
    assert [event.data["done"] for event in events] == [0, 1, 2, 3]
    assert {(event.data["what"], event.data["total"], event.data["unit"]) for event in events} == {("open", 3, "files")}


def test_statistics_are_known_by_name(tmp_path: Path) -> None:
    names = ("bn.running_mean", "bn.running_var", "bn.num_batches_tracked", "running_mean", "my_running_mean", "w")
    for k in (1, 2):
        write(tmp_path / f"{k}.pt", {name: torch.ones(1) for name in names})
    assert Pool.open(tmp_path).statistics == {*names[:3], "running_mean"}


def test_subset_in_the_order_given(tmp_path: Path) -> None:
    pool = Pool.open(folder_of(tmp_path, ".pt", ".pt", ".pt"))
    part = pool.subset([2, 0])
    assert part.names == ("m_2", "m_0")
    assert bits(part.tensor(0, "layer.weight")) == bits(state(2)["layer.weight"])
    assert len(pool.subset([1])) == 1
    with pytest.raises(PoolError, match="at least one ingredient, found none"):
        pool.subset([])
    with pytest.raises(IndexError):
        pool.subset([3])


def test_no_sources_no_matches_one_ingredient(tmp_path: Path) -> None:
    assert "expected at least two ingredients, found no sources" in refusal()
    pattern = tmp_path / "*.pt"
    assert f"{pattern}: expected a pattern that matches checkpoints, found no files match" in refusal(pattern)
    (tmp_path / "a.json").write_text("{}")
    assert "found 1 matches, none of them a checkpoint" in refusal(str(tmp_path / "*"))
    assert "checkpoints in this folder" in refusal(tmp_path)
    assert "found none among its 1 entries" in refusal(tmp_path)
    assert f"or a pattern such as {tmp_path}/*/*" in refusal(tmp_path)
    only = write(tmp_path / "only.pt", state())
    assert f"expected at least two ingredients, found only one, {only}" in refusal(tmp_path)
    folder = write_shards(tmp_path / "run", state())
    assert "folders inside" not in refusal(folder)
    (folder / "checkpoint-3").mkdir()
    assert f"folders in this one are read where a pattern names them: {folder}/checkpoint-*" in refusal(folder)
    assert "expected paths, patterns and folders, found int '5'" in refusal(5, only)
    assert "expected each checkpoint once" in refusal(only, tmp_path / "*.pt")


def test_everything_wrong_is_in_one_message(tmp_path: Path) -> None:
    for k in range(4):
        write(tmp_path / f"good_{k}.pt", state(k))
    whole = (tmp_path / "good_0.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.safetensors").touch()
    other: State = {**state(), "new": torch.ones(1), "layer.weight": torch.ones(9, 3)}
    other["steps"] = torch.tensor(7.0)
    del other["layer.bias"]
    write(tmp_path / "other.safetensors", other)
    write(tmp_path / "half.pt", {name: t.half() if t.is_floating_point() else t for name, t in state().items()})
    write(tmp_path / "prefix.pt", {f"model.{name}": tensor for name, tensor in state().items()})
    text = refusal(tmp_path, tmp_path / "nothing_*.pt")
    assert text.startswith("9 checkpoints cannot be used as a pool (1 wrong sources, 2 unreadable, 3 different)\n")
    assert "nothing_*.pt: expected a pattern that matches checkpoints" in text
    assert "cut.pt: expected a whole file of torch.save, found a damaged or truncated archive" in text
    assert "empty.safetensors: expected a readable checkpoint file, found an empty file" in text
    reference = f"expected the tensors of {tmp_path / 'good_0.pt'} (4 of 7 have them), found "
    assert (
        f"other.safetensors: {reference}1 name missing: layer.bias; 1 name too many: new; "
        "1 other shape: layer.weight has [9, 3] instead of [4, 3]; "
        "1 other dtype: steps is float32 instead of int64.\n"
        "  Fix: leave this file out, or check that it is a fine-tuned version of the same model." in text
    )
    assert (
        f"half.pt: {reference}2 other dtypes: layer.bias is float16 instead of float32, "
        "layer.weight is float16 instead of float32.\n"
        "  Fix: convert the file, or allow it: mixed_dtypes=True, pool.mixed_dtypes in a recipe, --mixed-dtypes."
        in text
    )
    assert f"prefix.pt: {reference}3 names missing: layer.bias, layer.weight, steps; 3 names too many: " in text
    assert "Fix: the names differ by a prefix only: open the pool with rename={'model.': ''}." in text
    assert "good_1" not in text


def test_the_majority_is_the_reference_and_the_first_of_equals(tmp_path: Path) -> None:
    odd = write(tmp_path / "a.pt", {"w": torch.ones(3)})
    even = [write(tmp_path / f"b{k}.pt", {"w": torch.ones(2)}) for k in (1, 2)]
    text = refusal(odd, *even, kind=MismatchError)
    assert text.startswith(f"{odd}: expected the tensors of {even[0]} (2 of 3 have them)")
    text = refusal(even[1], odd, kind=MismatchError)
    assert text.startswith(f"{odd}: expected the tensors of {even[1]} (1 of 2 have them)")


def test_one_kind_of_problem_has_its_own_error(tmp_path: Path) -> None:
    good = folder_of(tmp_path, ".pt", ".pt")
    (tmp_path / "bad.pt").write_bytes(b"x")
    refusal(*good, tmp_path / "bad.pt", kind=CheckpointError)


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    full = {f"layer.{k}": torch.ones(1) for k in range(40)}
    for name in ("a.pt", "b.pt"):
        write(tmp_path / name, full)
    write(tmp_path / "c.pt", {"layer.0": torch.ones(1)})
    text = refusal(tmp_path, kind=MismatchError)
    assert "39 names missing: layer.1, layer.2, layer.3, layer.4, layer.5 and 34 more." in text


@pytest.mark.parametrize(
    ("prefixes", "suggestion"),
    [
        (("", "", "model."), {"model.": ""}),
        (("model.", "model.", ""), {"model.": ""}),
        (("a.", "a.", "b."), {"b.": "a."}),
        (("net.a.", "net.a.", "net.b."), {"net.b.": "net.a."}),
    ],
)
def test_the_suggested_rename_works(tmp_path: Path, prefixes: tuple[str, ...], suggestion: dict[str, str]) -> None:
    for k, prefix in enumerate(prefixes):
        write(tmp_path / f"{k}.pt", {prefix + name: tensor for name, tensor in state(k).items()})
    assert f"rename={suggestion}" in refusal(tmp_path, kind=MismatchError)
    assert len(Pool.open(tmp_path, rename=suggestion)) == len(prefixes)


def test_no_rename_is_suggested_where_none_helps(tmp_path: Path) -> None:
    write(tmp_path / "1.pt", {"a.w": torch.ones(1), "a.b": torch.ones(1)})
    write(tmp_path / "2.pt", {"c.w": torch.ones(1), "d.b": torch.ones(1)})
    assert "rename=" not in refusal(tmp_path, kind=MismatchError)


def test_mixed_dtypes_on_request(tmp_path: Path) -> None:
    dtypes = (torch.float16, torch.bfloat16, torch.float16)
    for k, dtype in enumerate(dtypes):
        write(tmp_path / f"{k}.pt", {"w": torch.tensor([0.1, k]).to(dtype), "n": torch.tensor(1)})
    refusal(tmp_path, kind=MismatchError)
    pool = Pool.open(tmp_path, mixed_dtypes=True)
    assert pool.specs["w"] == TensorSpec(torch.float32, (2,)), "the smallest that holds both"
    for k, dtype in enumerate(dtypes):
        assert pool.tensor(k, "w").dtype == torch.float32
        assert pool.tensor(k, "w").tolist() == torch.tensor([0.1, k]).to(dtype).tolist()
        assert pool.checkpoints[k].tensor("w").dtype == dtype


@pytest.mark.parametrize(
    ("pair", "together"),
    [
        ((torch.float8_e4m3fn, torch.float8_e5m2), torch.float32),
        ((torch.float8_e4m3fn, torch.float64), torch.float64),
        ((torch.float8_e4m3fn, torch.float16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_promotion(tmp_path: Path, pair: tuple[torch.dtype, ...], together: torch.dtype) -> None:
    for k, dtype in enumerate(pair):
        write(tmp_path / f"{k}.safetensors", {"w": torch.ones(2).to(dtype)})
    assert Pool.open(tmp_path, mixed_dtypes=True).specs["w"].dtype == together


def test_mixed_dtypes_do_not_excuse_integers(tmp_path: Path) -> None:
    for k, value in enumerate((torch.ones(2), torch.ones(2), torch.ones(2, dtype=torch.int32))):
        write(tmp_path / f"{k}.pt", {"w": value})
    text = refusal(tmp_path, kind=MismatchError, mixed_dtypes=True)
    assert (
        "w is int32 instead of float32.\n  Fix: convert the file to the dtypes of the others, or leave it out." in text
    )


# Which directories are checkpoints, and which file of them is opened: a table.


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("model.safetensors", "model.safetensors"),
        ("model.safetensors config.json", "model.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin"),
        ("pytorch_model.bin model.safetensors", "model.safetensors"),  # as the libraries themselves prefer
        ("model.safetensors.index.json", "model.safetensors.index.json"),
        ("model.safetensors.index.json a.safetensors b.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin.index.json a.bin", "pytorch_model.bin.index.json"),
        ("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors"),
        ("model.safetensors optimizer.pt scheduler.pt rng_state_0.pth training_args.bin", "model.safetensors"),
        ("model.safetensors other.safetensors", None),  # a folder of checkpoints
        ("model.safetensors other.safetensors config.json", "model.safetensors"),
        ("model.safetensors statistics.safetensors soup.json", "model.safetensors"),
        ("model.safetensors .hidden.pt", "model.safetensors"),
        ("model.safetensors notes.txt", "model.safetensors"),
        ("weights.safetensors config.json", "weights.safetensors"),
        ("weights.safetensors", None),
        ("a.safetensors b.safetensors config.json", None),
        ("a.bin config.json", None),
        ("config.json", None),
        ("soup.json a.safetensors", None),
        ("", None),
    ],
)
def test_the_file_with_the_weights(tmp_path: Path, names: str, found: str | None) -> None:
    for name in names.split():
        (tmp_path / name).touch()
    assert weights_of(tmp_path) == (None if found is None else tmp_path / found)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("optimizer.pt", True),
        ("rng_state_3.pth", True),
        ("training_args.bin", True),
        ("optimizer_adam.pt", False),
        ("my_optimizer.pt", False),
        ("model.pt", False),
    ],
)
def test_what_trainers_leave_beside_the_weights(name: str, answer: bool) -> None:
    assert is_leftover(Path(name)) is answer


def test_leftovers_and_hidden_files_are_no_ingredients(tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        write(tmp_path / name, state())
    for name in ("optimizer.pt", ".c.pt", "notes.txt"):
        (tmp_path / name).write_bytes(b"junk")
    assert Pool.open(tmp_path).names == ("a", "b")


def test_links_that_stay_and_links_that_leave(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "sub").mkdir(parents=True)
    for place in (home / "a", home / "sub" / "b", tmp_path / "c"):
        place.touch()
    (home / "to_a").symlink_to(home / "a")
    (home / "to_b").symlink_to(home / "sub" / "b")
    (home / "to_c").symlink_to(tmp_path / "c")
    (home / "circle").symlink_to(home / "circle")
    answers = {name: stays_inside(home, name) for name in ("a", "to_a", "to_b", "to_c", "circle", "none")}
    assert answers == {"a": True, "to_a": True, "to_b": False, "to_c": False, "circle": False, "none": True}


def test_links_to_blobs_are_followed_in_the_hugging_face_cache_only(tmp_path: Path) -> None:
    for folder in ("snapshots/r", "elsewhere/r", "blobs", "snapshots/blobs"):
        (tmp_path / folder).mkdir(parents=True)
    for blob in ("blobs/x", "snapshots/blobs/y"):
        (tmp_path / blob).touch()
    for folder in ("snapshots/r", "elsewhere/r"):
        (tmp_path / folder / "x").symlink_to(tmp_path / "blobs" / "x")
        (tmp_path / folder / "y").symlink_to(tmp_path / "snapshots" / "blobs" / "y")
    assert stays_inside(tmp_path / "snapshots" / "r", "x")
    assert not stays_inside(tmp_path / "snapshots" / "r", "y")
    assert not stays_inside(tmp_path / "elsewhere" / "r", "x")


@pytest.mark.parametrize("rename", [{"a": 1}, {1: "a"}, {"a": "b", "c": 1}, {"a": "b", 1: "c"}, 5, ["a"]])
def test_renaming_is_checked_before_anything_is_opened(tmp_path: Path, rename: Any) -> None:
    for door in (open_checkpoint, Pool.open):
        with pytest.raises(PoolError, match="rename: expected a map of prefixes or a function"):
            door(tmp_path / "none.pt", rename=rename)


def test_a_path_that_is_not_there_is_told_before_its_ending(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found nothing at this path"):
        open_checkpoint(tmp_path / "none.xyz")


def test_a_path_that_is_nearly_right_or_a_name_on_the_hub(tmp_path: Path) -> None:
    write(tmp_path / "llama-math.safetensors", state())
    with pytest.raises(PoolError, match=r"did you mean .*llama-math\.safetensors"):
        Pool.open(tmp_path / "lama-math.safetensors", tmp_path / "llama-math.safetensors")
    with pytest.raises(PoolError, match=r"a model of the Hub is hf://somebody/llama-1B\."):
        Pool.open("somebody/llama-1B", tmp_path / "llama-math.safetensors")


def test_tokens_that_one_model_has_more(tmp_path: Path) -> None:
    for rows in (4, 4, 6):
        tensors = {"embed.weight": torch.zeros(rows, 2), "up.weight": torch.zeros(2, 2)}
        write(tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors", tensors)
    with pytest.raises(PoolError, match="tokens were added to its vocabulary, bring all to the same one first"):
        Pool.open(tmp_path)


def test_one_path_twice_and_patterns_into_folders(tmp_path: Path) -> None:
    paths = [write(tmp_path / "deep" / "er" / f"{k}.pt", state(k)) for k in range(2)]
    with pytest.raises(PoolError, match="expected each checkpoint once"):
        Pool.open(paths[0], paths[0])
    assert len(Pool.open(str(tmp_path / "**" / "*.pt"))) == 2


def test_the_advice_for_dtypes_depends_on_all_of_them(tmp_path: Path) -> None:
    for k in range(2):
        write(tmp_path / f"{k}.pt", {"a": torch.ones(1), "b": torch.ones(1, dtype=torch.int64)})
    write(tmp_path / "2.pt", {"a": torch.ones(1).half(), "b": torch.ones(1, dtype=torch.int64)})
    with pytest.raises(MismatchError, match="or allow it: mixed_dtypes=True"):
        Pool.open(tmp_path)
    write(tmp_path / "2.pt", {"a": torch.ones(1).half(), "b": torch.ones(1, dtype=torch.int32)})
    with pytest.raises(MismatchError, match="convert the file to the dtypes of the others"):
        Pool.open(tmp_path)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"\x10" + bytes(7) + b'{"a"', "safetensors"),
        (b"\xff\xff\xff\xff\xff" + bytes(3) + b"{", "no known"),  # a header of a terabyte
        (bytes(8), "no known"),
        (b"\x10" + bytes(7), "no known"),
        (b"pk\x03\x04", "zip"),
        (b"\x80\x02", "pickle"),
        (b"\x1f\x8b", "gzip"),
        (b"GGUF", "GGUF"),
        (b"<HTML", "web page"),
        (b"", "no known"),
    ],
)
def test_what_the_first_bytes_suggest(tmp_path: Path, head: bytes, words: str) -> None:
    (tmp_path / "x").write_bytes(head)
    assert words in looks_like(tmp_path / "x")


def test_a_folder_that_cannot_be_looked_into_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stockpot.pool.discover.weights_of", refuse)
    monkeypatch.setattr("stockpot.pool.checkpoint.weights_of", refuse)
    with pytest.raises(PoolError, match="expected a folder to look into, found Permission denied"):
        Pool.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint directory, found Permission denied"):
        open_checkpoint(tmp_path)


# Checkpoints that agree in names and shapes and still cannot be mixed.


def quantised_states() -> dict[str, State]:
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    scale = torch.ones(4)
    return {
        "int8 with a scale": {"l.weight": (weight * 10).to(torch.int8), "l.weight_scale": scale, "l.bias": scale},
        "int8, scale": {"weight": (weight * 10).to(torch.int8), "scale": scale[:1]},
        "int8 and its own scale": {"fc1": (weight * 10).to(torch.int8), "fc1_scale": scale},
        "int8 under another name": {"l.kernel": (weight * 10).to(torch.int8), "l.scales": scale},
        "fp8 with a scale": {"l.weight": weight.to(torch.float8_e4m3fn), "l.weight_scale_inv": scale},
        "fp8, two scales": {"l.weight": weight.to(torch.float8_e5m2), "l.input_scale": scale, "l.weight_scale": scale},
        "MX": {"l.weight": weight.to(torch.float8_e4m3fn), "l.weight_scale": torch.ones(4).to(torch.float8_e8m0fnu)},
        "bitsandbytes int8": {"l.weight": (weight * 10).to(torch.int8), "l.SCB": scale},
        "bitsandbytes nf4": {
            "l.weight": torch.ones(16, 1, dtype=torch.uint8),
            "l.weight.absmax": scale,
            "l.weight.quant_map": scale,
        },
        "GPTQ": {
            "l.qweight": torch.ones(1, 4, dtype=torch.int32),
            "l.qzeros": torch.ones(1, 1, dtype=torch.int32),
            "l.scales": scale.half(),
            "l.g_idx": torch.arange(8, dtype=torch.int32),
        },
        "compressed-tensors": {"l.weight_packed": torch.ones(4, 1, dtype=torch.int32), "l.weight_scale": scale},
        "MXFP4": {
            "mlp.gate_up_proj_blocks": torch.ones(4, 2, dtype=torch.uint8),
            "mlp.gate_up_proj_scales": torch.ones(4, dtype=torch.uint8),
        },
        "quanto": {"l.weight._data": torch.ones(4, 8, dtype=torch.int8), "l.weight._scale": scale},
    }


@pytest.mark.parametrize("kind", list(quantised_states()))
def test_quantised_checkpoints_are_refused_by_the_names_of_their_tensors(tmp_path: Path, kind: str) -> None:
    tensors = quantised_states()[kind]
    for k in range(2):
        write(tmp_path / f"{k}.safetensors", {name: tensor.clone() for name, tensor in tensors.items()})
    text = refusal(tmp_path, kind=MismatchError)
    assert "0.safetensors: expected weights that can be averaged number by number, found quantised ones" in text
    assert f"{next(iter(tensors))} (" in text
    assert "dequantise them" in text
    assert "bias" not in text


@pytest.mark.parametrize(
    "tensors",
    [
        {"w": torch.ones(4).to(torch.float8_e4m3fn), "norm.scale": torch.ones(4)},
        {"norm.weight": torch.ones(4).to(torch.float8_e5m2), "norm.scale": torch.ones(4).to(torch.float8_e5m2)},
        {"attn.relative_position_index": torch.arange(4), "attn.logit_scale": torch.ones(1), "attn.w": torch.ones(2)},
        {"attn.bias": torch.ones(2, 2, dtype=torch.uint8), "attn.masked_bias": torch.tensor(-1e4)},
        {"text_projection": torch.ones(4).to(torch.float8_e4m3fn), "logit_scale": torch.ones(1)},
        {"mask": torch.ones(4, dtype=torch.bool), "scale": torch.ones(1)},
        {"embeddings.position_ids": torch.arange(9), "embeddings.weight": torch.ones(2)},
        {"bn.num_batches_tracked": torch.tensor(3), "bn.weight": torch.ones(2)},
    ],
)
def test_what_only_looks_quantised_is_opened(tmp_path: Path, tensors: State) -> None:
    for k in range(2):
        write(tmp_path / f"{k}.safetensors", tensors)
    assert len(Pool.open(tmp_path)) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_packed_parameters_of_torchs_own_quantisation_are_refused(tmp_path: Path) -> None:
    packed = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    for k in range(2):
        saved = {"fc.scale": torch.tensor(0.1 * (k + 1)), "fc._packed_params._packed_params": (packed, None)}
        torch.save(saved, tmp_path / f"{k}.pt")
    assert "fc._packed_params._packed_params" in refusal(tmp_path, kind=MismatchError)


def test_raw_weights_of_one_file_are_not_mixed_with_averaged_ones_of_another(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(2)}, "ema": {"w": torch.ones(2)}}, tmp_path / "both.pt")
    torch.save({"model_ema": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "average.pt")
    text = refusal(tmp_path, kind=MismatchError)
    assert "expected raw weights of every checkpoint, or averaged (EMA) ones of every" in text
    assert f"averaged ones in 1 of 2: {tmp_path / 'average.pt'} (model_ema)" in text
    assert "key='ema'" in text
    pool = Pool.open(tmp_path, key="ema")
    assert [pool.tensor(k, "w").tolist() for k in range(2)] == [[1, 1], [1, 1]]


def test_a_file_rewritten_in_place_with_its_time_restored_is_noticed(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{k}.safetensors", {"w": torch.full((4,), float(k))}) for k in range(2)]
    pool = Pool.open(paths)
    pool.verify_unchanged()
    before = paths[1].stat()
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    with paths[1].open("r+b") as file:
        file.write(content)
    os.utime(paths[1], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert paths[1].stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(ChangedError, match=r"1\.safetensors: written to, or given other permissions, links or times"):
        pool.verify_unchanged()
    pool.subset([0]).verify_unchanged()


def test_a_rename_is_looked_for_in_bearable_time(tmp_path: Path) -> None:
    """Trying every name against all others took time that grew with the square of their number."""
    first = {f"a.{k}.weight": torch.ones(1) for k in range(3000)}
    second = {f"b.{k}.x.weight": torch.ones(1) for k in range(3000)}
    write(tmp_path / "1.safetensors", first)
    write(tmp_path / "2.safetensors", second)
    start = time.process_time()
    assert "rename=" not in refusal(tmp_path, kind=MismatchError)
    assert time.process_time() - start < 5


def test_a_pattern_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`/**/*` meets folders too deep for glob."""

    def too_deep(pattern: str, recursive: bool) -> list[str]:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("glob.glob", too_deep)
    assert "expected a folder to look into, found maximum recursion depth" in refusal(tmp_path / "**", kind=PoolError)

"""Which directories are checkpoints, and which file of them is opened: a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import state, write

from stockpot import Pool
from stockpot.errors import CheckpointError, MismatchError, PoolError
from stockpot.pool import open_checkpoint
from stockpot.pool.discover import is_leftover, weights_of
from stockpot.pool.source import looks_like, stays_inside


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
        (
            "model.safetensors optimizer.pt scheduler.pt rng_state_0.pth training_args.bin",
            "model.safetensors",
        ),
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


def test_a_folder_that_cannot_be_looked_into_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("stockpot.pool.discover.weights_of", refuse)
    monkeypatch.setattr("stockpot.pool.checkpoint.weights_of", refuse)
    with pytest.raises(PoolError, match="expected a folder to look into, found Permission denied"):
        Pool.open(tmp_path)
    with pytest.raises(CheckpointError, match="expected a checkpoint directory, found Permission denied"):
        open_checkpoint(tmp_path)

"""Splits listed in files, and decoded images kept in files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stockpot.adapters import images
from stockpot.adapters.images import decode
from stockpot.adapters.models import ImageInput
from stockpot.adapters.splits import Share, cut, read_rows
from stockpot.adapters.tables import Table
from stockpot.errors import DataError, RecipeError
from stockpot.events import Event
from stockpot.recipe.load import make_recipe

PIL = pytest.importorskip("PIL.Image")
IMAGES = Table("/images", {"image": [f"/images/a/{n}.png" for n in range(6)], "label": ["a"] * 6})


@pytest.mark.parametrize(
    ("content", "name"),
    [
        (np.array([4, 1]), "numbers.npy"),
        (np.array([0, 1, 0, 0, 1, 0]), "mask.npy"),
        (np.array([0.0, 1, 0, 0, 1, 0]), "mask of the published soups.npy"),
        (np.array([False, True, False, False, True, False]), "bool.npy"),
        ("4\n\n1\n", "numbers.txt"),
        ("a/4.png\na/1.png\n", "names.txt"),
    ],
)
def test_every_form_of_list_names_the_same_samples(content: Any, name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    if isinstance(content, str):
        file.write_text(content)
    else:
        np.save(file, content)
    assert read_rows(file, IMAGES).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([1, 6]), "expected numbers from 0 to 5, found 1 to 6"),
        (np.array([-1, 2]), "found -1 to 2"),
        (np.array([1, 1]), "expected every sample once, found 1 listed again"),
        (np.array([True, False]), "expected a mask of 6 entries, one per sample, found 2"),
        (np.array([0.5, 1.0]), "expected one whole number per sample"),
        (np.zeros(6), "expected at least one sample, found none"),
        (np.array([object()]), "expected a .npy array of numbers or a text file"),
        ("a/9.png\n", "expected images of /images, such as a/0.png, found a/9.png, which are not there"),
        ("", "expected at least one sample, found none"),
    ],
)
def test_a_wrong_list_is_refused(content: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / ("rows.txt" if isinstance(content, str) else "rows.npy")
    if isinstance(content, str):
        file.write_text(content)
    else:
        np.save(file, content, allow_pickle=True)
    with pytest.raises(DataError) as caught:
        read_rows(file, IMAGES)
    assert message in str(caught.value)
    assert "image paths" in str(caught.value)


def test_a_list_that_is_not_there_or_names_what_has_no_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing there"):
        read_rows(tmp_path / "gone.npy", IMAGES)
    (tmp_path / "rows.txt").write_text("a/1.png\n")
    with pytest.raises(DataError, match="this part has no image files to name"):
        read_rows(tmp_path / "rows.txt", Table("x.csv", {"text": ["a", "b"]}))


def test_other_splits_share_what_a_list_leaves() -> None:
    listed = {"fit": np.array([0, 3, 9])}
    labels = np.arange(10) % 2
    shares = {"fit": Share(rows=Path("x")), "train": Share()}
    rows = cut(10, labels, shares, 0, "x", listed)
    assert rows["train"].tolist() == [1, 2, 4, 5, 6, 7, 8]
    halves = {"fit": Share(rows=Path("x")), "report": Share(None, 0.5), "train": Share(None, 0.5)}
    rows = cut(10, labels, halves, 0, "x", listed)
    assert sorted(np.concatenate(list(rows.values())).tolist()) == list(range(10))
    with pytest.raises(DataError, match=r"different samples in data.fit and data.report, found 1 listed for both"):
        cut(10, labels, shares, 0, "x", {"fit": np.array([1, 2]), "report": np.array([2, 3])})


def test_a_recipe_takes_a_list_beside_the_whole_rest_of_a_part() -> None:
    content: dict[str, Any] = {"pool": {"path": "p"}, "model": {"open_clip": "ViT-B-32", "classes": 3}}
    content["data"] = {"images": "i", "train": "train", "fit": {"of": "train", "rows": "held.npy"}, "report": "val"}
    assert make_recipe(content, ".").data.fit is not None
    content["data"]["fit"] = {"of": "train", "rows": "held.npy", "fraction": 0.5}
    with pytest.raises(RecipeError, match="expected one of fraction, count and rows, found fraction and rows"):
        make_recipe(content, ".")


# Decoded images in files ---------------------------------------------------------------------------------

SMALL = ImageInput(size=(4, 4), interpolation="bicubic")


def pictures(folder: Path, count: int = 70) -> list[str]:
    generator = np.random.RandomState(0)
    for n in range(count):
        PIL.fromarray(generator.randint(0, 256, (9, 7, 3), np.uint8)).save(folder / f"{n}.bmp")
    return [f"{n}.bmp" for n in range(count)]


def test_images_from_a_cache_are_those_in_memory_and_are_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, cache = pictures(tmp_path), tmp_path / "cache"
    told: list[Event] = []
    expected = decode(files, SMALL, folder=tmp_path, listen=told.append)
    assert [event.data["done"] for event in told] == [32, 64, 70]
    first = decode(files, SMALL, folder=tmp_path, memory_limit=0, cache=cache)  # the limit is for memory
    assert torch.equal(first, expected)
    made = list(cache.iterdir())
    assert [file.stat().st_size for file in made] == [expected.numel()]  # and no temporary file is left
    first[0] = 0  # a private copy
    monkeypatch.setattr(images, "_fill", None)
    assert torch.equal(decode(files, SMALL, folder=tmp_path, memory_limit=0, cache=cache), expected)


@pytest.mark.parametrize("change", ["content", "size", "other images"])
def test_a_cache_is_not_used_for_other_images(change: str, tmp_path: Path) -> None:
    files, cache = pictures(tmp_path, 3), tmp_path / "cache"
    decode(files, SMALL, folder=tmp_path, memory_limit=0, cache=cache)
    wanted = SMALL
    if change == "content":
        PIL.new("RGB", (7, 9)).save(tmp_path / "1.bmp")  # as many bytes as before
        os.utime(tmp_path / "1.bmp", ns=(1, 1))
    elif change == "size":
        wanted = ImageInput(size=(4, 4), interpolation="nearest")
    else:
        files = ["1.bmp", "0.bmp", "2.bmp"]
    again = decode(files, wanted, folder=tmp_path, memory_limit=0, cache=cache)
    assert torch.equal(again, decode(files, wanted, folder=tmp_path))
    assert len(list(cache.iterdir())) == 2


def test_a_cache_takes_arrays_and_encoded_images(tmp_path: Path) -> None:
    files, cache = pictures(tmp_path, 2), tmp_path / "cache"
    encoded = [{"bytes": (tmp_path / file).read_bytes(), "path": None} for file in files]
    assert torch.equal(decode(encoded, SMALL, memory_limit=0, cache=cache), decode(files, SMALL, folder=tmp_path))
    arrays = np.stack([np.moveaxis(np.asarray(PIL.open(tmp_path / file)), 2, 0) for file in files])
    assert torch.equal(decode(arrays, SMALL, memory_limit=0, cache=cache), decode(arrays, SMALL, folder=tmp_path))


def test_a_failed_decoding_leaves_no_file_and_stops_soon(tmp_path: Path) -> None:
    files, cache = pictures(tmp_path, 40), tmp_path / "cache"
    (tmp_path / "3.bmp").write_bytes(b"no image")
    with pytest.raises(DataError, match="expected a readable image"):
        decode(files, SMALL, folder=tmp_path, memory_limit=0, cache=cache)
    assert list(cache.iterdir()) == []


def test_a_full_disk_is_noticed_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        free = 10

    monkeypatch.setattr("stockpot.adapters.images.shutil.disk_usage", lambda _: Full)
    with pytest.raises(DataError, match="48 bytes for decoded images, found 10 bytes free"):
        decode(pictures(tmp_path, 1), SMALL, folder=tmp_path, cache=tmp_path / "cache")

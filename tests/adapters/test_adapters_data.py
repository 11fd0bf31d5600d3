"""Laws of splits, and images as the model wants them."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stockpot.adapters.images import decode, prepare
from stockpot.adapters.models import ImageInput, Normalise
from stockpot.adapters.splits import Share, cut, stratified_order
from stockpot.adapters.tables import Limits
from stockpot.errors import DataError

PIL = pytest.importorskip("PIL.Image")


@settings(deadline=None, max_examples=60)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    fit=st.floats(0.1, 0.5),
    report=st.floats(0.1, 0.5),
    seed=st.integers(0, 2**31),
)
def test_splits_are_disjoint_repeatable_and_stratified(counts: list[int], fit: float, report: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    size = len(labels)
    if size * min(fit, report) < 2:
        return
    shares = {"fit": Share(None, fit), "report": Share(None, report)}
    rows = cut(size, labels, shares, seed, "x")
    again = cut(size, labels, shares, seed, "x")
    assert not set(rows["fit"]) & set(rows["report"])
    for name, fraction in (("fit", fit), ("report", report)):
        np.testing.assert_array_equal(rows[name], again[name])
        assert abs(len(rows[name]) - fraction * size) <= 1
        got = np.bincount(labels[rows[name]], minlength=len(counts))
        assert np.all(np.abs(got - fraction * np.array(counts)) <= 2)


def test_more_fitting_data_never_changes_the_report() -> None:
    labels = np.arange(100) % 3
    small = cut(100, labels, {"fit": Share(None, 0.2), "report": Share(None, 0.3)}, 1, "x")
    large = cut(100, labels, {"fit": Share(None, 0.6), "report": Share(None, 0.3)}, 1, "x")
    np.testing.assert_array_equal(small["report"], large["report"])
    assert not np.array_equal(small["report"], cut(100, labels, {"report": Share(None, 0.3)}, 2, "x")["report"])


def test_halves_of_an_odd_number_make_the_whole() -> None:
    rows = cut(7, None, {"fit": Share(None, 0.5), "report": Share(None, 0.5)}, 0, "x")
    assert sorted([*rows["fit"], *rows["report"]]) == list(range(7))


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(DataError, match="expected at most its 10 samples, found fit: 8, report: 5"):
        cut(10, None, {"fit": Share(None, None, 8), "report": Share(None, None, 5)}, 0, "x")
    with pytest.raises(DataError, match=r"data.fit: expected at least one sample, found none: x has 3"):
        cut(3, None, {"fit": Share(None, 0.1)}, 0, "x")


def test_the_order_is_pinned() -> None:
    """Other releases of numpy must give the same split, or report data would leak into fitting data."""
    assert stratified_order(8, np.array([0, 0, 0, 0, 1, 1, 1, 1]), 0).tolist() == PINNED


PINNED = [6, 2, 1, 7, 3, 5, 0, 4]


def picture(height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.RandomState(0).randint(0, 256, (3, height, width)).astype(np.uint8)


def test_the_shorter_side_is_resized_then_the_centre_cropped() -> None:
    image = picture(20, 30)
    wanted = ImageInput(size=(8, 8), resize=10, interpolation="bicubic", channels=3)
    resized = PIL.fromarray(image.transpose(1, 2, 0)).resize((15, 10), PIL.Resampling.BICUBIC)
    expected = np.asarray(resized).transpose(2, 0, 1)[:, 1:9, 4:12]  # left: round(3.5) = 4
    np.testing.assert_array_equal(prepare(image, wanted, Path()), expected)


def test_without_resize_an_image_is_squeezed() -> None:
    image = picture(20, 30)
    got = prepare(image, ImageInput(size=(5, 6), channels=1), Path())
    assert got.shape == (1, 5, 6)


def test_image_arrays_of_the_right_size_are_not_touched() -> None:
    images = np.stack([picture(6, 6), picture(6, 6)])
    first = decode(images, ImageInput(size=(6, 6)))
    last = decode(images.transpose(0, 2, 3, 1), ImageInput(size=(6, 6)))
    np.testing.assert_array_equal(first, images)
    np.testing.assert_array_equal(last, images)
    grey = decode(images[:, 0], ImageInput(size=(6, 6), channels=3))
    np.testing.assert_array_equal(grey, np.repeat(images[:, :1], 3, axis=1))


def test_images_that_do_not_fit_are_refused_early(tmp_path: Path) -> None:
    files = []
    for number, size in enumerate((8, 8, 9)):
        files.append(tmp_path / f"{number}.png")
        PIL.new("RGB", (size, size)).save(files[-1])
    with pytest.raises(DataError, match="3 images of 192 bytes, 576 in all"):
        decode(files, ImageInput(size=(8, 8)), memory_limit=500)
    with pytest.raises(DataError, match=r"image 2: expected shape \(3, 8, 8\) as the first image"):
        decode(files, ImageInput())
    files[1].write_bytes(b"no image")
    with pytest.raises(DataError, match="expected a readable image"):
        decode(files, ImageInput(size=(8, 8)))
    with pytest.raises(DataError, match=r"image gone\.png: expected a file, found nothing there"):
        decode(["gone.png"], ImageInput(size=(8, 8)), folder=tmp_path)


def test_pixels_of_sixteen_bits_keep_their_upper_byte(tmp_path: Path) -> None:
    """The library's own conversion would turn everything above 255 white."""
    values = (np.arange(64).reshape(8, 8) * 1000).astype(np.uint16)
    for name in ("grey.png", "grey.tif"):
        PIL.fromarray(values).save(tmp_path / name)
        got = decode([tmp_path / name], ImageInput(channels=1))
        np.testing.assert_array_equal(got[0, 0], values // 256)
    colour = decode([tmp_path / "grey.png"], ImageInput(channels=3))
    np.testing.assert_array_equal(colour[0], np.stack([values // 256] * 3))


@pytest.mark.parametrize(("dtype", "said"), [(np.float32, "floating-point"), (np.int32, "32-bit whole")])
def test_pixels_without_a_known_range_are_refused(dtype: type, said: str, tmp_path: Path) -> None:
    PIL.fromarray(np.linspace(0, 1, 16).reshape(4, 4).astype(dtype)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=f"expected pixels of 8 or 16 bits, found {said}"):
        decode([tmp_path / "a.tif"], ImageInput(size=(4, 4)))


def test_an_image_has_a_limit_as_it_is_stored_and_as_it_is_resized(tmp_path: Path) -> None:
    PIL.new("L", (1, 8000)).save(tmp_path / "thin.png")  # 85 bytes that became 2.3 GB
    wanted = ImageInput(size=(224, 224), resize=224, channels=3)
    with pytest.raises(DataError, match="its shorter side resized to 224: expected at most 67,108,864 pixels"):
        decode([tmp_path / "thin.png"], wanted)
    PIL.new("L", (50, 50)).save(tmp_path / "small.png")
    with pytest.raises(DataError, match=r"expected at most 100 pixels, found 50 x 50.\n.*data.limits.pixels"):
        decode([tmp_path / "small.png"], ImageInput(size=(4, 4)), limits=Limits(pixels=100))


def test_normalising_is_a_hook_that_changes_no_names() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).double()
    names = list(model.state_dict())
    ImageInput(mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0)).attach(model)
    images = torch.randint(0, 256, (2, 3, 2, 2), dtype=torch.uint8)
    scaled = (images / 255 - torch.tensor([0.5, 0.25, 0.0]).view(1, 3, 1, 1)) / torch.tensor([0.5, 1.0, 2.0]).view(
        1, 3, 1, 1
    )
    torch.testing.assert_close(model(images), model(scaled.double()), rtol=1e-6, atol=1e-6)
    assert list(model.state_dict()) == names


def test_normalising_leaves_everything_else_alone() -> None:
    hook = Normalise((0.5,), (0.5,))
    model = nn.Linear(1, 1)
    labels, floats = torch.zeros(3, dtype=torch.uint8), torch.ones(1, 3, 2, 2)
    args, kwargs = hook(model, (floats,), {"labels": labels, "flag": True})
    assert args[0] is floats
    assert kwargs["labels"] is labels
    assert kwargs["flag"] is True


def test_normalising_moves_its_numbers_once_and_travels_without_them() -> None:
    hook = Normalise((0.5,), (0.5,))
    image = torch.zeros(1, 1, 2, 2, dtype=torch.uint8)
    first = hook(nn.Linear(1, 1), (image,), {})[0][0]
    moved = hook._there[image.device]
    again = hook(nn.Linear(1, 1), (image,), {})[0][0]
    assert hook._there[image.device] is moved
    assert torch.equal(first, again)
    other = copy.deepcopy(hook)
    assert other._there == {}
    assert torch.equal(other(nn.Linear(1, 1), (image,), {})[0][0], first)

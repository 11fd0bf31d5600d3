"""Images to uint8 (n, C, H, W): decoded once, resized and cropped as the model wants."""

from __future__ import annotations

import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.data.columns import Column
from stockpot.adapters.data.decoded import digest, kept
from stockpot.adapters.extras import need
from stockpot.adapters.inputs import ImageInput
from stockpot.errors import DataError, describe
from stockpot.events import Listener, ignore, progress
from stockpot.small_files import read_bytes

# By content, whatever the name says. Not EPS among others, which would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MOST = 2**28  # bytes of one encoded image
_MODES = {1: "L", 3: "RGB"}
_AT_ONCE = 32  # images a thread decodes before it tells


def decode(
    column: Column,
    wanted: ImageInput,
    folder: Path,
    limit: int,
    name: str,
    listen: Listener = ignore,
    cache: Path | None = None,
) -> Tensor:
    """uint8 images, or float32 ones where the column already holds floating-point images."""
    if isinstance(column, np.ndarray):
        images = _channels_first(column, name)
        fits = wanted.size is None or images.shape[2:] == wanted.size
        if images.dtype.kind == "f":
            if not fits:
                raise DataError(
                    describe(
                        f"images of the {name} data",
                        expected=f"size {_size(wanted.size)} for floating-point images",
                        found=_size(images.shape[2:]),
                        fix="store uint8 images, which are resized, or set data.preprocessing.size",
                    )
                )
            return torch.from_numpy(images.astype(np.float32))
        if images.dtype != np.uint8:
            raise DataError(
                describe(
                    f"images of the {name} data",
                    expected="uint8 or floating-point pixels",
                    found=str(images.dtype),
                    fix="convert them",
                )
            )
        images = _with_channels(images, wanted.channels)
        if fits:
            return torch.from_numpy(np.ascontiguousarray(images))
        items: Any = images
    else:
        items = column
    need("PIL")
    first = prepare(items[0], wanted, folder)  # (C, H, W)
    shape = (len(items), *first.shape)

    def fill(images: np.ndarray[Any, Any]) -> None:
        _fill(images, items, wanted, folder, name, listen)

    if cache is not None:
        how = f"{wanted.size} {wanted.resize} {wanted.interpolation} {wanted.channels}"
        return kept(cache, f"{name}-{digest(items, folder, how)[:16]}", shape, fill)
    _check_limit(first.nbytes, len(items), limit, name)
    images = np.empty(shape, np.uint8)
    fill(images)
    return torch.from_numpy(images)  # the same memory


def _check_limit(nbytes: int, count: int, limit: int, name: str) -> None:
    needed = nbytes * count
    if needed > limit:
        raise DataError(
            describe(
                f"{name} data",
                expected=f"images within data.memory_limit ({limit:,} bytes)",
                found=f"{count:,} images of {nbytes:,} bytes, {needed:,} in all",
                fix="raise data.memory_limit, take fewer samples, or name a folder on a large disk in data.cache",
            )
        )


def _fill(
    images: np.ndarray[Any, Any], items: Any, wanted: ImageInput, folder: Path, name: str, listen: Listener
) -> None:
    """All images into `images`, on every core: image libraries let go of the interpreter while they decode."""

    def some(start: int) -> int:
        stop = min(start + _AT_ONCE, len(items))
        for row in range(start, stop):
            image = prepare(items[row], wanted, folder)
            if image.shape != images.shape[1:]:
                raise DataError(
                    describe(
                        f"{name} data, image {row}",
                        expected=f"shape {images.shape[1:]} as the first image",
                        found=str(image.shape),
                        fix="set data.preprocessing.size, so that all images are resized",
                    )
                )
            images[row] = image
        return stop

    workers = ThreadPoolExecutor(os.cpu_count())
    try:
        for done in workers.map(some, range(0, len(items), _AT_ONCE)):
            progress(listen, f"decoding {name} images", done, len(items), unit="images")
    finally:
        workers.shutdown(cancel_futures=True)  # after a bad image the rest need not be looked at


def prepare(item: Any, wanted: ImageInput, folder: Path) -> np.ndarray[Any, Any]:
    """One image as uint8 (C, H, W)."""
    pil: Any = need("PIL.Image")
    picture = _open(item, folder, pil)
    if wanted.channels is not None:
        picture = picture.convert(_MODES[wanted.channels])
    elif picture.mode not in _MODES.values():
        picture = picture.convert("RGB")
    if wanted.size is not None:
        picture = _fit(picture, wanted, getattr(pil.Resampling, wanted.interpolation.upper()))
    pixels = np.asarray(picture, dtype=np.uint8)
    return np.expand_dims(pixels, 0) if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def _fit(picture: Any, wanted: ImageInput, how: Any) -> Any:
    assert wanted.size is not None
    height, width = wanted.size
    if wanted.resize is None:
        return picture if picture.size == (width, height) else picture.resize((width, height), how)
    across, down = picture.size
    short = min(across, down)
    scaled = (int(wanted.resize * across / short), int(wanted.resize * down / short))
    if scaled != picture.size:
        picture = picture.resize(scaled, how)
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return picture.crop((left, top, left + width, top + height))  # outside the image: black


def _open(item: Any, folder: Path, pil: Any) -> Any:
    if isinstance(item, np.ndarray):  # (C, H, W)
        return pil.fromarray(item[0] if len(item) == 1 else np.ascontiguousarray(item.transpose(1, 2, 0)))
    source: Any = item
    if isinstance(item, dict):  # an image of a Hugging Face dataset
        source = item.get("bytes") or item.get("path")
    try:
        encoded = source if isinstance(source, bytes) else read_bytes(folder / source, _MOST)
        with pil.open(io.BytesIO(encoded), formats=_FORMATS) as picture:
            picture.load()
            return picture
    except FileNotFoundError as error:
        raise DataError(
            describe(
                f"image {source}",
                expected="a file",
                found="nothing there",
                fix="paths of images are relative to the table they are in",
            )
        ) from error
    except Exception as error:  # damaged images raise almost anything
        what = "an encoded image" if isinstance(source, bytes) else f"image {source}"
        raise DataError(
            describe(what, expected="a readable image", found=str(error), fix="remove or replace it")
        ) from error


def _channels_first(array: np.ndarray[Any, Any], name: str) -> np.ndarray[Any, Any]:
    if array.ndim == 3:
        return np.expand_dims(array, 1)
    if array.ndim == 4 and array.shape[1] in (1, 3):
        return array
    if array.ndim == 4 and array.shape[3] in (1, 3):
        return np.moveaxis(array, 3, 1)
    raise DataError(
        describe(
            f"images of the {name} data",
            expected="shape (n, H, W), (n, C, H, W) or (n, H, W, C) with 1 or 3 channels",
            found=str(array.shape),
            fix="name them as data.features if they are no images",
        )
    )


def _with_channels(images: np.ndarray[Any, Any], channels: int | None) -> np.ndarray[Any, Any]:
    have = images.shape[1]
    if channels is None or channels == have:
        return images
    if have == 1:
        return np.repeat(images, channels, axis=1)
    # The weights of the ITU-R 601 grey that image libraries use.
    grey = images.transpose(0, 2, 3, 1) @ np.array([0.299, 0.587, 0.114], np.float32)
    rounded: np.ndarray[Any, Any] = np.round(grey)[:, None].astype(np.uint8)
    return rounded


def _size(shape: tuple[int, ...] | None) -> str:
    return "x".join(str(n) for n in shape or ())

"""Images to uint8 (n, C, H, W): found in folders, decoded once, resized and cropped as the model wants.

Pixels may be kept in a file instead of memory: there may be more than memory holds, and later commands find them.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.code import need
from stockpot.adapters.models import ImageInput
from stockpot.adapters.tables import LIMITS, Array, Column, Limits, Table, bad_data, first_line, not_there
from stockpot.errors import DataError
from stockpot.events import Listener, ignore, progress
from stockpot.files import check_inside, read_bytes, sync_directory

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}
# By content, whatever the name says. Not EPS among others, which would start another program.
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_ENCODED = 2**28  # Bytes of one encoded image.
_MODES = {1: "L", 3: "RGB"}
_AT_ONCE = 32  # Images a thread decodes before it tells.


def read_image_folder(path: Path, part: str | None, limits: Limits = LIMITS) -> Table:
    """One sub-folder of images per class."""
    folder = (path if part is None else path / part).absolute()
    if not folder.is_dir():
        raise not_there(folder, "a folder with one sub-folder of images per class")
    images: list[str] = []  # not Path: there may be millions
    labels: list[str] = []
    for group in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        found = [
            f"{place}{os.sep}{name}"
            for place, _, names in os.walk(group)
            for name in names
            if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")  # noqa: PTH122
        ]
        images += sorted(found, key=lambda path: path.split(os.sep))  # noqa: PTH206
        labels += [group.name] * len(found)
        limits.check_rows(folder, len(images))
    if not images:
        fix = f"put images ({', '.join(sorted(SUFFIXES))}) into folders named after their class"
        raise bad_data(folder, "one sub-folder of images per class", "no images in sub-folders", fix)
    return Table(str(folder), {"image": images, "label": labels})


def decode(
    column: Column,
    wanted: ImageInput,
    *,
    folder: Path = Path(),
    name: str = "fit",
    memory_limit: int = 8 * 2**30,
    cache: Path | None = None,
    limits: Limits = LIMITS,
    listen: Listener = ignore,
) -> Tensor:
    """uint8 images, or float32 ones where the column already holds floating-point images."""
    items: Any = column
    if isinstance(column, np.ndarray):
        items = _image_array(column, wanted, name)
        if wanted.size is None or items.shape[2:] == wanted.size:
            return torch.from_numpy(np.ascontiguousarray(items))
    need("PIL")
    first = prepare(items[0], wanted, folder, limits)  # (C, H, W)
    shape, needed = (len(items), *first.shape), first.nbytes * len(items)

    def image(row: int) -> Array:
        return prepare(items[row], wanted, folder, limits)

    if cache is not None:
        file = check_inside(cache, cache / f"{name}-{_digest(items, folder, wanted)[:16]}.u8")
        if not file.is_file() or file.stat().st_size != needed:
            with _new_file(file, needed) as place:
                mapped = np.memmap(place, np.uint8, "r+", shape=shape)
                _fill(mapped, image, name, listen)
                mapped.flush()  # msync: on the disk before it gets its name
                del mapped
        # Private: nothing that is done to the tensor reaches the file.
        return torch.from_file(str(file), shared=False, size=needed, dtype=torch.uint8).view(shape)
    if needed > memory_limit:
        found = f"{len(items):,} images of {first.nbytes:,} bytes, {needed:,} in all"
        fix = "raise data.memory_limit, take fewer samples, or name a folder on a large disk in data.cache"
        raise bad_data(f"{name} data", f"images within data.memory_limit ({memory_limit:,} bytes)", found, fix)
    images = np.empty(shape, np.uint8)
    _fill(images, image, name, listen)
    return torch.from_numpy(images)  # the same memory


def _fill(images: Array, image: Callable[[int], Array], name: str, listen: Listener) -> None:
    """All images into `images`, on every core: image libraries let go of the interpreter while they decode."""

    def some(start: int) -> int:
        stop = min(start + _AT_ONCE, len(images))
        for row in range(start, stop):
            made = image(row)
            if made.shape != images.shape[1:]:
                expected = f"shape {images.shape[1:]} as the first image"
                fix = "set data.preprocessing.size, so that all images are resized"
                raise bad_data(f"{name} data, image {row}", expected, str(made.shape), fix)
            images[row] = made
        return stop

    workers = ThreadPoolExecutor(os.cpu_count())
    try:
        for done in workers.map(some, range(0, len(images), _AT_ONCE)):
            progress(listen, f"decoding {name} images", done, len(images), unit="images")
    finally:
        workers.shutdown(cancel_futures=True)  # after a bad image the rest need not be looked at


class _Room:
    """How many pixels are being decoded at once by all threads: together not more than one image may have."""

    def __init__(self) -> None:
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int, limits: Limits) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + pixels <= limits.pixels)
            self._used += pixels
        try:
            yield
        finally:
            with self._changed:
                self._used -= pixels
                self._changed.notify_all()


_ROOM = _Room()


def prepare(item: Any, wanted: ImageInput, folder: Path, limits: Limits = LIMITS) -> Array:
    """One image as uint8 (C, H, W)."""
    pil, source = need("PIL.Image"), _source(item)
    what = "an encoded image" if isinstance(source, (bytes, np.ndarray)) else f"image {str(source)[:200]}"
    if not isinstance(source, (bytes, str, Path, np.ndarray)):
        found = "nothing" if source is None else type(source).__name__
        raise bad_data(what, "a path or an encoded image", found, "remove the row, or name another column")
    with ExitStack() as room:
        if isinstance(source, np.ndarray):  # (C, H, W)
            picture = pil.fromarray(source[0] if len(source) == 1 else np.ascontiguousarray(source.transpose(1, 2, 0)))
        else:
            picture = _opened(source, what, folder, limits, pil, room)
        if wanted.channels is not None or picture.mode not in _MODES.values():
            picture = picture.convert(_MODES[wanted.channels or 3])
        if wanted.size is not None:
            picture = _fit(picture, wanted, getattr(pil.Resampling, wanted.interpolation.upper()), what, limits)
        pixels = np.asarray(picture, dtype=np.uint8)
        return np.expand_dims(pixels, 0) if pixels.ndim == 2 else np.moveaxis(pixels, 2, 0)


def _source(item: Any) -> Any:
    """An array, encoded bytes or a path; images of a Hugging Face dataset hold one of the latter."""
    return (item.get("bytes") or item.get("path")) if isinstance(item, dict) else item


def _opened(source: Any, what: str, folder: Path, limits: Limits, pil: Any, room: ExitStack) -> Any:
    if limits.pixels > Limits.pixels and pil.MAX_IMAGE_PIXELS is not None:  # the library has a limit of its own
        pil.MAX_IMAGE_PIXELS = max(pil.MAX_IMAGE_PIXELS, limits.pixels)
    try:
        encoded = source if isinstance(source, bytes) else read_bytes(folder / source, _ENCODED, follow=True)
        with pil.open(io.BytesIO(encoded), formats=_FORMATS) as picture:
            _check_pixels(picture.size, what, limits)
            room.enter_context(_ROOM.taken(picture.size[0] * picture.size[1], limits))
            picture.load()
    except DataError:
        raise
    except FileNotFoundError as error:
        fix = "paths of images are relative to the table they are in"
        raise bad_data(what, "a file", "nothing there", fix) from error
    except Exception as error:  # damaged images raise almost anything
        unknown = type(error).__name__ == "UnidentifiedImageError"
        found = "no image in a format that is read" if unknown else first_line(error)
        raise bad_data(what, "a readable image", found, "remove or replace it") from error
    # Pixels of 16 bits keep their upper byte; the library would cut them off at 255, and floats at 0 and 255.
    if picture.mode.startswith("I;16") or (picture.mode == "I" and picture.format in ("PNG", "PPM")):
        pixels = np.asarray(picture)  # no wider type: there may be as many of them as the limit allows
        return pil.fromarray((pixels.clip(0, 65535) >> 8).astype(np.uint8))
    if picture.mode in ("I", "F"):
        found = "32-bit whole numbers" if picture.mode == "I" else "floating-point pixels"
        fix = "save it with 8 or 16 bits, or give the images as floating-point arrays in data.arrays"
        raise bad_data(what, "pixels of 8 or 16 bits", found, fix)
    return picture


def _check_pixels(size: tuple[int, int], what: str, limits: Limits) -> None:
    if size[0] * size[1] > limits.pixels:
        fix = "remove it, or raise data.limits.pixels if you trust it"
        raise bad_data(what, f"at most {limits.pixels:,} pixels", f"{size[0]} x {size[1]}", fix)


def _fit(picture: Any, wanted: ImageInput, how: Any, what: str, limits: Limits) -> Any:
    assert wanted.size is not None
    height, width = wanted.size
    if wanted.resize is None:
        return picture if picture.size == (width, height) else picture.resize((width, height), how)
    across, down = picture.size
    short = min(across, down)
    scaled = (int(wanted.resize * across / short), int(wanted.resize * down / short))
    _check_pixels(scaled, f"{what}, its shorter side resized to {wanted.resize}", limits)
    if scaled != picture.size:
        picture = picture.resize(scaled, how)
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return picture.crop((left, top, left + width, top + height))  # outside the image: black


def _image_array(array: Array, wanted: ImageInput, name: str) -> Array:
    """uint8 or float32 (n, C, H, W), checked; only uint8 images can be resized."""
    what = f"images of the {name} data"
    if array.ndim == 3:
        images = np.expand_dims(array, 1)
    elif array.ndim == 4 and {array.shape[1], array.shape[3]} & {1, 3}:
        images = array if array.shape[1] in (1, 3) else np.moveaxis(array, 3, 1)
    else:
        expected = "shape (n, H, W), (n, C, H, W) or (n, H, W, C) with 1 or 3 channels"
        raise bad_data(what, expected, str(array.shape), "name them as data.features if they are no images")
    if images.dtype.kind == "f":
        if wanted.size is not None and images.shape[2:] != wanted.size:
            size, found = ("x".join(map(str, pair)) for pair in (wanted.size, images.shape[2:]))
            fix = "store uint8 images, which are resized, or set data.preprocessing.size"
            raise bad_data(what, f"size {size} for floating-point images", found, fix)
        return images.astype(np.float32)
    if images.dtype != np.uint8:
        raise bad_data(what, "uint8 or floating-point pixels", str(images.dtype), "convert them")
    if wanted.channels in (None, images.shape[1]):
        return images
    if wanted.channels == 3:
        return np.repeat(images, 3, axis=1)
    # The weights of the ITU-R 601 grey that image libraries use.
    grey: Array = np.round(images.transpose(0, 2, 3, 1) @ np.array([0.299, 0.587, 0.114], np.float32))
    return grey[:, None].astype(np.uint8)


def _digest(items: Any, folder: Path, wanted: ImageInput) -> str:
    """Of what the pixels depend on. Files count by name, size and times, so that reading them is not necessary."""
    how = f"{wanted.size} {wanted.resize} {wanted.interpolation} {wanted.channels}"
    total = hashlib.sha256(how.encode())
    for source in map(_source, items):
        if isinstance(source, np.ndarray):
            total.update(str(source.shape).encode() + np.ascontiguousarray(source).tobytes())
        elif isinstance(source, bytes):
            total.update(len(source).to_bytes(8, "little") + source)
        else:
            facts = os.stat(folder / source)  # noqa: PTH116  (the fastest, for millions of files)
            total.update(f"{source}\0{facts.st_size}\0{facts.st_mtime_ns}\0{facts.st_ctime_ns}\0".encode())
    return total.hexdigest()


@contextmanager
def _new_file(file: Path, needed: int) -> Iterator[Path]:
    """A place of that size, which becomes `file`. Several processes may decode the same images at once.

    The whole file is reserved: a disk that is full when a page of a mapping is written ends the process.
    """
    with ExitStack() as stack:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(file.parent).free) < needed:
                raise OSError(f"{free:,} bytes free")
            folder = tempfile.TemporaryDirectory(prefix=f".{file.name}.", suffix=".writing", dir=file.parent)
            place = Path(stack.enter_context(folder), file.name)
            with place.open("wb") as opened:
                getattr(os, "posix_fallocate", lambda fd, _, size: os.truncate(fd, size))(opened.fileno(), 0, needed)
        except OSError as error:
            expected, found = f"{needed:,} bytes for decoded images", error.strerror or str(error)
            raise bad_data(f"data.cache {file.parent}", expected, found, "name another folder in data.cache") from error
        yield place
        place.replace(file)
        sync_directory(file.parent)

"""Folders of images, one sub-folder per class."""

from __future__ import annotations

import os
from pathlib import Path

from stockpot.adapters.data.columns import Table, not_there
from stockpot.errors import DataError, describe

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def read(path: Path, part: str | None) -> Table:
    folder = (path if part is None else path / part).absolute()
    if not folder.is_dir():
        raise not_there(str(folder), "a folder with one sub-folder of images per class")
    images: list[str] = []  # not Path: there may be millions
    labels: list[str] = []
    for group in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        found = sorted(_images(group), key=lambda path: path.split(os.sep))  # noqa: PTH206
        images += found
        labels += [group.name] * len(found)
    if not images:
        raise DataError(
            describe(
                str(folder),
                expected="one sub-folder of images per class",
                found="no images in sub-folders",
                fix=f"put images ({', '.join(sorted(SUFFIXES))}) into folders named after their class",
            )
        )
    return Table(str(folder), {"image": images, "label": labels})


def _images(group: Path) -> list[str]:
    return [
        f"{place}{os.sep}{name}"
        for place, _, names in os.walk(group)
        for name in names
        if os.path.splitext(name)[1].lower() in SUFFIXES and not name.startswith(".")  # noqa: PTH122
    ]

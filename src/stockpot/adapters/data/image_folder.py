"""Folders of images, one sub-folder per class."""

from __future__ import annotations

from pathlib import Path

from stockpot.adapters.data.columns import Table, not_there
from stockpot.errors import DataError, describe

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"}


def read(path: Path, part: str | None) -> Table:
    folder = (path if part is None else path / part).absolute()
    if not folder.is_dir():
        raise not_there(str(folder), "a folder with one sub-folder of images per class")
    images: list[Path] = []
    labels: list[str] = []
    for group in sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")):
        found = sorted(
            f for f in group.rglob("*") if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")
        )
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

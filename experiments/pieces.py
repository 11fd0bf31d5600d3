"""Carries a zoo's data to a machine without a network, where only so many megabytes fit into one parcel.

    python experiments/pieces.py cut imdb-minilm parcels --size 64    # parcels/0, parcels/1, ... of at most 64 MB
    python experiments/pieces.py join imdb-minilm parcels/0           # on the other machine, one by one

Files are compressed and cut by bytes. A file is put together as soon as all its pieces have arrived.
"""

from __future__ import annotations

import argparse
import gzip
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

DATA = Path(__file__).parent / "data"
MADE_HERE = ("pool", "run", "arrived")  # folders that are results, not data


def cut(data: Path, out: Path, size: int) -> list[Path]:
    """Parcels of at most `size` bytes; pieces are called FILE.gz.NUMBER.OF, with %2F for slashes."""
    parcels: list[Path] = []
    room = 0
    for file in _files(data):
        packed = gzip.compress(file.read_bytes(), compresslevel=6, mtime=0)
        pieces: list[bytes] = []
        places: list[Path] = []
        while packed:
            if room < min(size, 1 << 20):  # no crumbs
                parcels.append(out / str(len(parcels)))
                parcels[-1].mkdir(parents=True)
                room = size
            pieces.append(packed[:room])
            places.append(parcels[-1])
            room -= len(pieces[-1])
            packed = packed[len(pieces[-1]) :]
        name = file.relative_to(data).as_posix().replace("/", "%2F")
        for number, (piece, place) in enumerate(zip(pieces, places, strict=True)):
            (place / f"{name}.gz.{number}.{len(pieces)}").write_bytes(piece)
    return parcels


def join(data: Path, parcel: Path) -> list[str]:
    """Take a parcel's pieces in; the names of files of which some pieces are still missing."""
    arrived = data / "arrived"
    arrived.mkdir(parents=True, exist_ok=True)
    for piece in parcel.iterdir():
        shutil.copyfile(piece, arrived / piece.name)
    missing = []
    for name, total in sorted({_parse(piece) for piece in arrived.iterdir()}):
        pieces = [arrived / f"{name}.gz.{number}.{total}" for number in range(total)]
        if not all(piece.is_file() for piece in pieces):
            missing.append(name.replace("%2F", "/"))
            continue
        target = data / name.replace("%2F", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(gzip.decompress(b"".join(piece.read_bytes() for piece in pieces)))
        for piece in pieces:
            piece.unlink()
    return missing


def _files(data: Path) -> Iterator[Path]:
    for path in sorted(data.rglob("*")):
        if path.is_file() and path.relative_to(data).parts[0] not in MADE_HERE:
            yield path


def _parse(piece: Path) -> tuple[str, int]:
    name, _, total = piece.name.rsplit(".", 2)
    return name.removesuffix(".gz"), int(total)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cut", "join"))
    parser.add_argument("zoo")
    parser.add_argument("parcels", type=Path)
    parser.add_argument("--size", type=float, default=64, help="megabytes")
    chosen = parser.parse_args(given)
    data = DATA / chosen.zoo
    if chosen.what == "cut":
        for parcel in cut(data, chosen.parcels, int(chosen.size * 1e6)):
            print(f"{sum(file.stat().st_size for file in parcel.iterdir()) / 1e6:6.1f} MB  {parcel}")
        return 0
    missing = join(data, chosen.parcels)
    print(f"incomplete: {', '.join(missing)}" if missing else f"complete: {data}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

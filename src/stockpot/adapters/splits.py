"""Where samples are, which columns are what, and which samples fall into which split.

A split is listed one by one in a file, or is a stratified share by labels and seed.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from stockpot import words
from stockpot.adapters.labels import DEFAULTS
from stockpot.adapters.tables import LIMITS, Array, Limits, Table, bad_data, not_there
from stockpot.errors import DataError
from stockpot.files import read_bytes

# The order in which shares are cut: more fitting data never changes which samples are reported on.
ORDER = ("report", "fit", "train")
_LIST = 2**30  # Bytes of a list of samples.
_SHOWN = 3


@dataclass(frozen=True)
class Share:
    """One split: which part of the source, and how much of it.

    The samples listed in the file `rows`; or all, a fraction or a number of what such lists leave of the part.
    """

    part: str | None = None
    fraction: float | None = None
    count: int | None = None
    rows: Path | None = None
    path: Path | None = None  # of samples that are in another place than the source's

    def of(self, size: int) -> float:
        return self.count if self.count is not None else (self.fraction or 1.0) * size

    def __str__(self) -> str:
        return str(self.count) if self.count is not None else f"{self.fraction or 1:g}"


@dataclass(frozen=True)
class Columns:
    """Which columns are what; at most one kind of input is named, or the only candidate is taken."""

    text: tuple[str, ...] | None = None
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    choices: tuple[str, ...] | None = None
    answer: str | None = None
    words: str | None = None
    tags: str | None = None
    image: str | None = None
    features: tuple[str, ...] | None = None
    tokens: str | None = None
    label: str | tuple[str, ...] | None = None
    group: str | None = None

    @property
    def is_text(self) -> bool:
        return bool(self.text or self.messages or self.prompt or self.words)

    def with_input_of(self, table: Table) -> Columns:
        """Find the input where the recipe names none."""
        if self.is_text or self.image or self.features or self.tokens:
            return self
        labels = (self.label,) if isinstance(self.label, str) else self.label or DEFAULTS
        skipped = {self.group, *labels}
        others = [name for name in table.columns if name not in skipped]
        usual = [name for name in ("x", "text", "image") if name in others][-1:]
        if len(others) != 1 and not usual:
            expected = "the name of its column in data.text, data.image, data.features or data.tokens"
            found = f"none named, and columns {', '.join(table.columns)}"
            raise bad_data(f"input in {table.where}", expected, found, "name it")
        (name,) = usual or others
        column = table.columns[name]
        array = column if isinstance(column, np.ndarray) else None
        if name == "image" or (array is not None and array.dtype == np.uint8 and array.ndim >= 3):
            return replace(self, image=name)
        return replace(self, text=(name,)) if array is None else replace(self, features=(name,))


@dataclass(frozen=True)
class DataSource:
    """Where samples are and how they are divided; the adapters' side of a recipe's `data`."""

    kind: str
    path: Path
    columns: Columns
    shares: Mapping[str, Share]
    seed: int = 0
    classes: tuple[str, ...] | None = None
    max_length: int | None = None
    long_texts: str = "refuse"  # refuse, truncate, split or pack
    separator: str | None = None  # between documents of a .txt file
    memory_limit: int = 8 * 2**30
    cache: Path | None = None  # folder for decoded images
    target: str = "class"
    metric: str = ""  # which may need columns of its own
    generate: int | None = None  # samples whose answers are generated for it; None: all
    limits: Limits = LIMITS


# Splits ---------------------------------------------------------------------------------------------


def cut(
    size: int,
    labels: Array | None,
    shares: Mapping[str, Share],
    seed: int,
    where: str,
    listed: Mapping[str, Array] | None = None,
    groups: Array | None = None,
) -> dict[str, Array]:
    """Disjoint, sorted row numbers for every share of one part; those of `listed` are decided already.

    Samples of one of the `groups` (n,) stay together, so shares are as near to what was asked for as groups allow.
    """
    rows: dict[str, Array] = dict(listed or {})
    for one, two in itertools.combinations(rows, 2):
        common = np.intersect1d(rows[one], rows[two])
        if len(common):
            found = f"{len(common):,} listed for both, the first is number {common[0]:,}"
            fix = "take them out of one of the two files"
            raise bad_data(f"splits of {where}", f"different samples in data.{one} and data.{two}", found, fix)
    left = np.setdiff1d(np.arange(size), np.concatenate([np.empty(0, np.int64), *rows.values()]))
    size, kept = len(left), None if labels is None else labels[left]
    ends = None  # where a share may end
    if groups is None:
        order = left[stratified_order(size, kept, seed)]
    else:
        _, first, unit, sizes = np.unique(groups[left], return_index=True, return_inverse=True, return_counts=True)
        units = stratified_order(len(first), None if kept is None else kept[first], seed)
        order = left[np.argsort(np.argsort(units)[unit], kind="stable")]
        ends = np.cumsum(sizes[units])
    ordered = sorted(shares, key=lambda name: ORDER.index(name.split(".")[0]))  # sets of report data: report.NAME
    others = {name: shares[name] for name in ordered if name not in rows}
    start, exact = 0, 0.0
    for to_come, (name, share) in zip(range(len(others) - 1, -1, -1), others.items(), strict=True):
        exact += share.of(size)
        end = round(exact)  # of the running total, not of each share: halves of an odd number make the whole
        if ends is not None and end <= size:
            free = ends[ends > start]
            free = free[: max(len(free) - to_come, 0)]
            end = int(free[np.abs(free - exact).argmin()]) if len(free) else start
        if end > size:
            wanted = ", ".join(f"{n}: {s}" for n, s in shares.items() if n in others)
            raise bad_data(f"splits of {where}", f"at most its {size} samples", wanted, "ask for fewer samples")
        if end == start:
            found = f"none: {where} has {size}" + ("" if ends is None else f", in {words.plural(len(ends), 'group')}")
            fix = "ask for a larger share" if ends is None or len(ends) > len(others) else "give data of more groups"
            raise bad_data(f"data.{name}", "at least one sample", found, fix)
        rows[name] = np.sort(order[start:end])
        start = end
    return rows


def stratified_order(size: int, labels: Array | None, seed: int) -> Array:
    """A shuffled order of which every stretch has the classes in nearly the same proportions as the whole.

    Each sample gets a place in (0, 1) by its rank among the shuffled samples of its class; sorting by place
    interleaves the classes evenly. The legacy generator's stream is the one numpy promises not to change.
    """
    shuffled = np.random.RandomState(seed).permutation(size)
    if labels is None:
        return shuffled
    by_class = np.argsort(labels[shuffled], kind="stable")
    _, starts, counts = np.unique(labels[shuffled][by_class], return_index=True, return_counts=True)
    rank = np.arange(size) - np.repeat(starts, counts)
    place = np.empty(size)
    place[by_class] = (rank + 0.5) / np.repeat(counts, counts)
    return shuffled[np.argsort(place, kind="stable")]


def read_rows(file: Path, table: Table) -> Array:
    """Samples named one by one: a published split, repeated exactly.

    Sorted row numbers of `table`, from a `.npy` array or from a text file with one sample per line.
    """
    if not file.is_file():
        raise not_there(file, "a .npy array or a text file that lists samples")
    try:
        content = read_bytes(file, _LIST, follow=True)
        given = np.load(io.BytesIO(content), allow_pickle=False) if file.suffix == ".npy" else _lines(content)
    except (OSError, ValueError) as error:
        raise _wrong(file, "a .npy array of numbers or a text file", str(error)) from error
    rows = _numbers(file, given, len(table)) if isinstance(given, np.ndarray) else _named(file, given, table)
    once: Array = np.unique(rows)
    if len(once) == 0:
        raise _wrong(file, "at least one sample", "none")
    if len(once) < len(rows):
        raise _wrong(file, "every sample once", f"{len(rows) - len(once)} listed again")
    return once


def _lines(content: bytes) -> Array | list[str]:
    lines = [line.strip() for line in content.decode("utf-8").splitlines() if line.strip()]
    if all(line.isdecimal() and len(line) < 19 for line in lines):
        return np.array([int(line) for line in lines], dtype=np.int64)
    return lines


def _numbers(file: Path, given: Array, size: int) -> Array:
    if given.ndim != 1 or given.dtype.kind not in "biuf" or not np.array_equal(given, np.floor(given)):
        raise _wrong(file, "one whole number per sample", f"{given.dtype} values of shape {given.shape}")
    # Row numbers are all different, so that zeros and ones as many as samples can only be a mask.
    if given.dtype.kind == "b" or (len(given) == size and bool(np.isin(given, (0, 1)).all())):
        if len(given) != size:
            raise _wrong(file, f"a mask of {size:,} entries, one per sample", f"{len(given):,}")
        return np.flatnonzero(given)
    if len(given) and (given.min() < 0 or given.max() >= size):
        raise _wrong(file, f"numbers from 0 to {size - 1:,}", f"{given.min():,} to {given.max():,}")
    return given.astype(np.int64)


def _named(file: Path, names: Sequence[str], table: Table) -> Array:
    images = table.columns.get("image")
    if not isinstance(images, list) or not all(isinstance(image, (str, Path)) for image in images):
        raise _wrong(file, "numbers of samples: this part has no image files to name", repr(names[0]))
    number = {str(image).removeprefix(f"{table.where}/"): row for row, image in enumerate(images)}
    gone = [name for name in names if name not in number]
    if gone:
        more = f" and {len(gone) - _SHOWN:,} more" if len(gone) > _SHOWN else ""
        found = f"{', '.join(gone[:_SHOWN])}{more}, which are not there"
        raise _wrong(file, f"images of {table.where}, such as {next(iter(number))}", found)
    return np.array([number[name] for name in names], dtype=np.int64)


def _wrong(file: Path, expected: str, found: str) -> DataError:
    fix = "list samples of this part: numbers from 0, a mask of 0 and 1 with one entry per sample, or image paths"
    return bad_data(file, expected, found, fix)

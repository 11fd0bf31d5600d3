"""Which samples fall into which split: stratified, a pure function of labels and seed."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stockpot.errors import DataError, describe

# The order in which shares are cut: more fitting data never changes which samples are reported on.
ORDER = ("report", "fit", "train")


@dataclass(frozen=True)
class Share:
    """One split: which part of the source, and how much of it.

    The samples listed in the file `rows`; or all, a fraction or a number of what such lists leave of the part.
    """

    part: str | None = None
    fraction: float | None = None
    count: int | None = None
    rows: Path | None = None

    @property
    def whole(self) -> bool:
        return self.fraction is None and self.count is None and self.rows is None


def cut(
    size: int,
    labels: np.ndarray[Any, Any] | None,
    shares: Mapping[str, Share],
    seed: int,
    where: str,
    listed: Mapping[str, np.ndarray[Any, Any]] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Disjoint, sorted row numbers for every share of one part; those of `listed` are decided already."""
    listed = listed or {}
    shares = {name: share for name, share in shares.items() if name not in listed}
    if not shares:
        left = np.empty(0, np.int64)
    elif listed:
        left = np.setdiff1d(np.arange(size), np.concatenate(list(listed.values())))
    else:
        left = np.arange(size)
    _disjoint(listed, where)
    chosen = _shares(len(left), None if labels is None else labels[left], shares, seed, where)
    return {**listed, **{name: left[rows] for name, rows in chosen.items()}}


def _disjoint(listed: Mapping[str, np.ndarray[Any, Any]], where: str) -> None:
    for one, two in itertools.combinations(listed, 2):
        common = np.intersect1d(listed[one], listed[two])
        if len(common):
            raise DataError(
                describe(
                    f"splits of {where}",
                    expected=f"different samples in data.{one} and data.{two}",
                    found=f"{len(common):,} listed for both, the first is number {common[0]:,}",
                    fix="take them out of one of the two files",
                )
            )


def _shares(
    size: int, labels: np.ndarray[Any, Any] | None, shares: Mapping[str, Share], seed: int, where: str
) -> dict[str, np.ndarray[Any, Any]]:
    if len(shares) == 1 and next(iter(shares.values())).whole and size:
        return {next(iter(shares)): np.arange(size)}
    order = stratified_order(size, labels, seed)
    rows: dict[str, np.ndarray[Any, Any]] = {}
    start, exact = 0, 0.0
    for name in (n for n in ORDER if n in shares):
        share = shares[name]
        # Rounding the running total, not each share, lets halves of an odd number make the whole.
        exact += size if share.whole else share.count if share.count is not None else share.fraction * size  # type: ignore[operator]
        end = round(exact)
        if end > size:
            wanted = {n: s.count if s.count is not None else f"{s.fraction:g}" for n, s in shares.items()}
            raise DataError(
                describe(
                    f"splits of {where}",
                    expected=f"at most its {size} samples",
                    found=", ".join(f"{n}: {w}" for n, w in wanted.items()),
                    fix="ask for fewer samples",
                )
            )
        if end == start:
            raise DataError(
                describe(
                    f"data.{name}",
                    expected="at least one sample",
                    found=f"none: {where} has {size}",
                    fix="ask for a larger share",
                )
            )
        rows[name] = np.sort(order[start:end])
        start = end
    return rows


def stratified_order(size: int, labels: np.ndarray[Any, Any] | None, seed: int) -> np.ndarray[Any, Any]:
    """A shuffled order of which every stretch has the classes in nearly the same proportions as the whole.

    Each sample gets a place in (0, 1) by its rank among the shuffled samples of its class; sorting by place
    interleaves the classes evenly. The legacy generator's stream is the one numpy promises not to change.
    """
    shuffled = np.random.RandomState(seed).permutation(size)
    if labels is None:
        return shuffled
    place = np.empty(size)
    seen = labels[shuffled]
    for label in np.unique(labels):
        members = shuffled[seen == label]
        place[members] = (np.arange(len(members)) + 0.5) / len(members)
    return shuffled[np.argsort(place[shuffled], kind="stable")]

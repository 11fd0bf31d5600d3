"""CIFAR's pickles become arrays, and nothing in them runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripts import script

from stockpot.adapters.binary import read_arrays

cifar = script("convert.cifar_python")


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_batches_of_every_pickle_protocol(tmp_path: Path, protocol: int) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (18, 3072)).astype(np.uint8)
    for number in range(1, 7):
        batch = {b"data": pixels[3 * number - 3 : 3 * number], b"labels": [number, 0, 9]}
        batch |= {b"batch_label": b"x", b"filenames": [b"a", b"b", b"c"]}
        name = f"data_batch_{number}" if number < 6 else "test_batch"
        (tmp_path / name).write_bytes(pickle.dumps(batch, protocol))
    cifar.convert(tmp_path)
    train, test = (read_arrays(tmp_path / "arrays", part).columns for part in ("train", "test"))
    np.testing.assert_array_equal(train["x"], pixels[:15].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(train["y"], [n for k in range(1, 6) for n in (k, 0, 9)])
    np.testing.assert_array_equal(test["x"], pixels[15:].reshape(-1, 3, 32, 32))


def test_cifar_100_has_two_kinds_of_label(tmp_path: Path) -> None:
    batch = {b"data": np.zeros((2, 3072), np.uint8), b"fine_labels": [5, 60], b"coarse_labels": [0, 1]}
    (tmp_path / "test").write_bytes(pickle.dumps(batch, 2))
    found = cifar.read_batch(tmp_path / "test")
    assert (found["y"].tolist(), found["coarse"].tolist()) == ([5, 60], [0, 1])


def test_a_batch_never_runs_code_and_bad_ones_are_refused(tmp_path: Path) -> None:
    marker, file = tmp_path / "marker", tmp_path / "test_batch"
    for content in (
        pickle.dumps({b"data": Bomb(marker)}),
        pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, 2),
        b"\x80\x02cut",
    ):
        file.write_bytes(content)
        with pytest.raises(SystemExit, match="test_batch: expected"):
            cifar.read_batch(file)
    assert not marker.exists()

"""Tables, arrays and pictures that hang, fill the memory, or say two things at once."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch import nn

from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.samples import read_splits
from stockpot.adapters.splits import Columns, DataSource, Share
from stockpot.adapters.tables import Limits
from stockpot.errors import DataError, describe

FEATURES = Columns(features=("x",), label="y")


def read(kind: str, path: Path, columns: Columns = FEATURES, limits: Limits = Limits()) -> Any:  # noqa: B008
    source = DataSource(kind, path, columns, {"fit": Share()}, limits=limits)
    wanted = ImageInput(size=(8, 8), resize=8, channels=3)
    return read_splits(source, LoadedModel(nn.Linear(1, 1)), wanted, ("fit",))["fit"]


def test_many_columns_take_no_time(tmp_path: Path) -> None:
    names = ",".join(f"c{n}" for n in range(100_000))
    (tmp_path / "a.csv").write_text(f"x,y,{names}\n" + ("1,0" + "," * 100_000 + "\n") * 2)
    began = time.process_time()
    x, y = read("table", tmp_path / "a.csv")
    assert time.process_time() - began < 5
    assert (x.tolist(), y.tolist()) == ([1, 1], [0, 0])


def test_a_text_about_many_columns_stays_short(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(f"c{n}" for n in range(100_000)) + "\n1" + "," * 99_999 + "\n")
    with pytest.raises(DataError, match=r"data.label: y: expected a column") as raised:
        read("table", tmp_path / "a.csv")
    assert len(str(raised.value)) < 20_000
    assert describe("a", expected="b", found="c" * 10_000, fix="d").count("c") < 8_100


def test_a_record_that_says_a_key_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": [1], "y": 0, "y": 1}\n{"x": [2], "y": 1}\n')
    with pytest.raises(DataError, match=r"line 1: expected JSON, found the key 'y' appears twice"):
        read("table", tmp_path / "a.jsonl")


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("second", ["x.npy", "x"])
def test_an_archive_that_has_an_array_twice_is_refused(tmp_path: Path, second: str) -> None:
    for name in ("one", "two"):
        np.save(tmp_path / name, np.zeros(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.write(tmp_path / "one.npy", "x.npy")
        archive.write(tmp_path / "two.npy", second)
        archive.write(tmp_path / "one.npy", "y.npy")
    with pytest.raises(DataError, match="expected every array once, found x twice"):
        read("arrays", tmp_path / "a.npz")


@pytest.mark.parametrize("number", ["1e300", "-1e39"])
def test_numbers_that_the_model_cannot_hold_are_refused(tmp_path: Path, number: str) -> None:
    """-1e39 would become minus infinity, which masks may have."""
    (tmp_path / "a.csv").write_text(f"x,y\n{number},0\n2,1\n")
    with pytest.raises(DataError, match="expected numbers that float32 can hold"):
        read("table", tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (None, "expected a path or an encoded image, found nothing"),
        ({"path": 5}, "expected a path or an encoded image, found int"),
        ({"bytes": [1]}, "expected a path or an encoded image, found list"),
        ("a.jsonl", "expected a readable image, found no image in a format that is read"),
    ],
)
def test_cells_that_are_no_pictures_are_refused_in_plain_words(tmp_path: Path, cell: Any, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"image": cell, "label": 0}) + "\n")
    with pytest.raises(DataError, match=words):
        read("table", tmp_path / "a.jsonl", Columns(image="image"))


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def grown(kind: str, folder: str) -> None:
    """Says by how many bytes the memory grew; called in a process of its own."""
    os.cpu_count = lambda: 8
    Image.init()
    before = _peak()
    if kind == "one":
        read("images", Path(folder), Columns(image="image"))
    else:
        read("images", Path(folder), Columns(image="image"), Limits(pixels=2**24))
    sys.stdout.write(str(_peak() - before))


@pytest.mark.skipif(sys.platform != "linux", reason="measures memory as Linux does")
@pytest.mark.parametrize(("kind", "limit"), [("one", 800e6), ("many", 400e6)])
def test_large_pictures_take_little_more_memory_than_one_of_them(tmp_path: Path, kind: str, limit: float) -> None:
    """One of 16 bits, as large as is allowed (it took 1.3 GB); eight on eight cores (each of them 0.1 GB)."""
    (tmp_path / "c").mkdir()
    small = Image.new("RGB", (8, 8))
    if kind == "one":
        Image.fromarray(np.zeros((8192, 8192), np.uint16)).save(tmp_path / "c" / "a.png")
    else:
        Image.new("RGB", (4096, 4096)).save(tmp_path / "large.png")
        for number in range(8 * 32):  # threads take 32 at a time
            place = tmp_path / "c" / f"{number:03}.png"
            if number % 32:
                small.save(place)
            else:
                os.link(tmp_path / "large.png", place)
    code = f"from attacks.test_attacks_tables import grown; grown({kind!r}, {str(tmp_path)!r})"
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit

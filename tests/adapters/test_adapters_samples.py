"""From files to tensors: the row is named where a cell is wrong, and nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.samples import read_splits
from stockpot.adapters.splits import Columns, DataSource, Share
from stockpot.errors import DataError


class Tokenizer:
    pad_token = "x"
    model_max_length = 8

    def __call__(self, *texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        assert all(isinstance(text, str) for column in texts for text in column)
        return {"input_ids": torch.tensor([[len(text) for text in row] for row in zip(*texts, strict=True)])}


TEXT = LoadedModel(nn.Linear(1, 1), tokenizer=Tokenizer, keywords=True)
PLAIN = LoadedModel(nn.Linear(1, 1))


def fit(kind: str, path: Path, model: LoadedModel, columns: Columns, **options: Any) -> Any:
    source = DataSource(kind, path, columns, {"fit": Share()}, **options)
    return read_splits(source, model, ImageInput(), ("fit",))["fit"]


def refusal(*args: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        fit(*args, **options)
    return str(caught.value)


def test_missing_text_is_refused_with_its_row(tmp_path: Path) -> None:
    """It used to become the word None."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"t": "abc", "y": 0}\n{"t": null, "y": 1}\n')
    text = refusal("table", file, TEXT, Columns(text=("t",), label="y"))
    assert f"data.text: t, row 1 (from 0) of {file}: expected text, found nothing" in text


def test_the_row_named_is_that_of_the_file_also_in_a_share_of_it(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f'{{"t": {"null" if n == 7 else 1}, "y": 0}}\n' for n in range(10)))
    shares = {"fit": Share(fraction=0.5), "report": Share(fraction=0.5)}
    source = DataSource("table", file, Columns(text=("t",), label="y"), shares)
    with pytest.raises(DataError, match=r"row 7 \(from 0\)"):
        read_splits(source, TEXT, ImageInput(), ("fit", "report"))


def test_byte_strings_are_texts(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"t": [b"abc", "d\u00e9".encode()], "y": [0, 1]}), tmp_path / "a.parquet")
    got = fit("table", tmp_path / "a.parquet", TEXT, Columns(text=("t",), label="y"))
    assert got["input_ids"].tolist() == [[3], [2]]  # and not those of b'...'
    pq.write_table(pa.table({"t": [b"abc", b"\xff"], "y": [0, 1]}), tmp_path / "a.parquet")
    text = refusal("table", tmp_path / "a.parquet", TEXT, Columns(text=("t",), label="y"))
    assert "row 1 (from 0)" in text
    assert "expected UTF-8 text" in text


def test_features_name_the_cell_that_is_no_number(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b,y\n1,2,0\n3,,1\n")
    columns = Columns(features=("a", "b"), label="y")
    assert f"data.features: b, row 1 (from 0) of {file}: expected numbers, found ''" in refusal(
        "table", file, PLAIN, columns
    )
    file.write_text("a,b,y\n1,2,0\n3,4.5,1\n")
    x, y = fit("table", file, PLAIN, columns)
    assert (x.tolist(), y.tolist()) == ([[1, 2], [3, 4.5]], [0, 1])


def test_token_ids_are_whole(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", t=np.array([[1.0, 2.0]]), y=np.array([0]))
    (ids, _) = fit("arrays", tmp_path / "a.npz", PLAIN, Columns(tokens="t"))
    assert ids.tolist() == [[1, 2]]
    np.savez(tmp_path / "a.npz", t=np.array([[1.0, 2.5]]), y=np.array([0]))
    assert "expected whole numbers, found fractions" in refusal(
        "arrays", tmp_path / "a.npz", PLAIN, Columns(tokens="t")
    )


def test_targets_are_what_the_recipe_says(tmp_path: Path) -> None:
    """A column of prices used to become classes in alphabetical order, and soups learned even those."""
    file = tmp_path / "a.csv"
    file.write_text("x,y\n1,0.5\n2,1.5\n3,0.25\n4,0.125\n")
    columns = Columns(features=("x",), label="y")
    assert "write data.target: number" in refusal("table", file, PLAIN, columns)
    shares = {"fit": Share(fraction=0.5), "report": Share(fraction=0.5)}
    source = DataSource("table", file, columns, shares, target="number")
    made = read_splits(source, PLAIN, ImageInput(), ("fit", "report"))
    pairs = {float(x): float(y) for part in made.values() for x, y in zip(*part, strict=True)}
    assert pairs == {1: 0.5, 2: 1.5, 3: 0.25, 4: 0.125}


def test_a_part_whose_name_no_file_can_have_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x,y\n1,0\n")
    source = DataSource("table", tmp_path, Columns(features=("x",), label="y"), {"fit": Share(part="x" * 5000)})
    with pytest.raises(DataError, match="expected data, found File name too long"):
        read_splits(source, LoadedModel(nn.Linear(1, 1)), ImageInput(), ("fit",))

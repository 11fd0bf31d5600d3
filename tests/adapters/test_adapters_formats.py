"""Every format gives back the samples that were written, and says what is wrong with a bad file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stockpot.adapters.binary import read_arrays, read_dataset
from stockpot.adapters.images import read_image_folder
from stockpot.adapters.tables import Limits, as_text, read_table
from stockpot.errors import DataError

PIL = pytest.importorskip("PIL.Image")
pa = pytest.importorskip("pyarrow")


class Bomb:
    """A pickle that writes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.marker, "run"))


def refusal(read: Any, *args: Any) -> str:
    with pytest.raises(DataError) as caught:
        read(*args)
    return str(caught.value)


# Tables -----------------------------------------------------------------------------------------------


def test_csv_with_quotes_and_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('\ufefftext,label\n"one, two",pos\n"say ""hi""",neg\n', encoding="utf-8")
    table = read_table(file, None)
    assert table.columns == {"text": ["one, two", 'say "hi"'], "label": ["pos", "neg"]}


def test_jsonl_numbers_become_arrays_and_texts_stay(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"x": [1, 2], "t": "a", "y": 0}\n\n{"x": [3, 4.5], "t": "b", "y": 1}\n')
    table = read_table(file, None)
    np.testing.assert_array_equal(table.columns["x"], [[1, 2], [3, 4.5]])
    assert table.columns["t"] == ["a", "b"]
    np.testing.assert_array_equal(table.columns["y"], [0, 1])


def test_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    content = {"t": ["a", "b"], "x": [[1.0, 2.0], [3.0, 4.0]], "y": [1, 0], "n": [1, None], "r": [[1], [1, 2]]}
    pixels = pa.array([[[1, 2], [3, 4]]] * 2, pa.list_(pa.list_(pa.uint8())))
    pq.write_table(pa.table({**content, "p": pixels}), file)
    table = read_table(file, None)
    assert table.columns["t"] == ["a", "b"]
    np.testing.assert_array_equal(table.columns["x"], content["x"])
    np.testing.assert_array_equal(table.columns["y"], [1, 0])
    assert table.columns["n"] == [1, None]
    assert table.columns["r"] == [[1], [1, 2]]
    image = table.columns["p"]
    assert isinstance(image, np.ndarray)
    assert (image.dtype, image.shape) == (np.uint8, (2, 2, 2))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "a,b\n1,2\n3\n", "row 3: expected 2 values, as many as column names, found 1"),
        ("a.csv", "a,a\n1,2\n", "a twice"),
        ("a.jsonl", '{"a": 1}\n{"a": \n', "line 2: expected JSON"),
        ("a.jsonl", '{"a": 1}\n{"b": 1}\n', "line 2: expected an object with a, found b"),
        ("a.doc", "x", "expected a file ending in .csv, .tsv, .jsonl, .ndjson, .parquet, .txt, found .doc"),
        ("a.parquet", "x", "expected a Parquet file"),
    ],
)
def test_bad_tables(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    assert said in refusal(read_table, tmp_path / name, None)


def test_parts_of_a_folder_of_tables(tmp_path: Path) -> None:
    (tmp_path / "val.csv").write_text("a\n1\n")
    (tmp_path / "test.csv").write_text("a\n2\n")
    assert read_table(tmp_path, "val.csv").columns == {"a": ["1"]}
    assert read_table(tmp_path, "test").columns == {"a": ["2"]}
    assert "a folder with test.csv, val.csv" in refusal(read_table, tmp_path, "train")
    assert "nothing there" in refusal(read_table, tmp_path / "none.csv", None)
    assert "is one file" in refusal(read_table, tmp_path / "val.csv", "test")


def test_rows_and_unfolded_bytes_have_limits_that_can_be_raised(tmp_path: Path) -> None:
    for name, text in (("a.csv", "x\n1\n2\n3\n"), ("a.jsonl", '{"x": 1}\n' * 3)):
        (tmp_path / name).write_text(text)
        assert "expected at most 2 rows, found 3" in refusal(read_table, tmp_path / name, None, Limits(rows=2))
        assert len(read_table(tmp_path / name, None, Limits(rows=3))) == 3
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(20_000))
    small = Limits(bytes=1000)
    said = refusal(read_arrays, tmp_path / "a.npz", None, small)
    assert "found at least 160,128" in said
    assert "raise data.limits.bytes to 262144" in said
    assert len(read_arrays(tmp_path / "a.npz", None, Limits(bytes=262144))) == 20_000


def test_a_tiny_parquet_file_with_gigabytes_in_it(tmp_path: Path) -> None:
    """Runs of one number, and one text in every row, take hardly any place in a file."""
    pq = pytest.importorskip("pyarrow.parquet")
    numbers = pa.table({"x": np.zeros(2**20, np.int64)})
    with pq.ParquetWriter(tmp_path / "numbers.parquet", numbers.schema) as writer:
        for _ in range(9):
            writer.write_table(numbers)
    assert (tmp_path / "numbers.parquet").stat().st_size < 100_000
    assert "content of at most 67,108,864 bytes" in refusal(read_table, tmp_path / "numbers.parquet", None)
    codes, text = pa.array(np.zeros(1000, np.int32)), pa.array(["a" * 10**5])
    for name in ("text", "texts"):
        column = pa.DictionaryArray.from_arrays(codes, text).cast(pa.string())
        nested = pa.ListArray.from_arrays(pa.array(np.arange(1001, dtype=np.int32)), column)
        pq.write_table(pa.table({"x": column if name == "text" else nested}), tmp_path / f"{name}.parquet")
        assert (tmp_path / f"{name}.parquet").stat().st_size < 200_000
        assert "content of at most 67,108,864" in refusal(read_table, tmp_path / f"{name}.parquet", None)


def test_values_that_store_no_bytes_are_counted(tmp_path: Path) -> None:
    nothing = pa.ListArray.from_arrays(pa.array([0, 2**28], pa.int32()), pa.nulls(2**28))
    write_dataset(tmp_path / "d", pa.table({"x": nothing}))
    assert "at most 67,108,864 bytes" in refusal(read_dataset, tmp_path / "d", None)


def test_lists_of_lists_and_tensors_of_a_fixed_shape_keep_their_shape(tmp_path: Path) -> None:
    pixels = np.arange(4 * 2 * 3, dtype=np.uint8).reshape(4, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(pixels)
    nested = pa.array(pixels.tolist(), pa.list_(pa.list_(pa.uint8(), 3)))
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"a": tensors, "b": nested}), tmp_path / "a.parquet")
    write_dataset(tmp_path / "d", pa.table({"a": tensors, "b": nested}))
    for table in (read_table(tmp_path / "a.parquet", None), read_dataset(tmp_path / "d", None)):
        for name in ("a", "b"):
            column = table.columns[name]
            assert isinstance(column, np.ndarray)
            assert column.dtype == np.uint8
            np.testing.assert_array_equal(column, pixels)


def test_texts_of_a_dictionary_stay_one_object(tmp_path: Path) -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), ["a" * 100, "b" * 100])
    write_dataset(tmp_path / "d", pa.table({"x": words}))
    column = read_dataset(tmp_path / "d", None).columns["x"]
    assert column == ["b" * 100, "a" * 100, None, "b" * 100]


def test_text_is_never_made_up() -> None:
    assert as_text("NA", "x") == "NA"
    assert as_text("caf\u00e9".encode(), "x") == "caf\u00e9"
    assert as_text(3, "x") == "3"
    for nothing in (None, float("nan")):
        assert "row 3: expected text, found nothing" in refusal(as_text, nothing, "row 3")
    assert "expected UTF-8 text, found bytes ff fe" in refusal(as_text, b"\xff\xfe", "row 3")
    assert "expected text, found list" in refusal(as_text, ["a"], "row 3")


# Hugging Face datasets on disk -----------------------------------------------------------------------


def write_dataset(folder: Path, columns: Any) -> None:
    """The layout of `save_to_disk`: Arrow streams and a state file that lists them."""
    folder.mkdir(parents=True)
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    names = []
    for number, start in enumerate(range(0, len(table), 2)):
        names.append(f"data-{number:05d}.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table.slice(start, 2))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))


def test_a_dataset_with_splits(tmp_path: Path) -> None:
    write_dataset(tmp_path / "validation", {"text": ["a", "b", "c"], "label": [0, 1, 0]})
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["validation"]}')
    for part in ("validation", None):
        table = read_dataset(tmp_path, part)
        assert table.columns["text"] == ["a", "b", "c"]
        np.testing.assert_array_equal(table.columns["label"], [0, 1, 0])
    assert "expected a split 'test', found splits validation" in refusal(read_dataset, tmp_path, "test")


def test_a_dataset_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", {"x": [1]})
    (tmp_path / "d" / "state.json").write_text('{"_data_files": [{"filename": "../secret.arrow"}]}')
    assert "expected names of files in that folder" in refusal(read_dataset, tmp_path / "d", None)
    assert "no state.json" in refusal(read_dataset, tmp_path, None)


# Arrays ------------------------------------------------------------------------------------------------


def test_arrays_from_npz_npy_and_safetensors_agree(tmp_path: Path) -> None:
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 2])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f" / "x.npy", x)
    np.save(tmp_path / "f" / "y.npy", y)
    save_file({"x": torch.from_numpy(x), "y": torch.from_numpy(y)}, tmp_path / "a.safetensors")
    for path in (tmp_path / "a.npz", tmp_path / "f", tmp_path / "a.safetensors"):
        columns = read_arrays(path, None).columns
        np.testing.assert_array_equal(columns["x"], x)
        np.testing.assert_array_equal(columns["y"], y)


def test_parts_of_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x_train=np.zeros(3), y_train=np.zeros(3), test_x=np.ones(2), test_y=np.ones(2))
    assert set(read_arrays(tmp_path / "all.npz", "train").columns) == {"x", "y"}
    np.testing.assert_array_equal(read_arrays(tmp_path / "all.npz", "test").columns["x"], [1, 1])
    assert "found arrays x_train" in refusal(read_arrays, tmp_path / "all.npz", "val")
    np.savez(tmp_path / "val.npz", x=np.zeros(4))
    assert len(read_arrays(tmp_path, "val")) == 4


def test_arrays_of_objects_are_refused_unread(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    np.savez(tmp_path / "a.npz", x=np.array([Bomb(marker)], dtype=object))
    assert "Python objects, which are not read because they can run code" in refusal(
        read_arrays, tmp_path / "a.npz", None
    )
    assert not marker.exists()


def test_arrays_of_text_and_of_nothing(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", t=np.array(["a", "b"]), b=np.array([b"c", b"\xc3\xa9"]))
    assert read_arrays(tmp_path / "a.npz", None).columns == {"t": ["a", "b"], "b": ["c", "\u00e9"]}
    np.savez(tmp_path / "b.npz", t=np.array([b"a", b"\xff"]))
    assert "b.npz, t, row 1: expected UTF-8 text" in refusal(read_arrays, tmp_path / "b.npz", None)
    header = b"{'descr': '|S0', 'fortran_order': False, 'shape': (40000000,), }"
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert "40,000,000 rows of nothing" in refusal(read_arrays, tmp_path / "f", None)


def test_bad_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"no zip")
    (tmp_path / "a.safetensors").write_bytes(b"short")
    np.savez(tmp_path / "b.npz", x=np.zeros(3), y=np.zeros(2))
    np.savez(tmp_path / "c.npz", x=np.zeros(3), epoch=np.float64(3))
    assert "expected plain arrays" in refusal(read_arrays, tmp_path / "a.npz", None)
    assert "expected plain arrays" in refusal(read_arrays, tmp_path / "a.safetensors", None)
    assert "expected columns of one length, found x: 3, y: 2" in refusal(read_arrays, tmp_path / "b.npz", None)
    assert "epoch: expected an array with one entry per sample" in refusal(read_arrays, tmp_path / "c.npz", None)


# Image folders -----------------------------------------------------------------------------------------


def test_an_image_folder_is_sorted_and_labelled_by_folder(tmp_path: Path) -> None:
    for name in ("b/2.png", "b/1.png", "a/x.jpg", ".hidden/z.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        PIL.new("RGB", (4, 4)).save(tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("no image")
    table = read_image_folder(tmp_path, None)
    assert [Path(f).name for f in table.columns["image"]] == ["x.jpg", "1.png", "2.png"]
    assert table.columns["label"] == ["a", "b", "b"]
    assert "no images in sub-folders" in refusal(read_image_folder, tmp_path, "b")
    assert "nothing there" in refusal(read_image_folder, tmp_path, "c")


def test_a_part_that_is_no_file_of_the_folder_is_named(tmp_path: Path) -> None:
    for name in ("val", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((2, 3)), y=np.zeros(2))
    with pytest.raises(DataError, match=r"part 'tset' of .*found test\.npz, val\.npz"):
        read_arrays(tmp_path, "tset")

"""Data files of strangers: each threat is (kind of data, folder or file, part)."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from attacks.kit import Threat, command, marker_in, threat

ARRAYS: list[Threat] = []
TABLES: list[Threat] = []
DATASETS: list[Threat] = []
IMAGES: list[Threat] = []


class Bomb:
    """Unpickled without care, it leaves the marker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.system, (f"touch {marker_in(self.folder)}",)


def _bomb(folder: Path) -> bytes:
    return pickle.dumps(Bomb(folder))


# Arrays ---------------------------------------------------------------------------------------------------


@threat("npz: an array of objects", "Python objects, which are not read", ARRAYS, _bomb)
def npz_objects(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=np.array([Bomb(folder)], dtype=object), y=np.zeros(1))
    return folder / "a.npz"


@threat("npy: an array of objects in a folder", "Python objects, which are not read", ARRAYS, _bomb)
def npy_objects(folder: Path) -> Path:
    (folder / "f").mkdir()
    np.save(folder / "f" / "x.npy", np.array([Bomb(folder)], dtype=object))
    return folder / "f"


@threat("npz: a pickle instead of an archive", "expected plain arrays", ARRAYS, _bomb)
def npz_pickle(folder: Path) -> Path:
    (folder / "a.npz").write_bytes(_bomb(folder))
    return folder / "a.npz"


@threat("npz: a pickle as one of its arrays", "x, which is no array", ARRAYS, _bomb)
def npz_inner_pickle(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("x.npy", _bomb(folder))
    return folder / "a.npz"


@threat("npy: a pickle instead of an array", "expected plain arrays", ARRAYS, _bomb)
def npy_pickle(folder: Path) -> Path:
    (folder / "f").mkdir()
    (folder / "f" / "x.npy").write_bytes(_bomb(folder))
    return folder / "f"


@threat("npz: 100 MB of zeros in 100 KB", "content of at most 67,108,864 bytes in a file of", ARRAYS)
def npz_bomb(folder: Path) -> Path:
    header = {"descr": "|u1", "fortran_order": False, "shape": (100 * 2**20,)}
    with (
        zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("x.npy", "w") as stream,
    ):
        np.lib.format.write_array_header_1_0(stream, header)
        for _ in range(100):
            stream.write(bytes(2**20))
    return folder / "a.npz"


def _npy(shape: str, descr: str = "'<f4'", data: bytes = bytes(16)) -> bytes:
    header = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (-(len(header) + 11) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + data


for _name, _content in (
    ("npy: a shape of a petabyte", _npy("(2**50,)".replace("2**50", str(2**50)))),
    ("npy: a negative shape", _npy("(-4,)")),
    ("npy: a shape that overflows", _npy(f"({2**40}, {2**40})")),
    ("npy: code where the header should be", _npy("__import__('os').system('touch marker')")),
    ("npy: objects inside a structure", _npy("(1,)", "[('a', '|O')]")),
    ("npy: a header nested a thousand deep", _npy("(" * 1000 + ")" * 1000)),
    ("npy: half a header", b"\x93NUMPY\x01\x00\xff"),
    ("npy: a thing that is no array", b"PK\x03\x04 no"),
):

    def _make(folder: Path, content: bytes = _content) -> Path:
        (folder / "f").mkdir()
        (folder / "f" / "x.npy").write_bytes(content)
        return folder / "f"

    ARRAYS.append(Threat(_name, _make, "expected plain arrays"))


@threat("npy: a FIFO", "not a regular file", ARRAYS)
def npy_fifo(folder: Path) -> Path:
    (folder / "f").mkdir()
    os.mkfifo(folder / "f" / "x.npy")
    return folder / "f"


@threat("safetensors data: an honest file of an odd type", "expected plain arrays", ARRAYS)
def odd_type(folder: Path) -> Path:
    save_file({"x": torch.zeros(4).to(torch.float8_e4m3fn)}, folder / "a.safetensors")
    return folder / "a.safetensors"


@threat("npy: forty million rows of nothing", "rows of nothing", ARRAYS)
def npy_nothing(folder: Path) -> Path:
    (folder / "f").mkdir()
    (folder / "f" / "x.npy").write_bytes(_npy("(40000000,)", "'|S0'", b""))
    return folder / "f"


# Tables, datasets, images ---------------------------------------------------------------------------------


@threat("jsonl: nested a hundred thousand deep", "expected JSON", TABLES)
def deep_jsonl(folder: Path) -> Path:
    (folder / "a.jsonl").write_text('{"x": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    return folder / "a.jsonl"


@threat("csv: a field of 200 KB", "expected CSV", TABLES)
def long_field(folder: Path) -> Path:
    (folder / "a.csv").write_text("x,y\n" + "a" * 200_000 + ",1\n")
    return folder / "a.csv"


@threat("csv: NUL and no text", "UTF-8 text", TABLES)
def binary_csv(folder: Path) -> Path:
    (folder / "a.csv").write_bytes(b"x,y\n\xff\xfe\x00,1\n")
    return folder / "a.csv"


@threat("csv: a FIFO", "nothing there", TABLES)
def fifo_csv(folder: Path) -> Path:
    os.mkfifo(folder / "a.csv")
    return folder / "a.csv"


@threat("parquet: an extension type with a pickle in it", None, TABLES, _bomb)
def parquet_extension(folder: Path) -> Path:
    """Arrow before 14.0.1 unpickled this when it opened the file."""
    names = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": _bomb(folder)}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=names)])
    pq.write_table(pa.table({"x": [1, 2]}, schema=schema), folder / "a.parquet")
    return folder / "a.parquet"


@threat("parquet: 75 MB of one number in 40 KB", "content of at most 67,108,864 bytes", TABLES)
def parquet_runs(folder: Path) -> Path:
    numbers = pa.table({"x": np.zeros(2**20, np.int64)})
    with pq.ParquetWriter(folder / "a.parquet", numbers.schema) as writer:
        for _ in range(9):
            writer.write_table(numbers)
    return folder / "a.parquet"


@threat("parquet: one text of 1 MB in every row", "content of at most 67,108,864 bytes", TABLES)
def parquet_shared(folder: Path) -> Path:
    once = pa.table({"x": pa.array(["a" * 2**20] * 10)})
    with pq.ParquetWriter(folder / "a.parquet", once.schema, compression="zstd") as writer:
        for _ in range(10):
            writer.write_table(once)
    return folder / "a.parquet"


@threat("parquet: eleven million rows", "at most 10,000,000 rows", TABLES)
def parquet_rows(folder: Path) -> Path:
    nothing = pa.table({"x": np.zeros(2**20, bool)})
    with pq.ParquetWriter(folder / "a.parquet", nothing.schema) as writer:
        for _ in range(11):
            writer.write_table(nothing)
    return folder / "a.parquet"


def _dataset(folder: Path, state: object, schema: Any = None) -> Path:
    made = folder / "d"
    made.mkdir()
    contents = pa.table({"x": [1, 2]}, schema=schema)
    with pa.OSFile(str(made / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, contents.schema) as writer:
        writer.write_table(contents)
    (made / "state.json").write_text(json.dumps(state))
    return made


@threat("dataset: an extension type with a pickle in it", None, DATASETS, _bomb)
def dataset_extension(folder: Path) -> Path:
    names = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": _bomb(folder)}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=names)])
    return _dataset(folder, {"_data_files": [{"filename": "data.arrow"}]}, schema)


@threat("dataset: a path upwards", "expected names of files in that folder", DATASETS)
def dataset_upwards(folder: Path) -> Path:
    return _dataset(folder, {"_data_files": [{"filename": "../secret.arrow"}]})


for _name, _state in (
    ("dataset: a number as file name", {"_data_files": [{"filename": 5}]}),
    ("dataset: no list of files", {"_data_files": 7}),
    ("dataset: an empty state", {}),
    ("dataset: a list as state", []),
):

    def _make_dataset(folder: Path, state: object = _state) -> Path:
        return _dataset(folder, state)

    DATASETS.append(Threat(_name, _make_dataset, "save the dataset again"))


@threat("dataset: texts that end before they begin", "part of a dataset", DATASETS)
def dataset_offsets(folder: Path) -> Path:
    made = _dataset(folder, {"_data_files": [{"filename": "data.arrow"}]})
    contents = pa.table({"x": ["ab", "c"]})
    with pa.OSFile(str(made / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, contents.schema) as writer:
        writer.write_table(contents)
    honest = (made / "data.arrow").read_bytes()
    lying = honest.replace(struct.pack("<3i", 0, 2, 3), struct.pack("<3i", 0, 2**30, 5))
    assert lying != honest
    (made / "data.arrow").write_bytes(lying)
    return made


@threat("dataset: a list of 2 ** 30 times nothing", "content of at most", DATASETS)
def dataset_nothing(folder: Path) -> Path:
    made = _dataset(folder, {"_data_files": [{"filename": "data.arrow"}]})
    contents = pa.table({"x": pa.ListArray.from_arrays(pa.array([0, 2**30], pa.int32()), pa.nulls(2**30))})
    with pa.OSFile(str(made / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, contents.schema) as writer:
        writer.write_table(contents)
    return made


@threat("dataset: a million views of one text", "values share their content", DATASETS)
def dataset_views(folder: Path) -> Path:
    made = _dataset(folder, {"_data_files": [{"filename": "data.arrow"}]})
    contents = pa.table({"x": pa.array(["a" * 100] * 2, pa.string_view())})
    with pa.OSFile(str(made / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, contents.schema) as writer:
        writer.write_table(contents)
    return made


@threat("dataset: bytes of nothing", "part of a dataset", DATASETS)
def dataset_junk(folder: Path) -> Path:
    made = _dataset(folder, {"_data_files": [{"filename": "data.arrow"}]})
    (made / "data.arrow").write_bytes(b"\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(64))
    return made


def _image(folder: Path, content: bytes, name: str = "a.png") -> Path:
    (folder / "images" / "class").mkdir(parents=True)
    (folder / "images" / "class" / name).write_bytes(content)
    return folder / "images"


@threat("image: PostScript under the name of a picture", "expected a readable image", IMAGES)
def postscript(folder: Path) -> Path:
    """The library would start Ghostscript on it."""
    program = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%{command(folder).decode()}) (w) file\n"
    return _image(folder, program.encode())


@threat("image: a picture of 10 gigapixels", "expected a readable image", IMAGES)
def gigapixels(folder: Path) -> Path:
    size = b"IHDR" + struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + size + struct.pack(">I", zlib.crc32(size))
    return _image(folder, b"\x89PNG\r\n\x1a\n" + chunk)


@threat("image: half a picture", "expected a readable image", IMAGES)
def half_a_picture(folder: Path) -> Path:
    return _image(folder, b"\xff\xd8\xff\xe0\x00\x10JFIF\x00")


@threat("image: a FIFO", "expected a readable image", IMAGES)
def fifo_image(folder: Path) -> Path:
    made = _image(folder, b"", "b.txt")
    os.mkfifo(made / "class" / "a.png")
    return made


@threat("image: one pixel by a million", "its shorter side resized to 64: expected at most", IMAGES)
def thin_image(folder: Path) -> Path:
    """Resized as models want it, 4 KB become gigabytes."""
    picture = io.BytesIO()
    Image.new("1", (1, 2_000_000)).save(picture, "PNG")
    return _image(folder, picture.getvalue())

"""Reads thousands of damaged recipes, labels and data files: `python -m torture.mutated_data --count 5000 --seed 0`.

Each is read as a recipe would read it. What must come of it: an error of ours, or the texts, numbers, pixels and
classes that another reader, written for this test, finds in its bytes; no other exception, no second over five and no
more than a gigabyte. Of damaged labels: an error, or the same classes in all other rows.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import resource
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image
from safetensors.torch import save
from torch import nn

from stockpot.adapters.labels import encode
from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.samples import read_splits
from stockpot.adapters.splits import Columns, DataSource, Share
from stockpot.errors import StockpotError
from stockpot.recipe.build import build_pool, build_task, cook_arguments
from stockpot.recipe.load import load_recipe
from torture.decoders import safetensors
from torture.mutated_language import LANGUAGE, edited, read_language
from torture.mutated_runs import mutate

SLOWEST, MOST_MEMORY = 5.0, 2**30
FEATURES, TEXT = Columns(features=("x",), label="y"), Columns(text=("t",), label="y")
WORDS = (
    b"NaN", b"NA", b"null", b"None", b"", b"1e999", b"-1", b"0.0", b"2.5", b"\xff", b"\0", b'"', b"[", b"{}",
    b"9" * 30, b"true", b"\n", b"\r", b",", b"inf", b"1_0", b"cat", b"\xe2\x80\xa8", b"\xff\xff\xff\x7f",
    b"\0\0\0\x40", b"\xff\xff\xff\xff",
)  # fmt: skip
Case = tuple[str, str, bytes, Columns]  # kind of data, file, content, columns


class Tokenizer:
    pad_token = eos_token = "x"
    model_max_length = 8

    def __call__(self, *texts: list[str], **_: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([[fingerprint(text) for text in row] for row in zip(*texts, strict=True)])}


def fingerprint(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) & 0x7FFFFFFF  # as any token id, it fits 32 bits


def originals() -> list[Case]:
    csv = b"t,x,y\nabc,1,0\ndef,2,1\nghi,3,0\n"
    jsonl = b'{"t": "abc", "x": [1, 2], "y": 0}\n{"t": "b", "x": [3, 4], "y": 1}\n'
    table = pa.table({"t": ["a", "b", "c"], "x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "y": [0, 1, 0]})
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 0])
    cases: list[Case] = [
        ("table", "a.csv", csv, FEATURES),
        ("table", "a.tsv", csv.replace(b",", b"\t"), TEXT),
        ("table", "a.jsonl", jsonl, FEATURES),
        ("table", "b.jsonl", jsonl, TEXT),
        ("table", "a.parquet", _bytes(lambda out: pq.write_table(table, out)), FEATURES),
        ("table", "b.parquet", _bytes(lambda out: pq.write_table(table, out, compression="zstd")), TEXT),
        ("dataset", "data.arrow", _bytes(lambda out: _stream(table, out)), FEATURES),
        ("arrays", "a.npz", _bytes(lambda out: np.savez_compressed(out, x=x, y=y)), FEATURES),
        ("arrays", "b.npz", _bytes(lambda out: np.savez(out, x=x, y=np.array(["a", "b", "a"]))), FEATURES),
        ("arrays", "a.safetensors", save({"x": torch.zeros(3, 2), "y": torch.tensor(y)}), FEATURES),
    ]
    pixels = np.random.RandomState(0).randint(0, 256, (9, 7, 3)).astype(np.uint8)
    wide = Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    for kind, image in {
        "PNG": Image.fromarray(pixels),
        "png": Image.fromarray(pixels).convert("P"),
        "pNg": wide,
        "GIF": Image.fromarray(pixels).convert("P"),
        "JPEG": Image.fromarray(pixels),
        "BMP": Image.fromarray(pixels),
    }.items():
        content = io.BytesIO()
        image.save(content, kind.upper())
        cases.append(("images", f"c/{image.mode}.{kind}", content.getvalue(), Columns(image="image")))
    return [*cases, *[("language", name, content, columns) for name, content, columns in LANGUAGE]]


def _bytes(write: Callable[[io.BytesIO], Any]) -> bytes:
    out = io.BytesIO()
    write(out)
    return out.getvalue()


def _stream(table: Any, out: io.BytesIO) -> None:
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)


def mutated(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        start = draw.randrange(len(changed) + 1)
        stop = min(len(changed), start + draw.randrange(1, 16))
        kind = draw.randrange(6)
        if kind == 0 and start < len(changed):
            changed[start] = draw.randrange(256)
        elif kind == 1:
            changed[start:start] = draw.choice(WORDS)
        elif kind == 2:
            changed[start:stop] = draw.choice(WORDS)
        elif kind == 3:
            del changed[start:stop]
        elif kind == 4:
            changed[start:start] = changed[start:stop]
        else:
            del changed[max(1, start) :]
    return bytes(changed)


def read(case: Case, content: bytes, folder: Path) -> str:
    kind, name, _, columns = case
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    if kind == "language":
        try:
            read_language(folder / name, columns, content)
        except StockpotError as error:
            return refused(error)
        return "read"
    if kind == "dataset":
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
    text = columns.text is not None
    model = LoadedModel(nn.Linear(1, 1), tokenizer=Tokenizer if text else None, keywords=text)
    path = folder if kind in ("images", "dataset") else folder / name
    source = DataSource(kind, path, columns, {"fit": Share()})
    wanted = ImageInput(size=(8, 8), resize=8, channels=3, interpolation="bicubic")
    try:
        made = read_splits(source, model, wanted, ("fit",))["fit"]
    except StockpotError as error:
        return refused(error)
    x, y = (made["input_ids"], made["labels"]) if text else made
    inputs, classes = independent(case, content)
    assert np.array_equal(x.numpy(), inputs, equal_nan=not text), (x, inputs)
    assert y.tolist() == classes, (y, classes)
    return "read"


# ---- the same files, read in another way


def independent(case: Case, content: bytes) -> tuple[Any, list[int]]:
    """Inputs and classes."""
    kind, name, _, columns = case
    if kind == "images":
        return pixels(content), [0]
    if name.endswith(("csv", "tsv")):
        names, *rows = separated(content.decode("utf-8-sig"), "\t" if name.endswith("tsv") else ",")
        found: Any = dict(zip(names, zip(*rows, strict=True), strict=True))
    elif name.endswith("jsonl"):
        lines = [json.loads(line) for line in re.split("\r\n|\r|\n", content.decode()) if line.strip()]
        found = {key: [line[key] for line in lines] for key in lines[0]}
    elif name.endswith("parquet"):
        found = pq.read_table(io.BytesIO(content)).to_pydict()
    elif name.endswith("arrow"):
        found = pa.ipc.open_stream(content).read_all().to_pydict()
    elif name.endswith("npz"):
        found = {key: array.tolist() for key, array in np.load(io.BytesIO(content)).items()}
    else:
        found = {
            key: np.frombuffer(data, kind).reshape(shape).tolist()
            for key, (kind, shape, data) in safetensors(content).items()
        }
    if columns.text is not None:
        return np.array([[fingerprint(plain(text))] for text in found["t"]]), classes_of(found["y"])
    return np.array(numbers(found["x"])).astype(np.float32), classes_of(found["y"])


def separated(text: str, delimiter: str) -> list[list[str]]:
    """Rows of cells; a quote counts at the beginning of a cell only, and two of them in a quoted cell are one."""
    rows, row, cell, state = list[list[str]](), list[str](), "", "start"
    for char in (*re.findall(r"\r\n|[\s\S]", text), "\n"):
        ends = char in ("\r\n", "\r", "\n")
        if state == "quoted" and char != '"':
            cell += char
        elif state == "quoted":
            state = "quote"
        elif char == '"' and state in ("start", "quote"):
            cell, state = cell + ('"' if state == "quote" else ""), "quoted"
        elif ends or char == delimiter:
            row, cell, state = [*row, cell], "", "start"
            if ends:
                rows, row = [*rows, row], []
        else:
            cell, state = cell + char, "plain"
    if state == "quoted":
        rows.append([*row, cell.removesuffix("\n")])
    return [row for row in rows if row != [""]]


def plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def numbers(value: Any) -> Any:
    return [numbers(inner) for inner in value] if isinstance(value, (list, tuple)) else float(value)


def classes_of(labels: Any) -> list[int]:
    flat = [label[0] if isinstance(label, list) else label for label in labels]
    texts = [plain(int(label) if isinstance(label, bool) else label).strip() for label in flat]
    try:
        return [int(float(text)) for text in texts]
    except ValueError:
        return [sorted(set(texts)).index(text) for text in texts]


def pixels(content: bytes) -> Any:
    picture: Any = Image.open(io.BytesIO(content))
    if picture.mode.startswith("I"):
        picture = Image.fromarray((np.asarray(picture) // 256).astype(np.uint8))
    picture = picture.convert("RGB")
    across, down = picture.size
    scaled = 8 * across // min(across, down), 8 * down // min(across, down)
    left, top = round((scaled[0] - 8) / 2), round((scaled[1] - 8) / 2)
    picture = picture.resize(scaled, Image.Resampling.BICUBIC).crop((left, top, left + 8, top + 8))
    return np.asarray(picture).transpose(2, 0, 1)[None]


# ---- what an error may say


def refused(error: StockpotError) -> str:
    """An error has a text, which is ours; what a library said may be quoted in it, but not how it failed."""
    words = str(error)
    assert words
    # Python's own words about a function of the user are quoted whole.
    assert not re.search(r"(?<!got an )unexpected|traceback|object at 0x", words, re.IGNORECASE), words
    assert len(words) < 40_000, f"{len(words)} letters"
    return "refused"


RECIPE = b"""\
pool: {path: pool, rename: {"a.": "b."}, mixed_dtypes: false, nonfinite: drop}
model: {python: "net:make", options: {width: 2}, device: cpu, autocast: none, statistics: average}
data:
  table: rows.csv
  features: [x, z]
  label: y
  target: class
  limits: {rows: 1000, pixels: 1000, bytes: 1MiB}
  train: 4
  fit: 8
  report: 0.5
  split_seed: 1
  batch_size: 16
  metric: accuracy
method: {name: "mehl+", steps: 5, lr: 0.01, batch_size: 8, each: {"hl+": {steps: 3}}}
finetune: {dir: pool, trials: 3, lr: {min: 0.0001, max: 0.01, scale: log}, epochs: [1, 2], mixup: 0.1}
output: {dir: run, seed: 3, max_shard_size: 1GB, overwrite: false}
"""
NET = "from torch import nn\ndef make(width=2):\n    return nn.Linear(width, 2)\n"


def cooked(draw: random.Random, folder: Path) -> str:
    """A damaged recipe is loaded, and its pool and task are built where it can be true; nothing is cooked."""
    for k in range(2):
        (folder / "pool").mkdir(exist_ok=True)
        (folder / "pool" / f"{k}.safetensors").write_bytes(
            save({"weight": torch.full((2, 2), float(k)), "bias": torch.zeros(2)})
        )
    (folder / "net.py").write_text(NET)
    (folder / "rows.csv").write_text("x,z,y\n" + "".join(f"{n},{n % 3},{n % 2}\n" for n in range(24)))
    recipe, content = folder / "recipe.yaml", RECIPE
    if draw.random() < 0.5:
        content = mutated(content, draw)
    else:  # one value becomes another
        document = yaml.safe_load(content)
        mutate(document, draw)
        content = json.dumps(document).encode("utf-8", "surrogatepass")
    recipe.write_bytes(content)
    try:
        found = load_recipe(recipe)
        cook_arguments(found, "compare")
        if found.pool.path == ("pool",) or draw.random() < 0.2:
            build_pool(found)
            build_task(found)
    except StockpotError as error:
        return refused(error)
    return "read"


def relabelled(draw: random.Random) -> str:
    """One cell of a column of labels is replaced: refused, or every other row keeps its class."""
    names = ("ant", "bee", "cat", "dog")
    options: dict[str, Any]
    cells, options = draw.choice(
        (
            ([str(n % 12) for n in range(60)], {}),
            ([f"{n % 12}.0" for n in range(60)], {"head": 12}),
            ([names[n % 4] for n in range(60)], {"model_names": names[::-1]}),
            ([names[n % 4] for n in range(60)], {"head": 4}),
            ([names[n % 4] for n in range(60)], {"classes": ("x", *names)}),
        )
    )
    before = encode({"fit": cells}, **options)["fit"]
    row = draw.randrange(60)
    odd: Any = draw.choice((None, float("nan"), draw.choice(WORDS), draw.choice(cells), str(draw.random())))
    changed: list[Any] = [*cells[:row], odd, *cells[row + 1 :]]
    try:
        after = encode({"fit": changed}, **options)["fit"]
    except StockpotError as error:
        if f"row {row} " not in str(error) and not str(error).startswith("labels:"):
            raise AssertionError(f"row {row} is not named: {error}") from error
        return refused(error)
    assert np.array_equal(np.delete(before, row), np.delete(after, row)), (odd, options)
    return "read"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    cases = originals()
    spoken = [case for case in cases if case[0] == "language"]
    counts, failures = Counter[tuple[str, str]](), []
    before = _peak()
    for number in range(given.count):
        draw = random.Random(f"{given.seed}/{number}")
        case = draw.choice(cases if number % 4 == 2 else spoken) if number % 4 > 1 else None
        name, began = case[1] if case else ("labels", "recipe")[number % 4], time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="mutated-") as place:
                if case:
                    spoilt = edited if case[0] == "language" and draw.random() < 0.7 and ".json" in name else mutated
                    happened = read(case, spoilt(case[2], draw), Path(place))
                else:
                    happened = cooked(draw, Path(place)) if name == "recipe" else relabelled(draw)
        except Exception as error:
            happened = "FAILED"
            failures.append(f"case {number}, {name}: {type(error).__name__}: {error}"[:300])
        if time.monotonic() - began > SLOWEST or _peak() - before > MOST_MEMORY:
            failures.append(f"case {number}, {name}: {time.monotonic() - began:.1f} s, {_peak():,} bytes")
            before = _peak()
        counts[name, happened] += 1
    for (name, happened), count in sorted(counts.items()):
        print(f"{name:16} {happened:8} {count:6,}")
    print("\n".join(failures[:50]))
    print(f"{given.count:,} damaged data files, seed {given.seed}, {len(failures)} failures")
    return 1 if failures else 0


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())

"""What the table of tensors in a file of torch.save may say about its storages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool_files import write

from stockpot.errors import CheckpointError
from stockpot.pool import open_checkpoint
from stockpot.pool.pickles import CodeError, PickleError, check_table

FLOATS = b"ctorch\nFloatStorage\n"


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


def place(*parts: bytes) -> bytes:
    return b"\x80\x02(" + b"".join(parts) + b"tQ."


def storage(kind: bytes = FLOATS, key: bytes = text(b"0"), count: bytes = b"K\x04") -> bytes:
    return place(text(b"storage"), kind, key, text(b"cpu"), count)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (FLOATS, 4),
        (b"ctorch\nDoubleStorage\n", 8),
        (b"ctorch\nHalfStorage\n", 2),
        (b"ctorch\nBFloat16Storage\n", 2),
        (b"ctorch\nBoolStorage\n", 1),
        (b"ctorch\nComplexDoubleStorage\n", 16),
        (b"ctorch.storage\nUntypedStorage\n", 1),
    ],
)
def test_a_storage_has_exactly_the_bytes_that_are_there(kind: bytes, size: int) -> None:
    check_table(storage(kind), {"0": 4 * size})
    for other in (4 * size - 1, 4 * size + 1, 0):
        with pytest.raises(PickleError, match=f"'0' has {4 * size} bytes, and there are {other} bytes"):
            check_table(storage(kind), {"0": other})
    with pytest.raises(PickleError, match="and there are none"):
        check_table(storage(kind), {"1": 4 * size})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (storage(kind=text(b"torch.FloatStorage")[:-1] + b"x"), "unknown type"),
        (storage(kind=b"K\x01"), "in an unknown form"),
        (storage(key=b"K\x00"), "in an unknown form"),
        (storage(count=text(b"4")), "in an unknown form"),
        (storage(count=b"N"), "in an unknown form"),
        (storage(kind=b"ctorch\nfloat32\n"), "unknown type 'torch.float32'"),
        (place(text(b"storage"), FLOATS, text(b"0"), text(b"cpu")), "not a storage"),
        (place(text(b"storage"), FLOATS, text(b"0"), text(b"cpu"), b"K\x04", b"N"), "not a storage"),
        (place(text(b"module"), FLOATS, text(b"0"), text(b"cpu"), b"K\x04"), "not a storage"),
        (b"\x80\x02K\x01Q.", "not a storage"),
    ],
)
def test_other_things_outside_the_table_are_refused(content: bytes, words: str) -> None:
    with pytest.raises(PickleError, match=words):
        check_table(content, {"0": 16})


@pytest.mark.parametrize(
    "name", [b"torch\nload", b"torch\nFloatTensor", b"builtins\neval", b"torch.nn\nLinear"]
)
def test_names_outside_the_list_are_refused(name: bytes) -> None:
    with pytest.raises(CodeError):
        check_table(b"\x80\x02c" + name + b"\n.", {})


@pytest.mark.parametrize(
    "name", [b"torch\nfloat32", b"torch\nbfloat16", b"torch\nTensor", b"torch\nper_tensor_affine"]
)
def test_names_in_the_list_may_be_mentioned(name: bytes) -> None:
    check_table(b"\x80\x02c" + name + b"\n.", {})


def test_many_names_for_one_tensor_are_fine_within_reason(tmp_path: Path) -> None:
    weight = torch.zeros(400_000)  # 1.6 MB
    path = write(tmp_path / "m.pt", {f"w{k}": weight for k in range(60)})
    assert len(open_checkpoint(path).specs) == 60
    path = write(tmp_path / "m.pt", {f"w{k}": weight for k in range(70)})
    with pytest.raises(CheckpointError, match="at most 64 times as many bytes of tensors as the file has"):
        open_checkpoint(path)

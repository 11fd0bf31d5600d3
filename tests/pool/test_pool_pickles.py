"""The table of tensors of torch.save is followed without being run: what it names, calls, builds and costs."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import write

from stockpot.errors import CheckpointError
from stockpot.pool import open_checkpoint
from stockpot.pool.pickles import CodeError, PickleError, check_pickle, check_table


def refusal(content: bytes) -> str:
    with pytest.raises(PickleError) as caught:
        check_pickle(content)
    return str(caught.value)


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "text", None, True, False], ("t", 1): {}, 7: ()},
        [[], [[1], [2, [3]]], {"x": {"y": {"z": 1}}}],
        (1, 2, 3, 4, 5),
        OrderedDict(a=1, b=2),
        {1, 2, 3},
        b"bytes \xff",
        -(2**40),
        2**71 - 1,
    ],
    ids=str,
)
def test_plain_values_pass(value: Any) -> None:
    assert check_pickle(pickle.dumps(value, 2)) == []


def test_names_that_are_not_known_are_refused_by_their_full_name() -> None:
    with pytest.raises(CodeError) as caught:
        check_pickle(pickle.dumps(print, 2))
    assert caught.value.name == "__builtin__.print"
    assert str(caught.value) == "it asks for __builtin__.print, which could run code"


def test_what_is_known_may_be_mentioned_and_not_called() -> None:
    check_pickle(b"\x80\x02ctorch\nTensor\n.")
    with pytest.raises(CodeError, match=r"torch\.Tensor"):
        check_pickle(b"\x80\x02ctorch\nTensor\n)R.")
    with pytest.raises(CodeError, match=r"torch\.Tensor"):
        check_pickle(b"\x80\x02ctorch\nTensor\n)\x81.")


def test_only_names_are_called() -> None:
    assert "calls something that is not a name" in refusal(b"\x80\x02K\x01)R.")


def test_only_what_may_be_built_is_built() -> None:
    check_pickle(b"\x80\x02ccollections\nOrderedDict\n)R}b.")
    assert "changes the inside of builtins.set" in refusal(b"\x80\x02cbuiltins\nset\n)R}b.")
    assert "changes the inside of a plain value" in refusal(b"\x80\x02]}b.")
    # What is built stays what it is: it may be built again.
    check_pickle(b"\x80\x02ccollections\nOrderedDict\n)R}b}b.")


def test_a_function_given_to_a_function_is_checked_too() -> None:
    start = b"\x80\x02ctorch._tensor\n_rebuild_from_type_v2\n"
    check_pickle(start + b"(ctorch._utils\n_rebuild_tensor_v2\nN)}tR.")
    with pytest.raises(CodeError, match=r"torch\.Tensor"):
        check_pickle(start + b"(ctorch\nTensor\nN)}tR.")
    assert "not a name" in refusal(start + b"(K\x01tR.")
    assert "not a name" in refusal(start + b")R.")


@pytest.mark.parametrize("codec", [b"punycode", b"idna", b"rot13", b"zip", b"latin-1"])
def test_bytes_are_encoded_as_pickles_write_them_and_in_no_other_way(codec: bytes) -> None:
    """Some codecs take time quadratic in the length of the text."""
    content = pickle.dumps(b"\x80\xff", 2)
    assert b"latin1" in content
    check_pickle(content)
    other = content.replace(b"\x06\x00\x00\x00latin1", len(codec).to_bytes(4, "little") + codec)
    assert "encodes bytes in another way" in refusal(other)
    assert "encodes bytes in another way" in refusal(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00a\x85R.")


def test_what_it_refers_to_outside_is_told() -> None:
    content = b"\x80\x02](X\x01\x00\x00\x00actorch\nTensor\nK\x07NtQaK\x05\x85Qa."
    assert check_pickle(content) == [("a", "torch.Tensor", 7, None), (5,)]


def _doubled(levels: int) -> bytes:
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (k, k) for k in range(levels))


@pytest.mark.parametrize(
    "around",
    [
        lambda key: b"}" + key + b"Ns",  # SETITEM
        lambda key: b"}(K\x01K\x02" + key + b"Nu",  # SETITEMS, the second key
        lambda key: b"cbuiltins\nset\n](" + key + b"e\x85R",  # set([key])
        lambda key: b"cbuiltins\nset\n]" + key + b"a\x85R",  # the same, appended one by one
    ],
)
def test_keys_that_take_for_ever_to_hash_are_refused(around: Any) -> None:
    assert "too long to hash" in refusal(b"\x80\x02" + around(_doubled(40)) + b".")
    check_pickle(b"\x80\x02" + around(_doubled(10)) + b".")


def test_many_keys_that_each_take_a_little_are_refused_together() -> None:
    key = _doubled(17)  # 262,143 steps
    assert "too long to hash" in refusal(b"\x80\x02}" + (key + b"Ns") * 60 + b".")
    check_pickle(b"\x80\x02}" + (key + b"Ns") * 20 + b".")


def test_values_may_be_shared_as_often_as_they_like() -> None:
    check_pickle(b"\x80\x02}K\x01" + _doubled(40) + b"s.")


def test_depth_has_a_limit() -> None:
    check_pickle(b"\x80\x02K\x01" + b"\x85" * 99 + b".")
    assert "nested more than 100 deep" in refusal(b"\x80\x02K\x01" + b"\x85" * 100 + b".")


def test_numbers_have_a_limit() -> None:
    for value in (2**72 - 1, -(2**72) + 1):
        check_pickle(pickle.dumps(value, 2))
    for value in (2**72, -(2**72), 10**100):
        assert "a number of" in refusal(pickle.dumps(value, 2))
    assert "the instruction LONG4" in refusal(pickle.dumps(10**1000, 2))


def test_numbers_of_values_have_a_limit() -> None:
    content = b"\x80\x02Nr\x09\x00\x00\x00."
    assert len(content) == 9
    check_pickle(content)
    assert "more than it can have" in refusal(b"\x80\x02Nr\x0a\x00\x00\x00.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no valid pickle"),
        (b"\x80\x02", "no valid pickle"),
        (b"\x80\x02a.", "no valid pickle"),
        (b"\x80\x02h\x05.", "no valid pickle"),
        (b"\x80\x02t.", "no valid pickle"),
        (b"\x80\x02K\x01\x86.", "empty stack"),
        (b"\x80\x06N.", "protocol 6"),
        (b"\x80\x02(iposix\nsystem\n.", "the instruction INST"),
        (b"\x80\x02(N" + b"o.", "the instruction OBJ"),
        (b"\x80\x02\x82\x01.", "the instruction EXT1"),
        (b"\x80\x04\x8c\x05posix\x8c\x06system\x93.", "the instruction SHORT_BINUNICODE"),
        (b"\x80\x02](N1.", "the instruction POP_MARK"),
        (b"\x80\x02Pid\n.", "the instruction PERSID"),
        (b"\x80\x04N)}\x92.", "the instruction NEWOBJ_EX"),
        (b"\x80\x05\x97.", "the instruction NEXT_BUFFER"),
    ],
)
def test_what_is_no_plain_pickle(content: bytes, words: str) -> None:
    assert words in refusal(content)


def test_the_stack_is_followed_exactly() -> None:
    check_pickle(b"\x80\x02](NNe.")
    check_pickle(b"\x80\x02]K\x05\x85Qa.")  # something outside is a value
    assert "no valid pickle" in refusal(b"\x80\x02(Na.")


# What the table of tensors in a file of torch.save may say about its storages.

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


@pytest.mark.parametrize("name", [b"torch\nload", b"torch\nFloatTensor", b"builtins\neval", b"torch.nn\nLinear"])
def test_names_outside_the_list_are_refused(name: bytes) -> None:
    with pytest.raises(CodeError):
        check_table(b"\x80\x02c" + name + b"\n.", {})


@pytest.mark.parametrize("name", [b"torch\nfloat32", b"torch\nbfloat16", b"torch\nTensor", b"torch\nper_tensor_affine"])
def test_names_in_the_list_may_be_mentioned(name: bytes) -> None:
    check_table(b"\x80\x02c" + name + b"\n.", {})


def test_many_names_for_one_tensor_are_fine_within_reason(tmp_path: Path) -> None:
    weight = torch.zeros(400_000)  # 1.6 MB
    path = write(tmp_path / "m.pt", {f"w{k}": weight for k in range(60)})
    assert len(open_checkpoint(path).specs) == 60
    path = write(tmp_path / "m.pt", {f"w{k}": weight for k in range(70)})
    with pytest.raises(CheckpointError, match="at most 64 times as many bytes of tensors as the file has"):
        open_checkpoint(path)

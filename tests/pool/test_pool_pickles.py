"""A pickle is followed without being run: what it names, calls, builds, refers to, and what it would cost."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import pytest

from stockpot.pool.pickles import CodeError, PickleError, check_pickle


def refusal(content: bytes) -> str:
    with pytest.raises(PickleError) as caught:
        check_pickle(content)
    return str(caught.value)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "text", None, True, False], ("t", 1): {}, 7: ()},
        [[], [[1], [2, [3]]], {"x": {"y": {"z": 1}}}],
        (1, 2, 3, 4, 5),
        OrderedDict(a=1, b=2),
        -(2**40),
        2**71 - 1,
    ],
    ids=str,
)
def test_plain_values_of_every_protocol_pass(value: Any, protocol: int) -> None:
    assert check_pickle(pickle.dumps(value, protocol)) == []


@pytest.mark.parametrize("protocol", [2, 4])
def test_sets_pass_where_they_are_known(protocol: int) -> None:
    check_pickle(pickle.dumps({1, 2, 3}, protocol))


def test_names_that_are_not_known_are_refused_by_their_full_name() -> None:
    with pytest.raises(CodeError) as caught:
        check_pickle(pickle.dumps(print))
    assert caught.value.name == "builtins.print"
    assert str(caught.value) == "it asks for builtins.print, which could run code"


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
        lambda key: b"(" + key + b"Nd",  # DICT
        lambda key: b"\x8f(" + key + b"\x90",  # ADDITEMS
        lambda key: b"(" + key + b"\x91",  # FROZENSET
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
        check_pickle(pickle.dumps(value))
    for value in (2**72, -(2**72), 10**100):
        assert "a number of" in refusal(pickle.dumps(value))
    assert "the instruction LONG4" in refusal(pickle.dumps(10**1000))


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
        (b"\x80\x02Pid\n.", "the instruction PERSID"),
        (b"\x80\x04N)}\x92.", "the instruction NEWOBJ_EX"),
        (b"\x80\x05\x97.", "the instruction NEXT_BUFFER"),
    ],
)
def test_what_is_no_plain_pickle(content: bytes, words: str) -> None:
    assert words in refusal(content)


def test_the_stack_is_followed_exactly() -> None:
    """POP drops a value, or a mark when there is nothing above it; POP_MARK drops all above one; DUP doubles."""
    check_pickle(b"\x80\x02]NK\x010a.")
    check_pickle(b"\x80\x02](0Na.")
    check_pickle(b"\x80\x02](NN1Na.")
    check_pickle(b"\x80\x02N2\x86.")
    assert "no valid pickle" in refusal(b"\x80\x02(N1a.")
    check_pickle(b"\x80\x04](K\x01\x91a.")  # a frozenset is a value
    check_pickle(b"\x80\x02]K\x05\x85Qa.")  # and so is something outside
    check_pickle(b"\x80\x04]\x94(h\x00e.")  # MEMOIZE numbers from nothing

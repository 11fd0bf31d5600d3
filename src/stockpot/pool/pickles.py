"""The table of tensors in a file of torch.save, followed without being run.

A pickle is a program for a small machine. Before torch runs it, its instructions are followed here with stand-ins
in place of objects, which calls nothing and costs about as much as reading it. Three things are found out: which
names of Python it asks for, what it would call, and whether it would hang or crash whatever runs it (keys that take
for ever to hash, codecs that take for ever to encode, numbers that make tables of gigabytes).

The list of names is shorter than the one of `torch.load(weights_only=True)`, which lets a file call what allocates
any amount of memory (`bytearray`, `FloatTensor`, `UntypedStorage`), and it does not depend on what the process has
allowed with `add_safe_globals`.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from stockpot.pool.source import reason

_STORAGES = {  # size of one element in bytes
    f"torch.{kind}Storage": size
    for size, kinds in {
        1: "Char Byte Bool QInt8 QUInt8 storage.Untyped",
        2: "Half BFloat16 Short",
        4: "Float Int QInt32",
        8: "Double Long ComplexFloat",
        16: "ComplexDouble",
    }.items()
    for kind in kinds.split()
}
_BY_TYPE = "torch._tensor._rebuild_from_type_v2"  # calls its first argument
_ENCODE = "_codecs.encode"  # how protocol 2 writes bytes
# Sparse, quantised and meta tensors cannot be mixed, but are loaded so that the error can name them.
_REBUILT = "tensor tensor_v2 tensor_v3 parameter parameter_with_state sparse_tensor qtensor meta_tensor_no_storage"
_CALLED = {
    *(f"torch._utils._rebuild_{kind}" for kind in _REBUILT.split()),
    *(f"{module}.{kind}" for module in ("builtins", "__builtin__") for kind in ("set", "complex")),
    *("collections.OrderedDict", "collections.Counter", "torch.Size", "torch.device"),
    *("torch.serialization._get_layout", _BY_TYPE, _ENCODE),
}
_BUILT = {"collections.OrderedDict"}  # a state dict carries its version in an attribute
_KNOWN = {
    *_CALLED,
    *_STORAGES,
    *(str(value) for value in vars(torch).values() if isinstance(value, (torch.dtype, torch.qscheme))),
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
}

_MOST_HASHING = 10_000_000  # steps; well under a second
_DEEPEST = 100  # tuples in tuples; hashing recurses without a limit of its own
_LONGEST_NUMBER = 9  # bytes; longer ones can all be made to hash alike
_NEWEST = 5  # protocol
# Instructions of torch.save's protocol 2; torch itself reads no others.
_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINSTRING", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT",
}  # fmt: skip


class PickleError(Exception):
    """The reason why a pickle is not touched."""


class CodeError(PickleError):
    """It asks for something that is not plain data. `name` says for what."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it asks for {name[:200]}, which could run code")
        self.name = name


def check_table(table: bytes, sizes: Mapping[str, int]) -> None:
    """Raise PickleError where the table asks for more than tensors, or for bytes that its storages do not have.

    `sizes` are the bytes of each storage by its key.
    """
    for place in check_pickle(table):
        if len(place) != 5 or place[0] != "storage":
            raise PickleError("it refers to something that is not a storage")
        _, kind, key, _, count = place
        if not isinstance(kind, str) or not isinstance(key, str) or not isinstance(count, int):
            raise PickleError("it refers to a storage in an unknown form")
        if kind not in _STORAGES:
            raise PickleError(f"it refers to a storage of the unknown type {kind!r}")
        wanted = count * _STORAGES[kind]
        if sizes.get(key) != wanted:
            found = f"{sizes[key]:,} bytes" if key in sizes else "none"
            raise PickleError(f"it says storage {key!r} has {wanted:,} bytes, and there are {found}")


def check_pickle(content: bytes) -> list[tuple[object, ...]]:
    """Raise PickleError unless it keeps to what is allowed.

    Returns what it says about each object outside the pickle: texts, numbers and names of Python.
    """
    machine = _Machine(len(content))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # escapes that Python only warns of: no pickle is written with them
            for opcode, argument, _ in pickletools.genops(content):
                machine.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, Warning) as error:
        raise PickleError(f"no valid pickle: {reason(error)}") from error
    return machine.outside


class _Thing:
    """A stand-in for an object: what it costs to hash it, and the little that decides what is called."""

    __slots__ = ("depth", "items", "made_by", "name", "value", "weight")

    def __init__(self, items: list[_Thing] | None = None, *, name: str | None = None, value: object = None) -> None:
        self.items: list[_Thing] = items or []
        self.name = name  # of something in Python
        self.value = value  # of a text or number
        self.made_by: str | None = None  # the name that was called to make it
        self.weight: int = min(1 + sum(item.weight for item in self.items), _MOST_HASHING + 1)
        self.depth: int = 1 + max((item.depth for item in self.items), default=0)
        if self.depth > _DEEPEST:
            raise PickleError(f"its values are nested more than {_DEEPEST} deep")

    def grow(self, things: list[_Thing]) -> None:
        """A list or table grows in place. Its depth does not count: it cannot be hashed."""
        self.weight = min(self.weight + sum(thing.weight for thing in things), _MOST_HASHING + 1)


class _Machine:
    def __init__(self, size: int) -> None:
        self.outside: list[tuple[object, ...]] = []
        self._size = size  # of the whole pickle in bytes
        self._stack: list[_Thing] = []
        self._below: list[list[_Thing]] = []  # what was on the stack at each mark
        self._memo: dict[int, _Thing] = {}
        self._hashed = 0

    def step(self, opcode: str, argument: Any) -> None:
        stack = self._stack
        if opcode in _VALUES:
            if isinstance(argument, int) and argument.bit_length() > 8 * _LONGEST_NUMBER:
                raise PickleError(f"it holds a number of {argument.bit_length()} bits")
            stack.append(_Thing(value=argument))
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            if argument > self._size:
                raise PickleError(f"it numbers its values up to {argument}, more than it can have")
            self._memo[argument] = stack[-1]
        elif opcode == "MARK":
            self._below.append(stack)
            self._stack = []
        elif opcode in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            things = self._since_mark() if opcode == "TUPLE" else self._last(int(opcode[-1]))
            self._stack.append(_Thing(things))
        elif opcode in ("APPEND", "APPENDS"):
            things = self._since_mark() if opcode == "APPENDS" else self._last(1)
            self._stack[-1].grow(things)
        elif opcode in ("SETITEM", "SETITEMS"):
            things = self._since_mark() if opcode == "SETITEMS" else self._last(2)
            self._hash(things[::2])
            self._stack[-1].grow(things)
        elif opcode == "GLOBAL":
            name = argument.replace(" ", ".", 1)
            if name not in _KNOWN:
                raise CodeError(name)
            stack.append(_Thing(name=name))
        elif opcode in ("REDUCE", "NEWOBJ"):
            stack.append(self._called(*self._last(2)))
        elif opcode == "BUILD":
            built, state = self._last(2)
            if built.made_by not in _BUILT:
                raise PickleError(f"it changes the inside of {built.made_by or 'a plain value'}")
            built.grow([state])
            stack.append(built)
        elif opcode == "BINPERSID":
            (place,) = self._last(1)
            self.outside.append(tuple(item.name or item.value for item in place.items))
            stack.append(_Thing([place]))
        elif opcode == "PROTO" and argument > _NEWEST:
            raise PickleError(f"it is of protocol {argument}, which does not exist")
        elif opcode not in ("PROTO", "STOP"):
            raise PickleError(f"it uses the instruction {opcode}, which torch.save does not write")

    def _since_mark(self) -> list[_Thing]:
        things, self._stack = self._stack, self._below.pop()
        return things

    def _last(self, count: int) -> list[_Thing]:
        if len(self._stack) < count:
            raise PickleError("no valid pickle: it takes from an empty stack")
        things = self._stack[-count:]
        del self._stack[-count:]
        return things

    def _hash(self, things: list[_Thing]) -> None:
        self._hashed += sum(thing.weight for thing in things)
        if self._hashed > _MOST_HASHING:
            raise PickleError("its keys would take too long to hash")

    def _called(self, function: _Thing, arguments: _Thing) -> _Thing:
        # One of the functions calls its first argument.
        for called in (function, *((arguments.items or [arguments])[:1] if function.name == _BY_TYPE else ())):
            if called.name is None:
                raise PickleError("it calls something that is not a name")
            if called.name not in _CALLED:
                raise CodeError(called.name)
        if function.name == _ENCODE and [item.value for item in arguments.items[1:]] != ["latin1"]:
            # Other codecs, such as punycode and idna, take time quadratic in the length of the text.
            raise PickleError("it encodes bytes in another way than pickles are written")
        self._hash([arguments])  # a set hashes what it is made of
        made = _Thing([arguments])
        made.made_by = function.name
        return made

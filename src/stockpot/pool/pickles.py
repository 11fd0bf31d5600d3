"""Pickles, followed without being run: the table of tensors in a file of torch.save, and what any other one describes.

A pickle is a program for a small machine. Here its instructions are followed with stand-ins in place of objects: where
Python would look up a name or call it, it is noted what would have been called with what, and nothing is. So there is
nothing that such a file could run, whatever it asks for.

Before torch runs a table of tensors, three things are found out, at about the cost of reading it: which names of Python
it asks for, what it would call, and whether it would hang or crash whatever runs it (keys that take for ever to hash,
codecs that take for ever to encode, numbers that make tables of gigabytes). The list of names is shorter than the one
of `torch.load(weights_only=True)`, which lets a file call what allocates any amount of memory (`bytearray`,
`FloatTensor`, `UntypedStorage`), and it does not depend on what the process has allowed with `add_safe_globals`.
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
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
# Instructions that put a value on the stack, and the value where they carry none themselves.
_VALUES: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False} | dict.fromkeys((
    "NONE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "SHORT_BINUNICODE",
    "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
))  # fmt: skip
_LATER = {"SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "MEMOIZE", "STACK_GLOBAL", "FRAME"}
# Those of torch.save's protocol 2; torch itself reads no others.
_OF_TORCH = (_VALUES.keys() - _LATER) | {
    "BINGET", "LONG_BINGET", "BINPUT", "LONG_BINPUT", "MARK", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "TUPLE",
    "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "GLOBAL", "REDUCE", "NEWOBJ", "BUILD",
    "BINPERSID", "PROTO", "STOP",
}  # fmt: skip
_PLAIN = (_OF_TORCH | _LATER) - {"SHORT_BINSTRING", "BINPERSID"}


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
    machine = _Machine(len(content), of_torch=True)
    machine.follow(content)
    return machine.outside


def pickled_values(content: bytes) -> object:
    """The value that a pickle describes, with any names and calls in it; PickleError where it is none."""
    machine = _Machine(len(content), of_torch=False)
    machine.follow(content)
    if len(machine.stack) != 1:
        raise PickleError("no valid pickle: it leaves more or less than one value")
    return machine.stack[0]


@dataclass(frozen=True)
class Named:
    """Something in Python, by its name alone."""

    name: str


class _Whole:
    """What has parts: what it costs to hash it, and how deep it is."""

    weight = depth = 1

    def hold(self, things: Collection[object], *, below: bool = True) -> None:
        self.weight = min(self.weight + sum(map(_weight, things)), _MOST_HASHING + 1)
        if below:
            self.depth = 1 + max((getattr(thing, "depth", 1) for thing in things), default=0)
            if self.depth > _DEEPEST:
                raise PickleError(f"its values are nested more than {_DEEPEST} deep")


def _weight(thing: object) -> int:
    return thing.weight if isinstance(thing, _Whole) else 1


class Row(tuple[Any, ...], _Whole):
    """A tuple."""


class Items(list[Any], _Whole):
    """A list. Its depth does not count: it cannot be hashed."""


class Pairs(list[tuple[Any, Any]], _Whole):
    """A table, as pairs of key and value: hashing keys can be made to take for ever."""


@dataclass(eq=False)
class Made(_Whole):
    """What a call would have made: the name that would have been called, its arguments, and what is set on it."""

    name: str
    arguments: object
    fields: dict[str, Any] = field(default_factory=dict)  # what is set, by name where it is a table
    state: object = None


_EMPTY = {"EMPTY_TUPLE": Row, "EMPTY_LIST": Items, "EMPTY_DICT": Pairs}


class _Machine:
    """What pickles are programs for. Only those `of_torch` will be run, and must keep to what is known."""

    def __init__(self, size: int, *, of_torch: bool) -> None:
        self.outside: list[tuple[object, ...]] = []
        self.stack: list[Any] = []
        self._size = size  # of the whole pickle in bytes
        self._of_torch = of_torch
        self._known = _OF_TORCH if of_torch else _PLAIN
        self._below: list[list[Any]] = []  # what was on the stack at each mark
        self._memo: dict[int, object] = {}
        self._hashed = 0

    def follow(self, content: bytes) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # escapes that Python only warns of: no pickle is written with them
                for opcode, argument, _ in pickletools.genops(content):
                    self._step(opcode.name, argument)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, Warning) as error:
            raise PickleError(f"no valid pickle: {reason(error)}") from error

    def _step(self, opcode: str, argument: Any) -> None:
        if opcode not in self._known:
            wrong = "torch.save does not write" if self._of_torch else "is not read here"
            raise PickleError(f"it uses the instruction {opcode}, which {wrong}")
        stack = self.stack
        if opcode in _VALUES:
            if self._of_torch and isinstance(argument, int) and argument.bit_length() > 8 * _LONGEST_NUMBER:
                raise PickleError(f"it holds a number of {argument.bit_length()} bits")
            stack.append(_VALUES[opcode] if argument is None else argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            number = len(self._memo) if argument is None else argument
            if number > self._size:
                raise PickleError(f"it numbers its values up to {number}, more than it can have")
            self._memo[number] = stack[-1]
        elif opcode == "MARK":
            self._below.append(stack)
            self.stack = []
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode.startswith("TUPLE"):
            row = Row(self._since_mark() if opcode == "TUPLE" else self._last(int(opcode[-1])))
            if self._of_torch:
                row.hold(row)
            self.stack.append(row)
        elif opcode in ("APPEND", "APPENDS"):
            things = self._since_mark() if opcode == "APPENDS" else self._last(1)
            self._grow(things, things)
        elif opcode in ("SETITEM", "SETITEMS"):
            things = self._since_mark() if opcode == "SETITEMS" else self._last(2)
            self._hash(things[::2])
            self._grow(things, zip(things[::2], things[1::2], strict=True))
        elif opcode in ("GLOBAL", "STACK_GLOBAL"):
            name = argument.replace(" ", ".", 1) if opcode == "GLOBAL" else ".".join(self._last(2))
            if self._of_torch and name not in _KNOWN:
                raise CodeError(name)
            stack.append(Named(name))
        elif opcode in ("REDUCE", "NEWOBJ"):
            stack.append(self._called(*self._last(2)))
        elif opcode == "BUILD":
            (state,) = self._last(1)
            self._build(stack[-1], state)
        elif opcode == "BINPERSID":
            (place,) = self._last(1)
            parts = place if isinstance(place, Row) else ()
            self.outside.append(tuple(part.name if isinstance(part, Named) else part for part in parts))
            stack.append(place)
        elif opcode == "PROTO" and argument > _NEWEST:
            raise PickleError(f"it is of protocol {argument}, which does not exist")

    def _since_mark(self) -> list[Any]:
        things, self.stack = self.stack, self._below.pop()
        return things

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleError("no valid pickle: it takes from an empty stack")
        things = self.stack[-count:]
        del self.stack[-count:]
        return things

    def _grow(self, things: list[object], items: Iterable[object]) -> None:
        if self._of_torch:
            self.stack[-1].hold(things, below=False)
        else:
            self.stack[-1].extend(items)

    def _hash(self, things: Iterable[object]) -> None:
        self._hashed += sum(map(_weight, things)) if self._of_torch else 0
        if self._hashed > _MOST_HASHING:
            raise PickleError("its keys would take too long to hash")

    def _called(self, function: Any, arguments: Any) -> Made:
        if self._of_torch:
            parts = arguments if isinstance(arguments, Row) else ()
            # One of the functions calls its first argument.
            for called in (function, *((parts or (None,))[:1] if function == Named(_BY_TYPE) else ())):
                if not isinstance(called, Named):
                    raise PickleError("it calls something that is not a name")
                if called.name not in _CALLED:
                    raise CodeError(called.name)
            if function.name == _ENCODE and list(parts[1:]) != ["latin1"]:
                # Other codecs, such as punycode and idna, take time quadratic in the length of the text.
                raise PickleError("it encodes bytes in another way than pickles are written")
            self._hash([arguments])  # a set hashes what it is made of
        made = Made(function.name, arguments)
        if self._of_torch:
            made.hold([arguments])
        return made

    def _build(self, built: Any, state: object) -> None:
        name = built.name if isinstance(built, Made) else None
        if self._of_torch and name not in _BUILT:
            raise PickleError(f"it changes the inside of {name or 'a plain value'}")
        built.hold([state], below=False)
        built.state = state
        if isinstance(state, Pairs):
            built.fields = {name: value for name, value in state if isinstance(name, str)}

"""Looking through a pickle without unpickling it.

A pickle is a program for a small machine. Before anything runs it, its instructions are followed here with
stand-ins in place of objects, which calls nothing and costs about as much as reading it. Three things are
found out: which names of Python it asks for, what it would call, and whether it would hang or crash whatever
runs it (keys that take for ever to hash, numbers that make tables of gigabytes).
"""

from __future__ import annotations

import pickletools
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

_MOST_HASHING = 10_000_000  # steps; well under a second
_DEEPEST = 100  # tuples in tuples; hashing recurses without a limit of its own
_LONGEST_NUMBER = 9  # bytes; longer ones can all be made to hash alike
_NEWEST = 5
_GETS = {"GET", "BINGET", "LONG_BINGET"}
_PUTS = {"PUT", "BINPUT", "LONG_BINPUT"}
_NOTHING = {"PROTO", "FRAME", "STOP"}


class PickleError(Exception):
    """The reason why a pickle is not touched."""


class CodeError(PickleError):
    """It asks for something that is not plain data. `name` says for what."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it asks for {name[:200]}, which could run code")
        self.name = name


class _Thing:
    """Stands in for an object: what it costs to hash it, and the little that decides what is called."""

    __slots__ = ("depth", "items", "made_by", "name", "value", "weight")

    def __init__(
        self,
        items: tuple[_Thing, ...] = (),
        *,
        name: str | None = None,
        value: object = None,
        made_by: str | None = None,
    ) -> None:
        self.items = items
        self.name = name  # of something in Python
        self.value = value  # of a text or number
        self.made_by = made_by  # the name that was called to make it
        self.weight: int = min(1 + sum(item.weight for item in items), _MOST_HASHING + 1)
        self.depth: int = 1 + max((item.depth for item in items), default=0)
        if self.depth > _DEEPEST:
            raise PickleError(f"its values are nested more than {_DEEPEST} deep")

    def take(self, things: list[_Thing]) -> None:
        """A list or table grows in place. Its depth does not count: it cannot be hashed."""
        self.weight = min(self.weight + sum(thing.weight for thing in things), _MOST_HASHING + 1)


@dataclass(frozen=True)
class Allowed:
    """What a pickle may ask for, by full names."""

    known: Collection[str]  # may be mentioned
    called: Collection[str]  # may also be called
    built: Collection[str]  # of those, whose results may be given a state


def check_pickle(content: bytes, allowed: Allowed) -> list[tuple[object, ...]]:
    """Raise PickleError unless it keeps to what is allowed.

    Returns what it says about each object outside the pickle: texts, numbers and names of Python.
    """
    machine = _Machine(allowed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # escapes that Python only warns of: no pickle is written with them
            for opcode, argument, _ in pickletools.genops(content):
                machine.step(opcode.name, argument, len(content))
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, Warning) as error:
        raise PickleError(f"no valid pickle: {error}") from error
    return machine.outside


class _Machine:
    def __init__(self, allowed: Allowed) -> None:
        self.outside: list[tuple[object, ...]] = []
        self._allowed = allowed
        self._stack: list[_Thing] = []
        self._below: list[list[_Thing]] = []  # what was on the stack at each mark
        self._memo: dict[int, _Thing] = {}
        self._hashed = 0
        self._steps: dict[str, Callable[[Any], None]] = {
            "MARK": self._mark,
            "GLOBAL": lambda name: self._named(name.replace(" ", ".", 1)),
            "STACK_GLOBAL": self._stack_global,
            "TUPLE": lambda _: self._push(tuple(self._since_mark())),
            "LIST": lambda _: self._push(tuple(self._since_mark())),
            "DICT": lambda _: self._keep_all(self._since_mark(), into=_Thing()),
            "APPEND": lambda _: self._grow([self._stack.pop()]),
            "APPENDS": lambda _: self._grow(self._since_mark()),
            "SETITEM": lambda _: self._keep_all(self._last(2)),
            "SETITEMS": lambda _: self._keep_all(self._since_mark()),
            "ADDITEMS": lambda _: self._hash_all(self._since_mark()),
            "FROZENSET": lambda _: self._frozen(),
            "REDUCE": lambda _: self._call(),
            "NEWOBJ": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._refer(),
            "POP": lambda _: self._drop(),
            "POP_MARK": lambda _: self._discard(),
            "DUP": lambda _: self._stack.append(self._stack[-1]),
            "MEMOIZE": lambda _: self._memo.__setitem__(len(self._memo), self._stack[-1]),
        }

    def step(self, opcode: str, argument: Any, size: int) -> None:
        if opcode in self._steps:
            self._steps[opcode](argument)
        elif opcode in _GETS:
            self._stack.append(self._memo[int(argument)])
        elif opcode in _PUTS:
            if int(argument) > size:
                raise PickleError(f"it numbers its values up to {argument}, more than it can have")
            self._memo[int(argument)] = self._stack[-1]
        elif opcode in ("TUPLE1", "TUPLE2", "TUPLE3"):
            self._push(tuple(self._last(int(opcode[-1]))))
        elif opcode in _NOTHING:
            if opcode == "PROTO" and argument > _NEWEST:
                raise PickleError(f"it is of protocol {argument}, which does not exist")
        elif opcode in _VALUES:
            self._value(argument)
        else:
            raise PickleError(f"it uses the instruction {opcode}, which plain data does not need")

    def _value(self, argument: Any) -> None:
        if isinstance(argument, int) and argument.bit_length() > 8 * _LONGEST_NUMBER:
            raise PickleError(f"it holds a number of {argument.bit_length()} bits")
        self._stack.append(_Thing(value=argument))

    def _push(self, items: tuple[_Thing, ...]) -> None:
        self._stack.append(_Thing(items))

    def _mark(self, _: Any) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[_Thing]:
        things, self._stack = self._stack, self._below.pop()
        return things

    def _last(self, count: int) -> list[_Thing]:
        if len(self._stack) < count:
            raise PickleError("no valid pickle: it takes from an empty stack")
        things = self._stack[-count:]
        del self._stack[-count:]
        return things

    def _drop(self) -> None:
        if self._stack:
            del self._stack[-1]
        else:  # a mark with nothing above it is dropped like a value
            self._stack = self._below.pop()

    def _discard(self) -> None:
        self._since_mark()

    def _grow(self, things: list[_Thing]) -> None:
        self._stack[-1].take(things)

    def _keep_all(self, pairs: list[_Thing], into: _Thing | None = None) -> None:
        if into is not None:
            self._stack.append(into)
        self._hash_all(pairs[::2])
        self._grow(pairs)

    def _hash_all(self, things: list[_Thing]) -> None:
        self._hashed += sum(thing.weight for thing in things)
        if self._hashed > _MOST_HASHING:
            raise PickleError("its keys would take too long to hash")

    def _frozen(self) -> None:
        things = self._since_mark()
        self._hash_all(things)
        self._push(tuple(things))

    def _stack_global(self, _: Any) -> None:
        module, name = self._last(2)
        self._named(f"{module.value}.{name.value}")

    def _named(self, name: str) -> None:
        if name not in self._allowed.known:
            raise CodeError(name)
        self._stack.append(_Thing(name=name))

    def _call(self) -> None:
        function, arguments = self._last(2)
        self._check_called(function)
        if function.name == _BY_TYPE:  # calls its first argument
            self._check_called(arguments.items[0] if arguments.items else None)
        self._hash_all([arguments])  # a set hashes what it is made of
        self._stack.append(_Thing((arguments,), made_by=function.name))

    def _check_called(self, function: _Thing | None) -> None:
        if function is None or function.name is None:
            raise PickleError("it calls something that is not a name")
        if function.name not in self._allowed.called:
            raise CodeError(function.name)

    def _build(self) -> None:
        built, state = self._last(2)
        if built.made_by not in self._allowed.built:
            raise PickleError(f"it changes the inside of {built.made_by or 'a plain value'}")
        built.take([state])
        self._stack.append(built)

    def _refer(self) -> None:
        place = self._stack.pop()
        self.outside.append(tuple(item.name or item.value for item in place.items))
        self._push((place,))


_BY_TYPE = "torch._tensor._rebuild_from_type_v2"
_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT",
    "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET",
}  # fmt: skip

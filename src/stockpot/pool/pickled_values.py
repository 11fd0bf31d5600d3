"""What a pickle describes, without making it: nothing that it names is looked up, and nothing is called.

A pickle is a program for a small machine. Here its instructions build plain values alone; where Python would look up
a name or call it, a `Named` or a `Made` notes what would have been called with what. So there is nothing that such a
file could run, whatever it asks for. Tables stay lists of pairs, because hashing keys can be made to take for ever.
"""

from __future__ import annotations

import pickletools
import warnings
from dataclasses import dataclass, field
from typing import Any

from stockpot.pool.pickles import PickleError
from stockpot.pool.source import reason

_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE",
    "SHORT_BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
}  # fmt: skip


class Pairs(list[tuple[Any, Any]]):
    """A table, as pairs of key and value."""


@dataclass(frozen=True)
class Named:
    """Something in Python, by its name alone."""

    name: str


@dataclass(eq=False)
class Made:
    """What a call would have made: the name that would have been called, its arguments, and what is set on it."""

    name: str
    arguments: object
    state: object = None
    fields: dict[str, Any] = field(default_factory=dict)  # the state by name, where it is a table


def pickled_values(content: bytes) -> object:
    """The value that a pickle describes; PickleError where it is none."""
    machine = _Machine()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # escapes that Python only warns of: no pickle is written with them
            for opcode, argument, _ in pickletools.genops(content):
                machine.step(opcode.name, argument)
        (value,) = machine.stack
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, UnicodeDecodeError, Warning) as error:
        raise PickleError(f"no valid pickle: {reason(error)}") from error
    return value


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, object] = {}
        self._marks: list[int] = []  # how much was on the stack at each of them

    def step(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _VALUES:
            stack.append(argument if argument is not None else {"NEWTRUE": True, "NEWFALSE": False}.get(opcode))
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif opcode in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif opcode == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode == "MARK":
            self._marks.append(len(stack))
        elif opcode in ("EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"):
            stack.append({"EMPTY_TUPLE": (), "EMPTY_LIST": [], "EMPTY_DICT": Pairs()}[opcode])
        elif opcode.startswith("TUPLE"):
            things = self._since_mark() if opcode == "TUPLE" else self._last(int(opcode[-1]))
            stack.append(tuple(things))
        elif opcode in ("APPEND", "APPENDS"):
            things = self._since_mark() if opcode == "APPENDS" else self._last(1)
            stack[-1].extend(things)
        elif opcode in ("SETITEM", "SETITEMS"):
            things = self._since_mark() if opcode == "SETITEMS" else self._last(2)
            stack[-1].extend(zip(things[::2], things[1::2], strict=True))
        elif opcode == "GLOBAL":
            stack.append(Named(argument.replace(" ", ".", 1)))
        elif opcode == "STACK_GLOBAL":
            stack.append(Named(".".join(self._last(2))))
        elif opcode in ("REDUCE", "NEWOBJ"):
            called, arguments = self._last(2)
            stack.append(Made(called.name, arguments))
        elif opcode == "BUILD":
            (state,) = self._last(1)
            stack[-1].state = state
            if isinstance(state, Pairs):
                stack[-1].fields = {name: value for name, value in state if isinstance(name, str)}
        elif opcode not in ("PROTO", "FRAME", "STOP"):
            raise PickleError(f"it uses the instruction {opcode}, which is not read here")

    def _since_mark(self) -> list[Any]:
        place = self._marks.pop()
        things = self.stack[place:]
        del self.stack[place:]
        return things

    def _last(self, count: int) -> list[Any]:
        if len(self.stack) < count:
            raise PickleError("no valid pickle: it takes from an empty stack")
        things = self.stack[-count:]
        del self.stack[-count:]
        return things

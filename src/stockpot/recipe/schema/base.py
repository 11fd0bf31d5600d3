"""The pieces every section is made of: the strict base class and the few value types YAML does not have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, WithJsonSchema


class Section(BaseModel):
    """Unknown keys are refused; a validated section does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def nearest(word: object, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return close[0] if close else None


def word_of(known: Iterable[str]) -> Any:
    """A string type that accepts the known words only and suggests the nearest."""
    words = tuple(known)

    def check(value: str) -> str:
        if value in words:
            return value
        close = nearest(value, words)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"expected one of {', '.join(words)}, found {value!r}{hint}")

    return Annotated[str, AfterValidator(check), WithJsonSchema({"enum": list(words), "type": "string"})]


_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS.update({_letter: 1000**_power, f"{_letter}B": 1000**_power, f"{_letter}IB": 1024**_power})


def _bytes(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise ValueError(f"expected a size such as 5GB, 512MB or a number of bytes, found {value!r}")
    return int(float(found[1]) * _UNITS[found[2].upper()])


Bytes = Annotated[
    int,
    BeforeValidator(_bytes),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}]}),
]


def _code(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*", value):
        return value
    raise ValueError(f"expected module:function, found {value!r}")


Code = Annotated[
    str, BeforeValidator(_code), WithJsonSchema({"type": "string", "pattern": r"^[\w.]+:[\w.]+$"})
]


class PythonCode(Section):
    """The only way a recipe may run code: it has to say `python:`."""

    python: Code


CODE_SCHEMA = {
    "type": "object",
    "properties": {"python": {"type": "string"}},
    "required": ["python"],
    "additionalProperties": False,
}


def word_or_code(words: tuple[str, ...]) -> Any:
    """One of the words, or `{python: module:function}`."""

    def check(value: object) -> object:
        if isinstance(value, PythonCode) or value in words:
            return value
        if isinstance(value, dict) and set(value) == {"python"}:
            return PythonCode(python=_code(value["python"]))
        close = nearest(value, words) if isinstance(value, str) else None
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(
            f"expected one of {', '.join(words)} or {{python: module:function}}, found {value!r}{hint}"
        )

    schema = {"anyOf": [{"enum": list(words)}, CODE_SCHEMA]}
    return Annotated[str | PythonCode, BeforeValidator(check), WithJsonSchema(schema)]


def _names(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if isinstance(given, (list, tuple)) and given and all(isinstance(v, str) and v for v in given):
        return tuple(given)
    raise ValueError(f"expected a name or a list of names, found {value!r}")


Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def exactly_one(section: BaseModel, kinds: tuple[str, ...]) -> None:
    given = [kind for kind in kinds if getattr(section, kind) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise ValueError(f"expected exactly one of {', '.join(kinds)}, found {found}")

"""What sections are made of: the strict base class and the value types that YAML does not have."""

from __future__ import annotations

import difflib
import math
import random
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)
from typing_extensions import Self


class Section(BaseModel):
    """Unknown keys are refused; a validated section does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def nearest(word: object, known: Iterable[str]) -> str | None:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return close[0] if close else None


def _did_you_mean(word: object, known: Iterable[str]) -> str:
    close = nearest(word, known)
    return f"; did you mean {close!r}?" if close else ""


def word_of(known: Iterable[str]) -> Any:
    """A string type that accepts the known words only and suggests the nearest."""
    words = tuple(known)

    def check(value: object) -> object:
        if isinstance(value, str) and value in words:
            return value
        raise ValueError(f"expected one of {', '.join(words)}, found {value!r}{_did_you_mean(value, words)}")

    return Annotated[str, BeforeValidator(check), WithJsonSchema({"enum": list(words), "type": "string"})]


def number_or_word(words: tuple[str, ...], least: float | None) -> Any:
    """A whole number, or one of the words."""

    def check(value: object) -> object:
        if isinstance(value, str) and value in words:
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            if least is None or value >= least:
                return value
            raise ValueError(f"expected a value >= {least:g}, found {value!r}")
        raise ValueError(f"expected a whole number, {', '.join(words)} or null, found {value!r}")

    number = {"type": "integer"} if least is None else {"type": "integer", "minimum": least}
    schema = {"anyOf": [number, {"enum": list(words)}]}
    return Annotated[int | str, BeforeValidator(check), WithJsonSchema(schema)]


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


def word_or_code(words: tuple[str, ...]) -> Any:
    """One of the words, or `{python: module:function}`."""

    def check(value: object) -> object:
        if isinstance(value, PythonCode) or (isinstance(value, str) and value in words):
            return value
        if isinstance(value, dict) and set(value) == {"python"}:
            return PythonCode(python=_code(value["python"]))
        raise ValueError(
            f"expected one of {', '.join(words)} or {{python: module:function}}, found {value!r}"
            f"{_did_you_mean(value, words)}"
        )

    schema = {"anyOf": [{"enum": list(words)}, PythonCode.model_json_schema()]}
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


class Split(Section):
    """Written short: `0.5` (a fraction), `2000` (samples), `val` (a named part); or in full as a mapping."""

    of: str | None = Field(
        None, description="The named part: a file or sub-folder of the source, or one of its splits."
    )
    fraction: float | None = Field(None, gt=0, le=1, description="Share of the part, stratified by label.")
    count: int | None = Field(None, ge=1, description="Number of samples, stratified by label.")
    rows: str | None = Field(
        None,
        description="File that lists the samples: `.npy` with numbers from 0 or a mask of 0 and 1, or a text file "
        "with a number or an image path per line. Other splits of the same part share what is left.",
    )

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        given = [name for name in ("fraction", "count", "rows") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one of fraction, count and rows, found {' and '.join(given)}")
        return self


def _short_split(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a fraction, a number of samples or a name, found {value!r}")
    if isinstance(value, int) and value > 1:
        return {"count": value}
    if isinstance(value, (int, float)):
        return {"fraction": value}
    if isinstance(value, str):
        return {"of": value}
    return value


ShortSplit = Annotated[
    Split,
    BeforeValidator(_short_split),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string"},
                Split.model_json_schema(),
            ]
        }
    ),
]


def _number(value: Any) -> int | float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    raise ValueError(f"expected a number, found {value!r}")


Number = Annotated[int | float, BeforeValidator(_number), WithJsonSchema({"type": "number"})]


class Space(Section):
    """Written short: `0.1` (fixed), `[0, 0.1]` (choices); or `{min, max, scale}` for a range."""

    choices: tuple[Number, ...] | None = Field(None, min_length=1, description="Values to choose from.")
    min: Number | None = Field(None, description="Lower end of a range.")
    max: Number | None = Field(None, description="Upper end of a range.")
    scale: Literal["linear", "log"] = Field("linear", description="How a range is sampled.")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.choices is not None:
            if self.min is not None or self.max is not None:
                raise ValueError("expected choices or a range, found both")
            return self
        if self.min is None or self.max is None:
            raise ValueError("expected a value, a list of choices, or a range with min and max")
        if self.min > self.max:
            raise ValueError(f"expected min <= max, found {self.min} > {self.max}")
        if self.scale == "log" and self.min <= 0:
            raise ValueError(f"expected min > 0 for a log range, found {self.min}")
        return self

    def draw(self, key: str, whole: bool) -> int | float:
        """A value that depends on the key alone, so that searching one more thing changes no other."""
        source = random.Random(key)
        if self.choices is not None:
            return source.choice(self.choices)
        assert self.min is not None
        assert self.max is not None
        if self.scale == "log":
            value = math.exp(source.uniform(math.log(self.min), math.log(self.max)))
        elif whole:
            return source.randint(math.ceil(self.min), math.floor(self.max))
        else:
            value = source.uniform(self.min, self.max)
        return round(value) if whole else value

    def lowest(self) -> int | float:
        low = min(self.choices) if self.choices is not None else self.min
        assert low is not None
        return low


def _short_space(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"choices": (value,)}
    if isinstance(value, (list, tuple)):
        return {"choices": tuple(value)}
    return value


ShortSpace = Annotated[
    Space,
    BeforeValidator(_short_space),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number"},
                {"type": "array", "items": {"type": "number"}, "minItems": 1},
                Space.model_json_schema(),
            ]
        }
    ),
]

"""What sections are made of: the strict base class and the value types that YAML does not have."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot import words
from stockpot.soups.settings import samples_in
from stockpot.zoo.plan import checked, number


class Section(BaseModel):
    """Unknown keys are refused; a validated section does not change. What stands below a field describes it."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class OfOneKind(Section):
    """Exactly one of the `kinds` is given, and says what the section is about."""

    kinds: ClassVar[tuple[str, ...]]

    @property
    def kind(self) -> str:
        return next(kind for kind in self.kinds if getattr(self, kind) is not None)

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        given = [kind for kind in self.kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ValueError(f"expected exactly one of {', '.join(self.kinds)}, found {found}")
        return self


def _any_of(*schemas: Any) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 1}
_SECONDS = {"": 1, "S": 1, "MIN": 60, "H": 3600}


def parse_bytes(value: object) -> int:
    """A number of bytes, or a size with its unit."""
    if (found := words.bytes_of(value)) is None:
        raise ValueError(f"expected a size such as 5GB, 512MB or a number of bytes, found {value!r}")
    return found


def parse_budget(value: Any) -> float | str:
    """A number of seconds or a time with its unit; samples stay text, as settings have them."""
    if isinstance(value, str) and samples_in(value) is not None:
        return value
    found = value
    if isinstance(value, str) and (match := re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", value)):
        found = float(match[1]) * _SECONDS.get(match[2].upper(), 0)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or not 0 < found < math.inf:
        expected = "a time such as 10min, 90s, 1.5h, a number of seconds, or samples such as 200k samples"
        raise ValueError(f"expected {expected}, found {value!r}")
    return float(found)


Bytes = Annotated[int, BeforeValidator(parse_bytes), _any_of(_COUNT, _TEXT)]
Budget = Annotated[
    float | str, BeforeValidator(parse_budget), _any_of({"type": "number", "exclusiveMinimum": 0}, _TEXT)
]
Code = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]  # module:function


class PythonCode(Section):
    """The only way a recipe may run code: it has to say `python:`."""

    python: Code


def _names(value: object) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if isinstance(given, (list, tuple)) and given and all(isinstance(v, str) and v for v in given):
        return tuple(given)
    raise ValueError(f"expected a name or a list of names, found {value!r}")


Names = Annotated[tuple[str, ...], BeforeValidator(_names), _any_of(_TEXT, {"type": "array", "items": _TEXT})]


Donor = Annotated[int, Field(strict=True, ge=0)] | Annotated[str, Field(min_length=1)]


def _folder_or_config(value: object) -> object:
    configured = isinstance(value, dict) and isinstance(value.get("model_type"), str)
    if value is None or configured or (isinstance(value, str) and value):
        return value
    raise ValueError(f"expected a local folder, a config.json or a mapping with model_type, found {value!r}")


FolderOrConfig = Annotated[Any, BeforeValidator(_folder_or_config), _any_of(_TEXT, {"type": "object"})]


def _pixels(value: Any) -> tuple[int, int]:
    pair = value if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) == 2 and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in pair):
        return pair[0], pair[1]
    raise ValueError(f"expected a size in pixels or [height, width], found {value!r}")


_PAIR = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}
Pixels = Annotated[tuple[int, int], BeforeValidator(_pixels), _any_of(_COUNT, _PAIR)]


_LEAST_0 = {"type": "number", "minimum": 0}
Number = Annotated[int | float, BeforeValidator(number), WithJsonSchema(_LEAST_0)]


class Split(Section):
    """Written short: `0.5` (a fraction), `2000` (samples), `val` (a named part); or in full as a mapping."""

    path: str | None = None
    """Another file or folder of the same kind as the source, where these samples are instead."""
    of: str | None = None
    """The named part: a file or sub-folder of the source, or one of its splits."""
    fraction: float | None = Field(default=None, gt=0, le=1)
    """Share of the part, stratified by class."""
    count: int | None = Field(default=None, ge=1)
    """Number of samples, stratified by class."""
    rows: str | None = None
    """File that lists the samples: `.npy` with numbers from 0 or a mask of 0 and 1, or a text file with a number or an
    image path per line. Other splits of the same part share what is left."""

    @model_validator(mode="after")
    def _one_amount(self) -> Self:
        given = [name for name in ("fraction", "count", "rows") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one of fraction, count and rows, found {' and '.join(given)}")
        return self


def _short_split(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"expected a fraction, a number of samples or a name, found {value!r}")
    if isinstance(value, (int, float)):
        return {"count" if isinstance(value, int) and value > 1 else "fraction": value}
    return {"of": value} if isinstance(value, str) else value


ShortSplit = Annotated[
    Split,
    BeforeValidator(_short_split),
    _any_of({"type": "number", "exclusiveMinimum": 0}, _TEXT, Split.model_json_schema()),
]


class LmEval(Section):
    """Written short: `lm_eval: [arc_easy, hellaswag:acc_norm]`; or in full as a mapping. Needs `stockpot[lm-eval]`."""

    tasks: Names
    """Tasks or groups of lm-evaluation-harness, each a set of report data; `TASK:METRIC` for another than the first."""
    python: str | None = None
    """Folder with task files of your own. They may run code, which is why this is its name."""
    num_fewshot: int | None = Field(default=None, ge=0)
    """Examples before each question. Default: what the task says."""
    limit: int | None = Field(default=None, ge=1)
    """Only the first questions of each task."""
    batch_size: int = Field(default=8, ge=1)
    """Questions asked together."""
    chat_template: bool = False
    """Whether questions go through the tokenizer's chat template."""


LM_EVAL = "lm_eval"  # the name among sets of report data


def _sets(value: Any) -> Any:
    """Whether a report is one split or several by name. A single unknown key is a misspelt one, not a name."""
    named = isinstance(value, dict) and (len(value) > 1 or LM_EVAL in value)
    return "several" if named and not value.keys() & Split.model_fields.keys() else "one"


def _tasks_in_full(value: Any) -> Any:
    if not isinstance(value, dict) or LM_EVAL not in value:
        return value
    given = value[LM_EVAL]
    return {**value, LM_EVAL: _Tasks(given if isinstance(given, dict) else {"tasks": given})}


class _Tasks(dict[str, Any]):
    """What stands under `lm_eval`, to be told from a split."""


SetName = Annotated[str, Field(pattern=r"^[\w.-][\w .-]{0,39}$")]
_Set = Annotated[
    Annotated[ShortSplit, Tag("a split")] | Annotated[LmEval, Tag("some tasks")],
    Discriminator(lambda value: "some tasks" if isinstance(value, (_Tasks, LmEval)) else "a split"),
]
_Sets = Annotated[dict[SetName, _Set], BeforeValidator(_tasks_in_full)]
Report = Annotated[Annotated[ShortSplit, Tag("one")] | Annotated[_Sets, Tag("several")], Discriminator(_sets)]


_RANGE = {
    "type": "object", "required": ["min", "max"], "additionalProperties": False,
    "properties": {"min": _LEAST_0, "max": _LEAST_0, "scale": {"enum": ["linear", "log"]}},
}  # fmt: skip
# A search space, written out by `stockpot.zoo.plan`, which draws from it.
Space = Annotated[
    Any, BeforeValidator(checked), _any_of(_LEAST_0, {"type": "array", "items": _LEAST_0, "minItems": 1}, _RANGE)
]

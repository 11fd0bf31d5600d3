"""One searched hyperparameter: a value, a list of choices, or a range."""

from __future__ import annotations

import math
import random
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import Section


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


def _short(value: Any) -> Any:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return {"choices": (value,)}
    if isinstance(value, (list, tuple)):
        return {"choices": tuple(value)}
    return value


ShortSpace = Annotated[
    Space,
    BeforeValidator(_short),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number"},
                {"type": "array", "items": {"type": "number"}, "minItems": 1},
                {
                    "type": "object",
                    "properties": {
                        "choices": {"type": ["array", "null"], "items": {"type": "number"}},
                        "min": {"type": ["number", "null"]},
                        "max": {"type": ["number", "null"]},
                        "scale": {"enum": ["linear", "log"]},
                    },
                    "additionalProperties": False,
                },
            ]
        }
    ),
]

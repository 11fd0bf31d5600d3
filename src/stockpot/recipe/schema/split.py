"""One share of the data: a fraction, a number of samples, or a named part."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import Section


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


def _short(value: Any) -> Any:
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
    BeforeValidator(_short),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {
                        "of": {"type": ["string", "null"]},
                        "fraction": {"type": ["number", "null"]},
                        "count": {"type": ["integer", "null"]},
                        "rows": {"type": ["string", "null"]},
                    },
                    "additionalProperties": False,
                },
            ]
        }
    ),
]

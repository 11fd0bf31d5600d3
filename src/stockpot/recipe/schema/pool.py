"""`pool`: the checkpoints to mix."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from stockpot.recipe.schema.base import Names, Section


class PoolSection(Section):
    """The fine-tuned checkpoints that are mixed."""

    path: Names | None = Field(
        None,
        description="Checkpoint files, folders of checkpoints or glob patterns, one or a list. "
        "Default: where `finetune` writes its checkpoints.",
    )
    key: str | None = Field(
        None,
        description="Where the weights are inside a nested file, as a dotted path (`state_dict`, `ema`). "
        "Default: found by itself.",
    )
    rename: dict[str, str] | None = Field(
        None, description="Prefixes of tensor names to replace, old to new: `{model.: ''}`."
    )
    mixed_dtypes: bool = Field(False, description="Allow checkpoints of different floating-point types.")
    nonfinite: Literal["refuse", "drop", "ignore"] = Field(
        "refuse",
        description="What to do with checkpoints that hold NaN or infinity: stop and name them (`refuse`), "
        "leave them out (`drop`), or do not look (`ignore`; saves one pass over the files).",
    )

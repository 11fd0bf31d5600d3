"""`output`: where results go."""

from __future__ import annotations

from pydantic import Field

from stockpot.recipe.schema.base import Bytes, Section


class Output(Section):
    """Where results go, and the seed everything random starts from."""

    dir: str = Field("run", description="The run directory.")
    seed: int = Field(0, ge=0, description="Seed of everything random except the split of the data.")
    max_shard_size: Bytes = Field(
        5 * 10**9, description="Soups above this size are written in several files."
    )
    tensorboard: bool = Field(
        False, description="Also write TensorBoard scalars. Needs `stockpot[tensorboard]`."
    )
    overwrite: bool = Field(False, description="Replace another run in that directory.")

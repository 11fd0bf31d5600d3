"""The whole recipe."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import Section
from stockpot.recipe.schema.data import Data
from stockpot.recipe.schema.finetune import Finetune
from stockpot.recipe.schema.method import Method
from stockpot.recipe.schema.model import Model
from stockpot.recipe.schema.output import Output
from stockpot.recipe.schema.pool import PoolSection


class Recipe(Section):
    """From checkpoints and data to a soup. Paths are relative to the recipe file."""

    base: str | None = Field(
        None, description="Folder that relative paths start from. Default: the recipe's own folder."
    )
    pool: PoolSection = Field(
        default_factory=lambda: PoolSection.model_validate({}), description="The checkpoints."
    )
    model: Model = Field(description="The model they belong to.")
    data: Data = Field(description="Samples to learn on and to report on.")
    method: Method = Field(
        default_factory=lambda: Method.model_validate({}), description="How mixing weights are found."
    )
    finetune: Finetune | None = Field(None, description="How the pool is made, if it is not there yet.")
    output: Output = Field(default_factory=lambda: Output.model_validate({}), description="Where results go.")
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.finetune is None and self.pool.path is None:
            raise ValueError("pool.path: required, unless there is a finetune section that makes the pool")
        if self.finetune is not None and self.data.train is None and self.data.python is None:
            raise ValueError(
                "data.train: required by finetune: a fraction, a number of samples or a named part"
            )
        return self

    @property
    def folder(self) -> Path:
        """Where relative paths start."""
        return self._folder

    def path(self, given: str) -> Path:
        """A path of the recipe as it is on this machine; works for glob patterns too."""
        return self._folder / Path(given).expanduser()

    def resolved(self) -> dict[str, Any]:
        """Every default filled in, in plain values; loads again from any folder as the same recipe."""
        whole = self.model_dump(mode="json", exclude={"method"})
        return {
            "base": str(self._folder),
            **{k: v for k, v in whole.items() if k in ("pool", "model", "data")},
            "method": self.method.resolved(),
            **({"finetune": whole["finetune"]} if self.finetune is not None else {}),
            "output": whole["output"],
        }

    def digest(self) -> str:
        """SHA-256 of what decides the result: neither where the files lie nor where the output goes."""
        content = self.resolved()
        del content["base"]
        del content["data"]["cache"]
        content["output"] = {"seed": self.output.seed}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

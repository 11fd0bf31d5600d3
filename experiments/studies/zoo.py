"""One zoo as a study sees it: its recipe, and the pool if it has been made."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot.errors import PoolError, RunError
from stockpot.recipe import load_recipe

if TYPE_CHECKING:
    from stockpot.recipe import Recipe
    from stockpot.soups.settings import Settings


@dataclass(frozen=True)
class Zoo:
    name: str
    home: Path  # the folder that holds the zoos
    common: tuple[str, ...]  # KEY=VALUE for every run
    checkpoints: tuple[str, ...]  # in search order, relative to the recipe; empty before `stockpot finetune`
    models: int  # K
    batch_norm: bool | None  # None: not known yet

    @staticmethod
    def open(home: Path, name: str, common: Sequence[str] = (), *, complete: bool = True) -> Zoo:
        """`complete`: the pool is as it will be; otherwise it will have as many models as the recipe has trials."""
        folder = home / name
        if not (folder / "recipe.yaml").is_file():
            known = sorted(path.parent.name for path in home.glob("*/recipe.yaml"))
            raise RunError.of(
                f"zoo {name!r}",
                expected=f"one of {', '.join(known) or 'none'}",
                found="no such folder with a recipe.yaml",
                fix="choose one of these",
            )
        recipe = load_recipe(folder / "recipe.yaml", common)
        checkpoints, batch_norm = _pool(recipe)
        models = len(checkpoints)
        if recipe.finetune is not None and (not models or not complete):
            models = recipe.finetune.trials
        return Zoo(name, home, tuple(common), checkpoints, models, batch_norm)

    @property
    def recipe_file(self) -> Path:
        return self.home / self.name / "recipe.yaml"

    @property
    def runs(self) -> Path:
        return self.home / "runs" / self.name

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        return load_recipe(self.recipe_file, [*self.common, *overrides])

    def settings(self, method: str, overrides: Sequence[str] = ()) -> Settings:
        recipe = self.recipe(overrides)
        return recipe.method.settings(method, seed=recipe.output.seed)

    @property
    def pretraining(self) -> Path | None:
        """The script that makes the weights its fine-tuning starts from, where they are not there yet."""
        script, weights = self.home / self.name / "pretrain.py", self.recipe().model.weights
        if weights is None or not script.is_file() or self.recipe().path(weights).exists():
            return None
        return script

    def trial_seconds(self) -> list[float | None]:
        """What each ingredient took to make, where `stockpot finetune` left a record beside it."""
        return [_seconds(self.recipe().path(path)) for path in self.checkpoints]


def _seconds(checkpoint: Path) -> float | None:
    whole = checkpoint.is_dir()
    beside = checkpoint.with_name(f"{checkpoint.name}.json") if whole else checkpoint.with_suffix(".json")
    seconds = read_object(beside).get("seconds")
    return float(seconds) if isinstance(seconds, (int, float)) else None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where there is none, or not a whole one yet."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _pool(recipe: Recipe) -> tuple[tuple[str, ...], bool | None]:
    from stockpot.pool import Pool

    given = recipe.pool.path
    if given is None:
        assert recipe.finetune is not None  # the schema has seen to it
        given = (recipe.finetune.dir,)
    section = recipe.pool
    try:
        pool = Pool.open(
            *(str(recipe.path(path)) for path in given),
            key=section.key,
            rename=section.rename,
            mixed_dtypes=section.mixed_dtypes,
        )
    except PoolError:
        return (), None  # not made yet; a run of a broken pool says what is wrong with it
    paths = tuple(Path(os.path.relpath(one.path, recipe.folder)).as_posix() for one in pool.checkpoints)
    return paths, any(name.endswith("running_mean") for name in pool.specs)

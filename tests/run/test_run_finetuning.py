"""What a recipe says about fine-tuning arrives in the plan."""

from __future__ import annotations

from typing import Any

import pytest

from stockpot.zoo import Augmentation
from stockpot.recipe import Recipe
from stockpot.run.finetuning import plan_of


def recipe(**finetune: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"python": "model:build"},
            "data": {"arrays": "a.npz", "train": 0.5, "fit": 0.5},
            "finetune": {"trials": 2, **finetune},
        }
    )


def test_augmentation_is_what_the_recipe_says() -> None:
    assert plan_of(recipe()).augmentation == Augmentation()
    assert plan_of(recipe(flip=True, mixup=0.4)).augmentation == Augmentation(flip=True, mixup=0.4)


def test_negative_mixup_is_refused() -> None:
    with pytest.raises(ValueError, match="mixup"):
        recipe(mixup=-0.1)

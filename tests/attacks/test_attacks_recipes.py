"""Recipes of strangers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from attacks.kit import Threat
from attacks.threats_recipes import RECIPES
from stockpot.errors import RecipeError
from stockpot.recipe.load import load_recipe


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threat", RECIPES, ids=str)
def test_a_recipe_of_a_stranger_runs_nothing(threat: Threat, tmp_path: Path) -> None:
    assert threat.words is not None
    with pytest.raises(RecipeError, match=re.escape(threat.words)) as caught:
        load_recipe(threat.make(tmp_path))
    assert len(str(caught.value)) < 3000

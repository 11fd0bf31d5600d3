"""The forecast follows the engine: one more model in memory per model loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from stockpot.engine import FlatPlan
from stockpot.soups.forecast import Size, forecasts, largest_block, learning_memory
from zoo import fine_tunes, layout_of, mlp, write


def test_each_model_loaded_costs_one_more_model_and_folds_cost_none() -> None:
    size = Size(models=72, parameters=10**8, ingredient=4 * 10**8)
    rows = {(row.method, row.block): row for row in forecasts(size)}
    one = 4 * 10**8
    assert rows["hl", 72].memory - rows["mehl", 18].memory == (72 - 18) * one
    assert rows["crossfit", 18].memory == rows["mehl+", 18].memory  # theta is a function of alpha: none is kept
    assert rows["uniform", None].memory < rows["greedy", None].memory < rows["mehl", 1].memory
    # The direction; fixed part, mean and a row to read into; the model; its gradients twice.
    assert rows["mehl", 1].memory == pytest.approx((1 + 3 + 1 + 2) * one, rel=0.05)
    assert {block for method, block in rows if method == "mehl"} == {1, 4, 18, 72}


def test_the_largest_block_is_the_largest_that_fits() -> None:
    size = Size(models=72, parameters=10**6, ingredient=4 * 10**6)
    for budget in range(10**7, 4 * 10**8, 7 * 10**6):
        block = largest_block(size, budget)
        assert not block or learning_memory(size, block) <= budget
        assert block == 72 or learning_memory(size, block + 1) > budget
    assert largest_block(size, 10**6) == 0


def test_the_parameters_are_those_the_engine_will_hold(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 3)
    for state in states:
        state["2.bias"] = states[0]["2.bias"]  # frozen: not held
    pool = write(tmp_path, states)
    layout = layout_of(pool, "model")
    assert Size.of(pool, layout).parameters == FlatPlan.of(layout, pool.specs).size

"""The forecast follows the engine: one more model in memory per model loaded and per fold."""

from __future__ import annotations

from pathlib import Path

import pytest

from stockpot.engine import FlatPlan
from stockpot.layout import Layout
from stockpot.run.forecast import Size, forecasts, largest_block, learning_memory
from stockpot.run.survey import survey
from zoo import fine_tunes, mlp, write


def test_each_model_loaded_and_each_fold_costs_one_more_model() -> None:
    size = Size(models=72, parameters=10**8, ingredient=4 * 10**8)
    rows = {(row.method, row.block): row for row in forecasts(size)}
    one = 4 * 10**8
    assert rows["hl", 72].memory - rows["mehl", 18].memory == (72 - 18) * one
    assert rows["crossfit", 18].memory - rows["mehl+", 18].memory == 3 * one
    assert rows["uniform", None].memory < rows["greedy", None].memory < rows["mehl", 1].memory
    assert rows["mehl", 1].memory == pytest.approx((1 + 5 + 1) * one, rel=0.05)
    assert {block for method, block in rows if method == "mehl"} == {1, 4, 18, 72}
    assert rows["crossfit", 18].reading == (2 + 2 + 1 + 1 + 4) * 72 * one


def test_the_largest_block_is_the_largest_that_fits() -> None:
    size = Size(models=72, parameters=10**6, ingredient=4 * 10**6)
    for budget in range(10**7, 4 * 10**8, 7 * 10**6):
        block = largest_block(size, "crossfit", budget)
        assert not block or learning_memory(size, "crossfit", block) <= budget
        assert block == 72 or learning_memory(size, "crossfit", block + 1) > budget
    assert largest_block(size, "crossfit", 10**6) == 0


def test_the_survey_counts_the_parameters_the_engine_will_hold(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 3)
    for state in states:
        state["2.bias"] = states[0]["2.bias"]  # frozen: not held
    pool = write(tmp_path, states)
    found = survey(pool, budget=10**9)
    layout = Layout.of(pool, "model", facts=pool.facts())
    assert found["forecast"]["mixed_parameters"] == FlatPlan.of(layout, pool.specs).size
    assert found["frozen"] == ["2.bias"]
    assert all(row["fits"] for row in found["forecast"]["rows"])

"""The forecast follows the engine: b + 4 + F vectors, one more model per model loaded."""

from __future__ import annotations

from pathlib import Path

from stockpot.engine import FlatPlan
from stockpot.layout import Layout
from stockpot.run.forecast import forecasts, largest_block
from stockpot.run.survey import survey
from zoo import fine_tunes, mlp, write


def test_peak_memory_is_blocks_plus_folds_plus_four() -> None:
    rows = {(row.method, row.block): row for row in forecasts(models=72, parameters=10, ingredient_bytes=40)}
    assert rows["hl", 72].memory == (72 + 4 + 1) * 10 * 4
    assert rows["mehl+", 18].memory == (18 + 4 + 1) * 10 * 4
    assert rows["crossfit", 18].memory == (18 + 4 + 4) * 10 * 4
    assert rows["uniform", None].memory < rows["greedy", None].memory < rows["mehl", 1].memory
    assert {block for method, block in rows if method == "mehl"} == {1, 4, 18, 72}


def test_the_largest_block_is_the_largest_that_fits() -> None:
    for budget in range(200, 2000, 97):
        block = largest_block(models=72, parameters=10, budget=budget, folds=4)
        if block:
            assert (block + 8) * 40 <= budget
        assert block == 72 or (block + 1 + 8) * 40 > budget
    assert largest_block(models=72, parameters=10, budget=300, folds=4) == 0
    assert largest_block(models=3, parameters=10, budget=10**9, folds=4) == 3


def test_the_survey_counts_the_parameters_the_engine_will_hold(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 3)
    for state in states:
        state["2.bias"] = states[0]["2.bias"]  # frozen: not held
    pool = write(tmp_path, states)
    found = survey(pool, budget=10**6)
    layout = Layout.of(pool, "model", facts=pool.facts())
    assert found["forecast"]["mixed_parameters"] == FlatPlan.of(layout, pool.specs).size
    assert found["frozen"] == ["2.bias"]
    assert all(row["fits"] for row in found["forecast"]["rows"])

"""The public names: a dozen, sorted, every one of them there."""

from __future__ import annotations

import pytest

import stockpot


def test_the_public_names_are_these() -> None:
    assert stockpot.__all__ == [
        "METHODS",
        "PRESETS",
        "Comparison",
        "Event",
        "Layout",
        "Metric",
        "Pool",
        "Result",
        "Scores",
        "Settings",
        "Soup",
        "StockpotError",
        "Task",
        "__version__",
        "average",
        "compare",
        "cook",
    ]
    assert dir(stockpot) == sorted(stockpot.__all__)


@pytest.mark.parametrize("name", stockpot.__all__)
def test_each_name_can_be_had_and_says_what_it_is(name: str) -> None:
    value = getattr(stockpot, name)
    if callable(value):
        assert value.__module__.startswith("stockpot.")
        assert value.__doc__


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'stockpot' has no attribute 'Classic'"):
        _ = stockpot.Classic


def test_the_methods_of_the_paper_are_all_there() -> None:
    paper = {"best", "uniform", "greedy", "ensemble", "learned", "learned+", "hl", "hl+", "mehl", "mehl+"}
    assert paper < set(stockpot.METHODS)

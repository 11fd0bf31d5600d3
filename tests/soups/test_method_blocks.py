"""Which models are loaded together: every model once per pass, other blocks in every pass, the same for a seed."""

from __future__ import annotations

import pytest

from stockpot.soups.blocks import schedule


@pytest.mark.parametrize(("models", "size"), [(5, 2), (6, 3), (7, 7), (4, 1), (3, 9)])
def test_every_pass_has_every_model_once(models: int, size: int) -> None:
    each = -(-models // size)
    blocks = schedule(models, size, passes=3)
    assert len(blocks) == 3 * each
    for start in range(0, len(blocks), each):
        part = blocks[start : start + each]
        assert sorted(k for block in part for k in block) == list(range(models))
        assert all(block == sorted(block) and 0 < len(block) <= size for block in part)


def test_passes_are_shuffled_anew() -> None:
    blocks = schedule(12, 4, passes=4)
    passes = {str(blocks[start : start + 3]) for start in range(0, 12, 3)}
    assert len(passes) == 4


def test_seeds_shuffle_differently_and_repeat() -> None:
    assert schedule(12, 4, seed=1) == schedule(12, 4, seed=1)
    assert schedule(12, 4, seed=1) != schedule(12, 4, seed=2)
    assert schedule(12, 4) == schedule(12, 4, passes=1, seed=0)


def test_a_number_of_blocks_cuts_or_adds_passes() -> None:
    assert schedule(5, 2, blocks=7)[:3] == schedule(5, 2)
    assert [len(schedule(5, 2, blocks=n)) for n in (0, 1, 3, 4, 7)] == [0, 1, 3, 4, 7]


def test_the_order_is_the_same_in_every_version() -> None:
    """A run that is continued by a newer version must meet its blocks again."""
    assert schedule(5, 2, passes=2, seed=3) == [[1, 2], [0, 4], [3], [3, 4], [0, 2], [1]]

"""Claims about what charts compute before they draw."""

from __future__ import annotations

import numpy as np
import pytest

from stockpot.report.curves import Line, _block_ends, _lines, _smooth, lowest, mean_of
from stockpot.report.drawing import Canvas, ticks
from stockpot.report.weight_chart import LEVELS, _binned, _runs, block_name, levels, nice, outside


def test_extrapolated_means_below_zero_or_above_one() -> None:
    W = np.array([[-0.1, 0.0, 1.0], [1.1, -1e-15, 1 + 1e-15]])
    assert outside(W).tolist() == [[True, False, False], [True, False, False]]


def test_no_negative_weight_is_drawn_as_zero() -> None:
    found = levels(np.array([[-1e-6, 0.0, 1e-6, 0.5, 9.0, -9.0, np.nan]]), limit=1.0)
    assert found.tolist() == [[-1, 0, 0, 3, LEVELS, -LEVELS, 0]]


def test_a_shared_column_keeps_the_largest_weight_of_either_sign() -> None:
    W = np.array([[0.1, -0.5, 0.2, 0.3], [0.0, 0.2, 1.2, -0.1]])
    values, marked, starts = _binned(W, outside(W), 2)
    assert values.tolist() == [[-0.5, 0.3], [0.2, 1.2]]
    assert marked.tolist() == [[True, False], [False, True]]
    assert starts == [0, 2]


def test_cells_of_one_colour_cover_exactly_their_mask() -> None:
    mask = np.random.default_rng(0).uniform(size=(7, 11)) < 0.5
    drawn = np.zeros_like(mask)
    for x, y, w in _runs(mask):
        assert not drawn[y, x : x + w].any()
        drawn[y, x : x + w] = True
    assert (drawn == mask).all()


@pytest.mark.parametrize(("value", "end"), [(0.21, 0.3), (0.3, 0.3), (7.2, 8), (0, 1), (float("nan"), 1)])
def test_colour_scales_end_on_round_numbers(value: float, end: float) -> None:
    assert nice(value) == pytest.approx(end)


def test_parts_of_the_model_have_readable_names() -> None:
    assert block_name("encoder.layer.3.attention.query.weight") == "layer.3"
    assert block_name("head.weight") == "head"
    assert block_name("0.weight") == "part 0"


def test_steps_go_on_from_block_to_block() -> None:
    parts = [
        {"fold": 0, "block": 1, "x": [1, 2], "loss": [0.5, None]},
        {"fold": 0, "block": 0, "x": [1, 2, 3], "loss": [3.0, 2.0, 1.0]},
    ]
    ends = _block_ends(parts)
    assert ends == [0.0, 3.0, 5.0]
    (line,) = _lines(parts, ends)
    assert line.x.tolist() == [1, 2, 3, 4, 5]
    assert line.loss[:4].tolist() == [3.0, 2.0, 1.0, 0.5]
    assert np.isnan(line.loss[4])


def test_the_ring_is_where_all_folds_together_are_lowest_in_each_block() -> None:
    x = np.array([0.0, 10.0, 20.0, 30.0])
    folds = [Line(x, np.array([3.0, 1.0, 2.0, 0.5])), Line(x, np.array([3.0, 4.0, 1.0, 2.9]))]
    mean = mean_of(folds)
    assert mean is not None
    assert mean.loss.tolist() == [3.0, 2.5, 1.5, 1.7]
    assert lowest(mean, [0.0, 30.0]) == [2]  # and at 30 the first fold alone would have said
    assert lowest(mean, [0.0, 10.0, 30.0]) == [1, 2]
    assert lowest(Line(x, np.full(4, np.nan)), [0.0, 30.0]) == []
    assert mean_of([folds[0], Line(x[:2], folds[1].loss[:2])]) is None


def test_the_moving_average_keeps_gaps_and_level() -> None:
    loss = np.full(60, 2.0)
    loss[20:25] = np.nan
    smooth = _smooth(loss)
    assert np.isnan(smooth[20:25]).all()
    assert smooth[np.isfinite(smooth)] == pytest.approx(2.0)


def test_ticks_are_round_and_as_few_as_asked() -> None:
    assert ticks(0.13, 0.92, 5) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(-0.5, 12.0, 4, whole=True) == [0.0, 5.0, 10.0]
    assert ticks(0.0, 1.0, 3, whole=True) == [0.0, 1.0]
    assert ticks(-1e308, 1e308, 5) == []  # their difference is no number
    assert ticks(0.0, 2e-323, 4) == [0.0]  # so small that its power of ten is zero


def test_a_line_has_a_gap_where_a_number_is_missing_and_text_stays_text() -> None:
    canvas = Canvas(9, 9)
    canvas.line([(0, 1.234567), (1, 2.0), (2, float("nan")), (3, 4.0), (4, 5.0)], "fg")
    canvas.text(0, 0, "<b>&", said="'it'")
    text = canvas.svg('it "is"')
    assert 'd="M0 1.23L1 2M3 4L4 5"' in text
    assert "stroke:var(--fg)" in text
    assert ">&lt;b&gt;&amp;</text>" in text
    assert 'aria-label="it &quot;is&quot;"' in text

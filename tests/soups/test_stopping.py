"""When folds are judged, how fast they go, and when they stop, as functions of the losses alone."""

from __future__ import annotations

import math

from stockpot.soups.stopping import earliest, verdict


def test_the_losses_say_which_is_best_how_fast_to_go_and_when_to_stop() -> None:
    J = 1000
    assert verdict([3.0], J).best == 0
    assert verdict([3.0, 2.0], J) == verdict([9.0, 1.0], J)
    found = verdict([3.0, 2.0, 1.0, 1.0], J)  # no lower is no better
    assert (found.best, found.pace, found.over) == (2, 1.5 * 1.5 * 0.5, False)
    assert not verdict([3.0, 4.0, 4.0], J).over
    assert verdict([3.0, 4.0, 4.0, 4.0], J).over
    assert not verdict([3.0, 4.0, 4.0, 2.0, 4.0, 4.0], J).over
    assert verdict([math.inf, math.inf, 2.0], J).best == 2
    assert verdict([1.0 / i for i in range(1, 99)], J).pace == 2.0**10


def test_folds_are_judged_after_a_tenth_more_steps_and_later_after_twice_as_many_where_nothing_was_gained() -> None:
    falling = [1.0 / i for i in range(1, 40)]
    assert [verdict(falling[:n], 1000).next for n in (0, 1, 10, 11, 19, 20)] == [0, 10, 100, 110, 233, 256]
    assert [verdict([*falling[:3], *[9.0] * n], 1000).next for n in range(3)] == [30, 50, 90]
    assert verdict([3.0, 2.0, 9.0, 1.0], 1000).next == 50  # better again: ten
    assert verdict(falling, 300).next == 300


def test_the_earliest_end_is_that_of_losses_that_do_not_fall_any_more() -> None:
    for losses in ((), (3.0,), (3.0, 2.0, 1.0), (3.0, 2.0, 4.0)):
        found = [*(losses or (3.0,))]
        while not verdict(found, 1000).over:
            found.append(9.0)
        assert earliest(losses, 1000) == verdict(found[:-1], 1000).next
    assert earliest((3.0,), 7) == 7
    assert earliest((3.0, 2.0, 1.0), 40) == 40

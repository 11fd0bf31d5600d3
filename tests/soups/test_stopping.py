"""When folds are judged, how fast they go, and when they stop, as functions of the losses alone."""

from __future__ import annotations

import math

import pytest

from stockpot.soups.stopping import POWERS, RATE, earliest, verdict

SEARCHED = [9.0, 8.0, 8.5, 8.5]  # the given rate, twice and half of it: the first is best


def rates_of(losses: dict[int, float], lr: float, start: float = 1.0) -> list[float]:
    """The rates that are tried, given the loss at every power of two."""
    told, rates = [start], []
    while (found := verdict(told, 1000, lr)).restart:
        rates.append(found.rate)
        told.append(losses[round(math.log2(found.rate / RATE))])
    return rates


def test_a_rate_is_searched_from_the_given_one() -> None:
    bowl = {n: abs(n - 2) / 10 for n in POWERS}  # best at four times 0.01, and everywhere better than the start
    assert rates_of(bowl, 0.01) == [0.01, 0.02, 0.04, 0.08]
    assert rates_of(bowl, 0.09) == [0.08, 0.16, 0.04, 0.02]
    assert rates_of(bowl, 0.04) == [0.04, 0.08, 0.02]
    low = {n: 0.9 + abs(n + 1) / 10 for n in POWERS}  # better than the start at half of it alone
    assert rates_of(low, 0.05) == [0.04, 0.02, 0.01, 0.005, 0.0025]
    worse = dict.fromkeys(POWERS, 2.0)
    assert rates_of(worse, 0.01) == [0.01, 0.005, 0.0025, 0.00125]
    none = [1.0, *[2.0] * 4]
    found = verdict(none, 1000)
    assert (found.best, found.rate, found.over) == (0, RATE, False)
    assert [verdict([*none, *[2.0] * n], 1000).next for n in range(3)] == [40, 80, 160], "longer, then"
    assert verdict([*none, 2.0, 2.0], 1000).again == 20, "with the batches from the first on"
    assert verdict([*none, *[2.0] * 3], 1000).over
    assert rates_of(worse, 1e30)[0] == RATE * 2 ** POWERS[-1]
    assert rates_of(worse, 0.0) == rates_of(worse, 1e-9) == [0.00125]


@pytest.mark.parametrize("lr", [0.002, 0.005, 0.01, 0.05, 0.1])
@pytest.mark.parametrize("best", POWERS)
def test_wherever_the_search_begins_it_ends_at_the_same_rate(lr: float, best: int) -> None:
    losses = {n: abs(n - best) / 11 if n < best else (n - best) / 2 for n in POWERS}
    told = [1.0]
    while (found := verdict(told, 1000, lr)).restart:
        told.append(losses[round(math.log2(found.rate / RATE))])
    assert found.rate == RATE * 2**best
    assert min(told) == told[found.best] == 0
    assert found.next - found.again == 10, "after the first five steps, which count once"
    assert len(told) <= len(POWERS) + 1


def test_the_losses_say_which_is_best_how_fast_to_go_and_when_to_stop() -> None:
    J = 1000
    assert verdict([3.0], J).best == 0
    assert verdict([*SEARCHED, 2.0], J) == verdict([*SEARCHED, 1.0], J)
    found = verdict([*SEARCHED, 2.0, 1.0, 1.0], J)  # no lower is no better
    assert (found.best, found.rate, found.over) == (5, 0.01 * 1.5 * 1.5 * 0.5, False)
    assert not verdict([*SEARCHED, 8.0, 9.0], J).over
    assert verdict([*SEARCHED, 8.0, 9.0, 9.0], J).over
    assert not verdict([*SEARCHED, 9.0, 9.0, 2.0, 4.0, 4.0], J).over
    assert verdict([math.inf, math.inf, 2.0], J).best == 2
    assert verdict([*SEARCHED, *[1.0 / i for i in range(1, 99)]], J).rate == 10.0


def test_folds_are_judged_after_a_tenth_more_steps_and_later_after_twice_as_many_where_nothing_was_gained() -> None:
    falling = [*SEARCHED, *[1.0 / i for i in range(1, 40)]]
    found = [verdict(falling[:n], 1000).next for n in (0, 1, 2, 3, 4, 5, 13, 14, 30)]
    assert found == [0, 5, 10, 15, 20, 25, 65, 70, 269]
    assert [verdict([*SEARCHED, 1.0, *[9.0] * n], 1000).next for n in range(3)] == [25, 35, 55]
    assert verdict([*SEARCHED, 9.0, 1.0], 1000).next == 35  # better again: five
    assert verdict(falling, 100).next == 100
    assert verdict([3.0], 2).next == 2


def test_the_earliest_end_is_that_of_losses_that_do_not_fall_any_more_but_in_the_first_steps() -> None:
    for losses in ((), (3.0,), (*SEARCHED, 2.0, 1.0), (*SEARCHED, 2.0, 4.0)):
        found = [*losses] if len(losses) > 1 else [3.0, 2.0]
        while not verdict(found, 1000).over:
            found.append(9.0)
        assert earliest(losses, 1000) == verdict(found[:-1], 1000).next
    assert earliest((3.0,), 7) == 7
    assert earliest((*SEARCHED, 2.0, 1.0), 40) == 40

"""Claims: numbers read well at every size; short labels stay short and different."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockpot import words
from stockpot.words import Metric


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0221, "0.02 s"), (1.26, "1.3 s"), (59.7, "1 min 0 s"), (59.4, "59 s"), (3725, "1 h 2 min")],
)
def test_seconds(value: float | None, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "–"), (None, "–"), (500, "500 B"), (5000, "4.9 KiB"), (300 * 2**20, "300 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes(value: float | None, text: str) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(("part", "text"), [(0, "0 %"), (0.0001, "under 0.1 %"), (0.034, "3.4 %"), (0.387, "39 %")])
def test_a_share_never_rounds_something_to_nothing(part: float, text: str) -> None:
    assert words.share(part) == text


def test_changes_carry_their_sign_and_zero_none() -> None:
    accuracy, loss = Metric("accuracy"), Metric("loss", unit="")
    assert [accuracy.change(x) for x in (0.0123, -0.0123, -0.000001)] == ["+1.23", "−1.23", "0.00"]
    assert [loss.change(x) for x in (0.5, -0.5, 0.0)] == ["+0.5000", "−0.5000", "0.0000"]
    assert accuracy.value(0.875) == "87.50 %"
    assert loss.value(-0.25) == "−0.2500"
    nats = Metric("nats_per_token", unit="nats")
    assert (nats.title, nats.value(-2.31), nats.points) == ("nats per token (negated)", "−2.3100 nats", "nats")
    assert (accuracy.points, loss.points) == ("points", "")
    assert accuracy.value(float("nan")) == "none"


@given(st.lists(st.text(min_size=1, max_size=120), min_size=1, max_size=20, unique=True), st.integers(8, 30))
def test_labels_are_short_and_different(names: list[str], limit: int) -> None:
    short = words.labels(names, limit)
    assert len(set(short)) == len(names)
    assert all(words.columns(label) <= limit + 4 for label in short)


@given(st.text(max_size=60), st.integers(3, 30))
def test_a_shortened_text_keeps_its_ends(text: str, limit: int) -> None:
    short = words.middle(text, limit)
    whole = " ".join(text.split())
    assert words.columns(short) <= limit
    if words.columns(whole) <= limit:
        assert short == whole
    else:
        head, tail = short.split("…")[0], short.rsplit("…")[-1]
        assert whole.startswith(head)
        assert whole.endswith(tail)


def test_wide_letters_count_twice() -> None:
    assert words.middle("模型模型模型模型", 7) == "模…模型"
    assert words.middle("abcdefgh", 6) == "abc…gh"


def test_long_names_that_differ_in_the_middle_are_told_apart() -> None:
    names = [f"{'same' * 12}_{k}_{'tail' * 12}" for k in range(3)]
    assert words.labels(names, 20) == ["…0…", "…1…", "…2…"]

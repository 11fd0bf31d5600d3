"""Labels are never guessed: understood, or refused with the row and the cell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stockpot.adapters.labels import encode
from stockpot.errors import DataError
from stockpot.events import Event


def refusal(column: Any, **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        encode({"fit": column}, **options)
    return str(caught.value)


def classes_of(column: Any, **options: Any) -> list[int]:
    found: list[int] = encode({"fit": column}, **options)["fit"].tolist()
    return found


def test_class_names_are_numbered_alike_in_every_split() -> None:
    found = encode({"fit": ["cat", "dog"], "report": ["ant", "dog"]})
    assert {k: v.tolist() for k, v in found.items()} == {"fit": [1, 2], "report": [0, 2]}


def test_class_order_comes_from_the_recipe_then_the_model_then_the_data() -> None:
    column = ["pos", "neg"]
    assert classes_of(column) == [1, 0]
    assert classes_of(column, model_names=("pos", "neg", "x")) == [0, 1]
    assert classes_of(column, classes=("x", "neg", "pos"), model_names=("pos", "neg")) == [2, 1]


def test_a_class_order_that_nobody_gave_is_told() -> None:
    """A head with another order would be scored on wrong labels, and soups learn even those."""
    told: list[Event] = []
    for options in ({"model_names": ("pos", "neg")}, {"classes": ("pos", "neg")}):
        encode({"fit": ["pos", "neg"]}, listen=told.append, **options)  # type: ignore[arg-type]
    encode({"fit": ["1", "0"]}, listen=told.append)
    assert told == []
    encode({"fit": ["pos", "neg"]}, listen=told.append)
    assert told == [Event("classes", {"names": ["neg", "pos"]})]


@pytest.mark.parametrize(
    ("column", "expected"),
    [
        (["10", "2", "0"], [10, 2, 0]),
        (["0.0", "1", "2"], [0, 1, 2]),
        ([0.0, 1, "2"], [0, 1, 2]),
        ([b"1", b"0"], [1, 0]),
        (np.array([3.0, 1.0]), [3, 1]),
        (np.array([[3], [1]]), [3, 1]),
        (np.array([True, False]), [1, 0]),
        (["LABEL_10", "LABEL_2"], [10, 2]),
    ],
)
def test_whole_numbers_are_class_numbers_however_they_are_written(column: Any, expected: list[int]) -> None:
    assert classes_of(column) == expected


@pytest.mark.parametrize("odd", ["", "NA", "nan", None, float("nan")])
def test_one_missing_cell_does_not_renumber_the_classes(odd: Any) -> None:
    """Each of these turned ten classes into eleven in alphabetical order: 83 % became 1.6 to 73 %."""
    numbers: list[Any] = [str(n % 12) for n in range(100)]
    numbers[41] = odd
    said = "nothing" if odd in ("", None) or odd != odd else f"label {odd!r}"
    assert f"fit data, row 41 (from 0): expected a class, found {said}" in refusal(numbers)
    names: list[Any] = [("cat", "dog")[n % 2] for n in range(100)]
    names[7] = odd
    assert "fit data, row 7 (from 0): expected a class" in refusal(names)


def test_one_odd_cell_is_named_whichever_kind_it_is() -> None:
    assert "row 2 (from 0): expected a number like most labels, found label 'x'" in refusal(["0", "1", "x", "1"])
    assert "row 1 (from 0): expected a name like most labels, found label '0.0'" in refusal(["cat", "0.0", "dog"])
    assert "list the labels in data.classes" in refusal(["7", "8", "9+"])
    assert classes_of(["7", "8", "9+"], classes=("7", "8", "9+")) == [0, 1, 2]
    assert classes_of(["NA", "EU"], classes=("NA", "EU")) == [0, 1]


def test_a_class_may_be_called_none_and_no_class_twice() -> None:
    assert classes_of(["None", "a"], classes=("a", "None")) == [1, 0]
    assert "found label 'b'" in refusal(["None", "b"], classes=("a", "None"))
    assert "data.classes: expected every class once, found a, b, a" in refusal(["a"], classes=("a", "b", "a"))


def test_the_models_own_names_leave_no_room_for_others() -> None:
    text = refusal(["good", "bad"], model_names=("negative", "positive"))
    assert "row 0 (from 0): expected one of the classes of the model negative, positive" in text
    assert "list the labels in data.classes in the order of the head" in text
    assert "found label '0'" in refusal(["negative", "0"], model_names=("negative", "positive"))
    assert "found label ''" in refusal(["negative", ""], model_names=("negative", "positive"))
    assert classes_of(["1", "0"], model_names=("negative", "positive")) == [1, 0]
    assert classes_of(["1", "5.0"], model_names=("1", "2", "3", "4", "5")) == [0, 4]


def test_names_alone_must_be_as_many_as_the_head_has() -> None:
    """One typing error, or one class that is not in the data, would move all classes behind it."""
    assert classes_of(["cat", "dog"], head=2) == [0, 1]
    text = refusal(["cat", "dog", "dgo", "cat", "dog"], head=2)
    assert "labels: expected the names of all 2 classes of the model, found 3, the rarest of them 'dgo'" in text
    assert "found 1, the rarest of them 'dog'" in refusal(["dog", "dog"], head=2)
    text = refusal([f"a review of many words, number {k}, that nobody would call a label" for k in range(20)], head=2)
    assert "set data.label to the column of labels: in this one hardly two rows are alike" in text
    assert len(text) < 600
    assert "'a review of man" in text
    assert classes_of(["dog"], head=2, classes=("cat", "dog")) == [1]
    assert classes_of(["1"], head=5) == [1]


def test_labels_that_are_no_classes_say_what_to_write() -> None:
    for column in (["0.5", "1.25", "3"], np.array([3.0, 0.5])):
        text = refusal(column)
        assert "expected a class: a whole number or a name, found label '0.5'" in text
        assert "write data.target: number" in text
    assert "write data.target: multi" in refusal(np.eye(3))
    assert "write data.target: multi" in refusal([["a", "b"], ["a"]])
    assert "a class number, counted from 0, found '-1'" in refusal(["1", "-1"])
    assert "row 1 (from 0): expected one of the classes a, b, found label 'c'" in refusal(
        ["a", "c"], classes=("a", "b")
    )
    assert "expected UTF-8 text, found bytes ff" in refusal([b"\xff", b"a"])


def test_numbers_are_targets_where_the_recipe_says_so() -> None:
    for column in (["0.5", "2"], np.array([0.5, 2]), [0.5, 2], np.array([[0.5], [2]])):
        found = encode({"fit": column}, target="number")["fit"]
        assert (found.dtype, found.tolist()) == (np.float32, [0.5, 2.0])
    assert "row 1 (from 0): expected numbers, found nothing" in refusal([0.5, None], target="number")
    assert "row 1 (from 0): expected numbers, found 'x'" in refusal(["1", "x"], target="number")
    assert "row 0 (from 0): expected a number, found nan" in refusal(np.array([np.nan]), target="number")


def test_several_classes_per_sample_where_the_recipe_says_so() -> None:
    marks = np.array([[1, 0, 1], [0, 0, 0]])
    found = encode({"fit": marks}, target="multi")["fit"]
    np.testing.assert_array_equal(found, marks)
    assert found.dtype == np.float32
    for column in (np.array([[0.5, 1]]), np.array([0, 1]), ["a", "b"], [[0, 1], [1]]):
        assert "labels of the fit data: expected a list of 0 and 1 per sample" in refusal(column, target="multi")

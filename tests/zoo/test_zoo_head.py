"""Claims about which parameters are the head."""

from __future__ import annotations

import pytest
from torch import nn

from stockpot.errors import TaskError
from stockpot.zoo.training import find_head
from zoo import Tied


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.heads = nn.Linear(4, 2)
        self.head = nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        (None, {"head.weight", "head.bias"}),
        ("head", {"head.weight", "head.bias"}),
        ("head.", {"head.weight", "head.bias"}),
        ("head.*", {"head.weight", "head.bias"}),
        ("head*", {"head.weight", "head.bias", "heads.weight", "heads.bias"}),
        ("head.bias", {"head.bias"}),
        ("encoder.1", {"encoder.1.weight", "encoder.1.bias"}),
    ],
)
def test_names_prefixes_and_patterns(pattern: str | None, names: set[str]) -> None:
    assert set(find_head(Model(), pattern)) == names


def test_a_pattern_that_fits_nothing_gets_the_nearest_names() -> None:
    with pytest.raises(TaskError) as caught:
        find_head(Model(), "heed.*")
    assert "head 'heed.*': expected a name, prefix or pattern of parameters of Model" in str(caught.value)
    assert "did you mean head or heads" in str(caught.value)


def test_a_pattern_like_nothing_at_all_gets_the_last_names() -> None:
    with pytest.raises(TaskError, match=r"the last ones are head.weight, head.bias"):
        find_head(nn.ModuleDict({"head": nn.Linear(2, 2)}), "zzzzzzzz")


def test_a_model_without_linear_layers_has_no_head_to_find() -> None:
    with pytest.raises(TaskError, match="expected a linear layer, as the last of the model, found none"):
        find_head(nn.Sequential(nn.Conv2d(1, 1, 1)), None)


def test_tied_weights_do_not_hide_the_head() -> None:
    assert find_head(Tied(), "outer") == ("outer.weight",)

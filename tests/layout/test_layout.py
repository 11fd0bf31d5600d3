"""Which tensors are mixed, and in which groups."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import Task, cook
from stockpot.errors import LayoutError
from stockpot.layout import EXCLUDED, FROZEN, INTEGER, STATISTIC, Layout, by_block, by_module
from stockpot.pool import Pool
from stockpot.soups.registry import METHODS
from zoo import Tied, fine_tunes, layout_of, mlp, normed, samples, write


@pytest.mark.parametrize(
    ("name", "block", "module"),
    [
        ("encoder.layer.3.attention.query.weight", "encoder.layer.3", "encoder.layer.3.attention.query"),
        ("encoder.layers.encoder_layer_11.mlp.0.bias", "encoder.layers.encoder_layer_11", None),
        ("layer1.0.conv1.weight", "layer1", "layer1.0.conv1"),
        ("visual.transformer.resblocks.7.ln_1.weight", "visual.transformer.resblocks.7", None),
        ("blocks.10.norm1.weight", "blocks.10", "blocks.10.norm1"),
        ("embeddings.word.weight", "embeddings.word", "embeddings.word"),
        ("conv1.weight", "conv1", "conv1"),
        ("wav2vec2.encoder.layers.3.fc1.weight", "wav2vec2.encoder.layers.3", None),  # the root is no block
        ("wav2vec2.layers.3.weight", "wav2vec2.layers.3", None),
        ("stage2.conv.weight", "stage2", "stage2.conv"),
        ("cls_token", "cls_token", "cls_token"),
        ("param2", "param2", "param2"),  # the tensor's own name is no block
    ],
)
def test_names_tell_the_block_and_the_module(name: str, block: str, module: str | None) -> None:
    assert by_block(name) == block
    assert module is None or by_module(name) == module


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return write(tmp_path, fine_tunes(mlp, 3))


@pytest.mark.parametrize(
    ("granularity", "groups"),
    [
        ("model", ("model",)),
        ("block", ("0", "2")),
        ("module", ("0", "2")),
        ("tensor", ("0.bias", "0.weight", "2.bias", "2.weight")),
    ],
)
def test_granularity(pool: Pool, granularity: str, groups: tuple[str, ...]) -> None:
    layout = Layout.of(pool, granularity)
    assert layout.groups == groups
    assert layout.group_of.keys() == pool.specs.keys()
    assert len(layout) == len(groups)


def test_a_function_of_your_own_names_the_groups(pool: Pool) -> None:
    layout = Layout.of(pool, lambda name: "biases" if name.endswith("bias") else "weights")
    assert layout.groups == ("biases", "weights")
    assert layout.group_of == {"0.bias": 0, "0.weight": 1, "2.bias": 0, "2.weight": 1}
    assert layout.granularity == "custom"


def test_patterns_leave_tensors_to_the_donor(pool: Pool) -> None:
    without_head = Layout.of(pool, exclude=["2.*"], donor="model_1")
    assert without_head.kept == {"2.bias": EXCLUDED, "2.weight": EXCLUDED}
    assert without_head.donor == 1
    assert Layout.of(pool, include="0.*").group_of == without_head.group_of
    assert list(Layout.of(pool, include=["*.weight"], exclude=["2.*"]).group_of) == ["0.weight"]


def test_every_tensor_has_one_fate_and_the_reason_is_stated(tmp_path: Path) -> None:
    states = fine_tunes(normed, 3)
    for state in states:
        state["4.bias"] = torch.arange(3.0)
        state["mask"] = torch.tensor([True, False])
        state["none"] = torch.empty(0)
    pool = write(tmp_path, states)
    layout = layout_of(pool)
    assert layout.kept == {
        "1.num_batches_tracked": INTEGER,
        "1.running_mean": STATISTIC,
        "1.running_var": STATISTIC,
        "4.bias": FROZEN,
        "mask": INTEGER,
        "none": FROZEN,
    }
    assert layout.group_of.keys() | layout.kept.keys() == pool.specs.keys()
    assert not layout.group_of.keys() & layout.kept.keys()


def test_tied_names_share_a_group_and_are_left_out_together(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(Tied, 3))
    layout = layout_of(pool)
    assert layout.tied == (("inner.weight", "outer.weight"),)
    assert layout.group_of["inner.weight"] == layout.group_of["outer.weight"]
    assert len(layout) == 3
    assert layout_of(pool, exclude="outer.*").kept == dict.fromkeys(layout.tied[0], EXCLUDED)
    assert layout.tied[0] == tuple(layout_of(pool, include="outer.*").group_of)


def test_a_layout_survives_json(tmp_path: Path) -> None:
    layout = layout_of(write(tmp_path, fine_tunes(Tied, 3)), "module", exclude="head.bias", donor=2)
    assert Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


def test_unknown_granularity(pool: Pool) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.of(pool, "layer")
    assert str(caught.value) == (
        "granularity 'layer': expected one of model, block, module, tensor, or a function from tensor name to group"
        " name, found an unknown word.\n"
        "  Fix: use 'tensor' for the paper's layer-wise soups, 'model' for one coefficient per ingredient."
    )


def test_a_function_must_return_names(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"granularity function for '0\.bias': expected the name of a group, found 7"):
        Layout.of(pool, lambda name: 7)  # type: ignore[arg-type,return-value]


def test_patterns_that_match_nothing(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"exclude pattern 'heads\.\*'.*found no match") as caught:
        Layout.of(pool, exclude=["heads.*"])
    assert "names look like: 0.bias, 0.weight" in str(caught.value)


@pytest.mark.parametrize("donor", [3, -1, "model_9"])
def test_no_such_donor(pool: Pool, donor: int | str) -> None:
    with pytest.raises(LayoutError, match="expected an ingredient's name or an index from 0 to 2") as caught:
        Layout.of(pool, donor=donor)
    assert "names are: model_0, model_1, model_2" in str(caught.value)


def test_identical_ingredients_are_mixed_all_the_same(tmp_path: Path) -> None:
    state = fine_tunes(normed, 1)[0]
    twins = write(tmp_path / "twins", [{**state, "phase": torch.tensor([1j])}] * 2)
    layout = layout_of(twins)
    assert set(layout.group_of) == {"0.bias", "0.weight", "1.bias", "1.weight", "4.bias", "4.weight"}
    assert layout.kept["phase"] == FROZEN
    assert set(layout_of(twins, exclude="4.*").group_of) == {"0.bias", "0.weight", "1.bias", "1.weight"}


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_makes_of_identical_ingredients_that_model(tmp_path: Path, method: str) -> None:
    state = fine_tunes(mlp, 1)[0]
    pool = write(tmp_path, [state] * 3)
    settings: dict[str, Any] = {"steps": 2} if METHODS[method].learned else {}
    soup = cook(pool, Task(mlp(), samples(24)), method, **settings).soup
    if soup is not None:
        assert all(torch.equal(tensor, state[name]) for name, tensor in soup.state_dict().items())


def test_nothing_to_mix(pool: Pool) -> None:
    with pytest.raises(LayoutError, match=r"at least one tensor to mix, found none of 4 \(4 excluded\)") as caught:
        layout_of(pool, exclude="*")
    assert "widen include or exclude" in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("known", [True, False])  # what an average without data does not ask for
def test_codes_that_look_like_quantised_weights_are_refused_unless_they_are_equal_or_kept(
    tmp_path: Path, dtype: torch.dtype, known: bool
) -> None:
    """Their names may be any; taking one ingredient's codes with everybody's scales gives another model."""
    codes = torch.tensor([[1, 2], [3, 4]], dtype=dtype)
    pool = write(tmp_path, [{"w": codes * (k + 1), "s": torch.ones(2) * k, "mask": codes} for k in range(3)])
    facts = pool.facts() if known else None
    with pytest.raises(LayoutError, match=r"tensor w: expected weights that can be averaged .* quantised") as caught:
        Layout.of(pool, facts=facts)
    assert "dequantise the checkpoints, or keep one ingredient's with exclude='w'" in str(caught.value)
    assert Layout.of(pool, facts=facts, exclude="w").kept == {"mask": INTEGER, "w": INTEGER}


def test_complex_tensors_are_refused_unless_they_are_kept(tmp_path: Path) -> None:
    def state(k: int) -> dict[str, Tensor]:
        return {"a": torch.full((2,), float(k)), "phase": torch.tensor([1 + 1j * k])}

    pool = write(tmp_path, [state(0), state(1)])
    with pytest.raises(LayoutError, match="tensor phase: expected real numbers, found complex ones"):
        Layout.of(pool)
    assert Layout.of(pool, exclude="phase").kept == {"phase": EXCLUDED}


def test_without_being_told_the_first_ingredient_is_the_donor(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 2))
    assert Layout.of(pool, exclude=["2.bias"]).donor == 0
    assert Layout(("all",), {"w": 0}, {}).donor == 0

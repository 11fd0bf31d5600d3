"""mergekit configurations out and in, by an independent reading of mergekit's rule; benchmarks/mergekit_yaml.py runs
the real one."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from stockpot.errors import SoupError
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.soup import Soup
from stockpot.soup.average import from_mergekit, to_mergekit
from zoo import fine_tunes, mlp, normed, same

State = dict[str, Tensor]


def longer_names() -> nn.Module:
    """Names that are parts of each other."""
    layers = {"a": nn.Linear(6, 8), "ba": nn.Linear(8, 8), "xba": nn.Linear(8, 3)}
    return nn.Sequential(OrderedDict(layers))


def folders(place: Path, states: list[State]) -> Pool:
    shutil.rmtree(place, ignore_errors=True)
    for k, state in enumerate(states):
        (place / f"run_{k}").mkdir(parents=True)
        save_file(state, place / f"run_{k}" / "model.safetensors")
        (place / f"run_{k}" / "config.json").write_text("{}")
    return Pool.open(place)


def merged(text: str) -> State:
    """What mergekit's `linear` makes of a configuration of plain weights and filters; `normalize` is false."""
    config = yaml.safe_load(text)
    assert config["merge_method"] == "linear"
    assert config["parameters"] == {"normalize": False}
    out: State = {}
    for model in config["models"]:
        for name, value in load_file(Path(model["model"]) / "model.safetensors").items():
            setting = model["parameters"]["weight"]
            conditions = setting if isinstance(setting, list) else [{"value": setting}]
            weight = next(one["value"] for one in conditions if one.get("filter") is None or one["filter"] in name)
            out[name] = out.get(name, torch.zeros(())) + weight * value.double()
    return {name: value.to(getattr(torch, config["out_dtype"])) for name, value in out.items()}


def learned(pool: Pool, granularity: str = "tensor", **options: Any) -> Soup:
    layout = Layout.of(pool, granularity, facts=pool.facts())
    W = torch.randn(len(pool), len(layout), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Soup(pool, layout, 1 / len(pool) + W - W.mean(dim=0), **options)


@pytest.mark.parametrize("build", [mlp, longer_names, normed])
@pytest.mark.parametrize("granularity", ["tensor", "model"])
def test_the_configuration_rebuilds_the_soup(tmp_path: Path, build: Any, granularity: str) -> None:
    states = [
        {name: value for name, value in state.items() if value.is_floating_point()} for state in fine_tunes(build, 3)
    ]
    soup = learned(folders(tmp_path, states), granularity)
    found, wanted = merged(to_mergekit(soup)), soup.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)


def test_what_is_kept_comes_from_the_donor(tmp_path: Path) -> None:
    pool = folders(tmp_path, fine_tunes(mlp, 3))
    layout = Layout.of(pool, "model", exclude="2.*", donor=1)
    soup = Soup(pool, layout, torch.tensor([[0.2], [0.3], [0.5]]))
    found = merged(to_mergekit(soup))
    assert torch.equal(found["2.weight"], pool.tensor(1, "2.weight"))
    assert torch.allclose(found["0.weight"], soup.state_dict()["0.weight"], atol=1e-6)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_our_configuration_read_again_is_the_same_soup(tmp_path: Path, dtype: torch.dtype | None) -> None:
    soup = learned(folders(tmp_path, fine_tunes(longer_names, 3)))
    again, stored = from_mergekit(yaml.safe_load(to_mergekit(soup, dtype)))
    assert stored == (dtype or torch.float32)
    found, wanted = again.state_dict(), soup.state_dict()
    assert all(torch.allclose(found[name], wanted[name], rtol=0, atol=1e-6) for name in wanted)


def config(pool: Pool, *weights: Any, **more: Any) -> dict[str, Any]:
    models = [
        {"model": str(one.path), "parameters": {"weight": weight}}
        for one, weight in zip(pool.checkpoints, weights, strict=True)
    ]
    return {"merge_method": "linear", "models": models, **more}


def test_weights_are_divided_by_their_sum_as_mergekit_does(tmp_path: Path) -> None:
    pool = folders(tmp_path, fine_tunes(mlp, 2))
    soup, stored = from_mergekit(config(pool, 1, 3))
    assert stored is None
    assert same(soup.state_dict(), Soup(pool, Layout.of(pool, "model"), torch.tensor([[0.25], [0.75]])).state_dict())
    by_filter = [{"filter": "bias", "value": 3}, {"filter": "*", "value": 1}]
    soup, stored = from_mergekit(config(pool, by_filter, 1, dtype="float32", out_dtype="bfloat16"))
    assert stored == torch.bfloat16
    a, b = (pool.tensor(k, "0.bias") for k in range(2))
    assert torch.allclose(soup.state_dict()["0.bias"], 0.75 * a + 0.25 * b)
    common = {
        "merge_method": "linear",
        "parameters": {"weight": 2},
        "models": [{"model": str(p.path)} for p in pool.checkpoints],
    }
    assert same(from_mergekit(common)[0].state_dict(), Soup.uniform(pool).state_dict())


def test_what_a_model_does_not_say_of_a_tensor_all_of_them_say(tmp_path: Path) -> None:
    pool = folders(tmp_path, fine_tunes(mlp, 2))
    soup, _ = from_mergekit(config(pool, [{"filter": "bias", "value": 3}], 1, parameters={"weight": 1}))
    state = soup.state_dict()
    for name, share in (("0.bias", 0.75), ("0.weight", 0.5)):
        assert torch.allclose(state[name], share * pool.tensor(0, name) + (1 - share) * pool.tensor(1, name))


def test_what_is_not_mixed_comes_from_the_base(tmp_path: Path) -> None:
    pool = folders(tmp_path, fine_tunes(mlp, 2))
    (tmp_path / "run_1" / "config.json").write_text('{"is": "base"}')
    given = config(pool, 1, 1, base_model=str(tmp_path / "run_1"))
    from_mergekit(given)[0].save(tmp_path / "soup")
    assert (tmp_path / "soup" / "config.json").read_text() == '{"is": "base"}'


def test_configurations_that_are_no_soups_are_refused(tmp_path: Path) -> None:
    pool = folders(tmp_path, fine_tunes(mlp, 2))

    def refused(value: Any, text: str) -> None:
        with pytest.raises(SoupError, match=text):
            from_mergekit(value)

    refused([], "expected merge_method: linear, found 'list'")
    refused(config(pool, 1, 1, merge_method="ties"), "expected merge_method: linear, found 'ties'")
    refused(config(pool, 1, 1, tokenizer_source="union"), "expected no other keys than .*, found tokenizer_source")
    refused({"merge_method": "linear", "models": None}, "expected a list of whole models")
    refused(config(pool, [0.1, 0.9], 1), "expected a number as the weight of .*, found 0.1|a gradient over layers")
    refused(config(pool, [{"filter": "bias", "value": 1}], 1), "expected a weight for .*weight, found none")
    refused(config(pool, 1, "x"), "expected a number as the weight of .*, found 'x'")
    refused(config(pool, 1, 1, parameters={"normalize": False}), "expected weights that sum to one, found a sum of 2")
    refused(config(pool, 1, -1), "expected weights that sum to one, found a sum of 0")
    refused(config(pool, 1, 1, dtype="int8"), "expected a dtype among float32, .*, found 'int8'")
    refused(config(pool, 1, 1, parameters=[1]), r"expected parameters with names, found \[1\]")
    refused(config(pool, 1, 1, base_model="other"), "expected a base_model that is one of `models`, found 'other'")
    refused(config(pool, 1e308, 1e308), "expected weights with a finite sum for .*, found inf")
    by_tensor = {"normalize": [{"filter": "bias", "value": False}]}
    refused(config(pool, 1, 1, parameters=by_tensor), r"expected `normalize` to be true or false, found \[{")
    several = config(pool, 1, 1)
    several["models"][0]["model"] = str(tmp_path / "run_*")
    save_file(fine_tunes(mlp, 3)[2], tmp_path / "x.safetensors")
    several["models"][1]["model"] = str(tmp_path / "x.safetensors")
    refused(several, "expected 2 models, found 3: patterns or folders of several")
    for more in ({"layer_range": [0, 2]}, {"model": {"model": "a"}}):
        wrong = config(pool, 1, 1)
        wrong["models"][0] |= more
        refused(wrong, "expected a list of whole models, found another form of `models`")


def test_soups_that_no_configuration_can_hold_are_refused(tmp_path: Path) -> None:
    pool = folders(tmp_path / "pool", fine_tunes(normed, 2))
    measured = learned(pool, statistics={"1.running_mean": torch.zeros(8)})
    with pytest.raises(SoupError, match="found recalibrated running statistics, which a configuration cannot hold"):
        to_mergekit(measured)
    for k, state in enumerate(fine_tunes(mlp, 2)):
        save_file(state, tmp_path / f"{k}.safetensors")
    with pytest.raises(SoupError, match=r"found single files, such as 0\.safetensors"):
        to_mergekit(learned(Pool.open(tmp_path / "0.safetensors", tmp_path / "1.safetensors")))

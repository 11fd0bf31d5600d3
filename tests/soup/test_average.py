"""Averages without data are what their formulas say, and wrong questions are answered in our words."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stockpot import average
from stockpot.errors import MismatchError, PoolError, SoupError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.soup import Soup, rebuild
from zoo import fine_tunes, mlp, normed, same, write

State = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "pool", fine_tunes(mlp, 3))
    save_file(fine_tunes(mlp, 4)[3], tmp_path / "base.safetensors")
    return tmp_path


def states(folder: Path) -> list[State]:
    return [load_file(file) for file in sorted((folder / "pool").iterdir())]


def close(found: State, wanted: State) -> bool:
    return all(torch.allclose(found[name].double(), wanted[name], rtol=0, atol=1e-6) for name in wanted)


def mixture(parts: list[State], weights: list[float]) -> State:
    return {name: sum(w * p[name].double() for w, p in zip(weights, parts, strict=True)) for name in parts[0]}  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [1 / 3, 1 / 3, 1 / 3]),
        ({"method": "uniform"}, [1 / 3, 1 / 3, 1 / 3]),
        ({"weights": [1, 2, 5]}, [0.125, 0.25, 0.625]),
        ({"weights": [0.5, -0.25, 0.25]}, [1.0, -0.5, 0.5]),
        ({"method": "ema", "decay": 0.5}, [0.25, 0.25, 0.5]),
    ],
)
def test_weights(folder: Path, options: dict[str, Any], weights: list[float]) -> None:
    soup = average(folder / "pool", folder / "soup", **options)
    assert soup.W[:, 0].tolist() == pytest.approx(weights, abs=1e-15)
    assert close(load_file(folder / "soup" / "model.safetensors"), mixture(states(folder), weights))


def test_the_moving_average_is_the_running_one(folder: Path) -> None:
    parts, decay = states(folder), 0.7
    running = {name: value.double() for name, value in parts[0].items()}
    for part in parts[1:]:
        running = {name: decay * value + (1 - decay) * part[name].double() for name, value in running.items()}
    assert close(average(folder / "pool", method="ema", decay=decay).state_dict(), running)


def test_task_arithmetic_adds_differences_to_the_base(folder: Path) -> None:
    base, (a, b, c) = load_file(folder / "base.safetensors"), states(folder)
    soup = average(folder / "pool", base=folder / "base.safetensors", weights=[0.4, 0.5, -0.2])
    wanted = {
        name: start.double()
        + 0.4 * (a[name].double() - start)
        + 0.5 * (b[name].double() - start)
        - 0.2 * (c[name].double() - start)
        for name, start in base.items()
    }
    assert close(soup.state_dict(), wanted)
    assert soup.pool.names[-1] == "base"


def test_model_stock_is_its_formula(folder: Path) -> None:
    base, parts = load_file(folder / "base.safetensors"), states(folder)
    found = average(folder / "pool", base=folder / "base.safetensors", method="model_stock").state_dict()
    for name, start in base.items():
        offsets = [(part[name] - start).double().flatten() for part in parts]
        c = sum(float(torch.cosine_similarity(u, v, dim=0)) for u, v in combinations(offsets, 2)) / 3
        t = 3 * c / (1 + 2 * c)
        wanted = t * torch.stack([part[name].double() for part in parts]).mean(dim=0) + (1 - t) * start.double()
        assert torch.allclose(found[name].double(), wanted, rtol=0, atol=1e-6), name


def test_state_dicts_in_memory_and_files_are_alike(folder: Path) -> None:
    parts = states(folder)
    wrapped = [{f"module.{name}": torch.nn.Parameter(value) for name, value in part.items()} for part in parts]
    from_memory = average(wrapped)
    assert from_memory.pool.names == ("state dict 1", "state dict 2", "state dict 3")
    assert same(from_memory.state_dict(), average(folder / "pool").state_dict())
    saved = average([parts[0], folder / "pool" / "model_1.safetensors"], folder / "soup", weights=[1, 3])
    assert saved.pool.names == ("state dict 1", "model_1")
    assert same(Soup.load(folder / "soup", ingredients=saved.pool).state_dict(), saved.state_dict())
    with pytest.raises(MismatchError, match=r"state dict 2: expected the tensors of state dict 1"):
        average([parts[0], {"other": torch.zeros(2)}])


def test_an_average_is_a_soup_like_any_other(folder: Path) -> None:
    average(folder / "pool", folder / "soup", weights=[1, 1, 2], max_shard=200)
    again = rebuild(folder / "soup", folder / "again")
    assert sorted(file.name for file in again.iterdir()) == sorted(file.name for file in (folder / "soup").iterdir())
    assert json.loads((folder / "soup" / "soup.json").read_text())["about"] == {
        "method": "weighted",
        "weights": [1, 1, 2],
    }
    with pytest.raises(SoupError, match="in Python overwrite=True"):
        average(folder / "pool", folder / "soup")


def test_statistics_and_counters_follow_the_rules_of_soups(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(normed, 3))
    soup = average(pool)
    assert same(soup.state_dict(), Soup.uniform(pool).state_dict())
    assert soup.state_dict()["1.num_batches_tracked"].dtype == torch.int64


def test_a_model_from_another_start_is_named(folder: Path) -> None:
    heard: list[Event] = []
    average(folder / "pool", listen=heard.append)
    assert not [event for event in heard if event.kind == "strangers"]
    # As far as a model can be.
    stranger = {name: -value for name, value in states(folder)[0].items()}
    save_file(stranger, folder / "pool" / "stranger.safetensors")
    average(folder / "pool", listen=heard.append)
    assert [event.data for event in heard if event.kind == "strangers"] == [{"names": ["stranger"]}]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"method": "mean"}, "method of average: expected one of uniform, weighted, ema, model_stock, found 'mean'"),
        ({"method": "linear"}, "leave the method out; with weights, they are divided by their sum"),
        ({"method": "task_arithmetic"}, "give weights and a base, and no method"),
        ({"method": "dare_ties"}, "use mergekit itself: what it does is no weighted mean of the models"),
        ({"method": "slerp"}, "so close that mergekit's slerp of them is the same average"),
        ({"method": "weighted"}, "expected weights, one for each model, found none"),
        ({"method": "uniform", "weights": [1, 2, 3]}, "expected no weights, found some"),
        (
            {"weights": [1, 2]},
            r"weights: expected 3 numbers with a finite sum, found 2: 1, 2.\n  Fix: give one for each, in this",
        ),
        ({"weights": [1, 2, float("nan")]}, "expected 3 numbers with a finite sum, found 3: 1, 2, nan"),
        ({"weights": [1, 1, -2]}, "expected numbers that do not cancel, found a sum of 0"),
        ({"method": "ema"}, "expected a decay, found none"),
        ({"decay": 0.5}, "expected no decay, found 0.5"),
        ({"method": "ema", "decay": 1.0}, "decay: expected a number between 0 and 1, found 1.0"),
        ({"method": "model_stock"}, "expected a base, found none"),
        ({"weights": "1,2,3"}, r"weights: expected plain numbers, found \['1,2,3'\]"),
        ({"weights": [None, 1, 2]}, "weights: expected plain numbers, found .None, 1, 2."),
        ({"method": "ema", "decay": "half"}, "decay: expected plain numbers, found .'half'."),
        ({"dtype": "bfloat16"}, "dtype of the soup: expected a floating-point type, found 'bfloat16'"),
        ({"dtype": torch.int8}, "dtype of the soup: expected a floating-point type, found torch.int8"),
        ({"max_shard": 0}, "size 0: expected a number of bytes such as 2000000"),
        ({"max_shard": -5}, "size -5: expected a number of bytes"),
        ({"base": "base.safetensors"}, "method 'uniform' of average: expected no base, found one"),
    ],
)
def test_wrong_questions(folder: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(SoupError, match=text):
        average(folder / "pool", folder / "soup", **options)
    assert not (folder / "soup").exists()


def test_other_wrong_questions(folder: Path) -> None:
    pool = Pool.open(folder / "pool")
    with pytest.raises(SoupError, match="average with a base: expected paths of models, found an opened pool"):
        average(pool, base=folder / "base.safetensors", weights=[1, 1, 1])
    with pytest.raises(SoupError, match="expected at least two models, found 1"):
        average(folder / "pool" / "model_0.safetensors", base=folder / "base.safetensors", method="model_stock")


def test_weights_too_large_to_be_summed_are_refused(folder: Path) -> None:
    with pytest.raises(SoupError, match=r"expected 3 numbers with a finite sum, found 3: 1e\+308, 1e\+308, 1e\+308"):
        average(folder / "pool", weights=[1e308, 1e308, 1e308])


@pytest.mark.parametrize("kind", [np.array, torch.tensor, iter, lambda values: [np.float32(value) for value in values]])
def test_numbers_of_any_library_are_weights_and_are_recorded(folder: Path, kind: Any) -> None:
    average(folder / "pool", folder / "soup", weights=kind([0.25, 0.25, 0.5]))
    about = json.loads((folder / "soup" / "soup.json").read_text())["about"]
    assert about == {"method": "weighted", "weights": [0.25, 0.25, 0.5]}
    decayed = average(folder / "pool", folder / "other", method="ema", decay=np.float32(0.5))
    assert decayed.about == {"method": "ema", "decay": 0.5}


def test_a_state_dict_without_data_is_refused() -> None:
    with pytest.raises(PoolError, match=r"tensor 'w': expected .*, found a tensor without data .device meta."):
        average([{"w": torch.ones(2, device="meta")}, {"w": torch.ones(2)}])


def test_model_stock_is_its_formula_where_tensors_hardly_move() -> None:
    """As biases do in a few hundred steps at a small rate."""
    base = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    moved = [base + 1e-5 * torch.randn(64, generator=torch.Generator().manual_seed(n)).double() for n in (1, 1, 2)]
    moved[1] = moved[1] + 1e-6
    names = {"weight": base, "same": base}
    soup = average([{"weight": one, "same": base} for one in moved], base=names, method="model_stock")
    u = [one - base for one in moved]
    c = sum(float(torch.cosine_similarity(u[a], u[b], dim=0, eps=1e-30)) for a, b in combinations(range(3), 2)) / 3
    t = 3 * c / (1 + 2 * c)
    column = soup.W[:, soup.layout.group_of["weight"]].tolist()
    assert column == pytest.approx([t / 3, t / 3, t / 3, 1 - t], abs=1e-6)
    assert soup.W[:, soup.layout.group_of["same"]].tolist() == [0, 0, 0, 1]


def test_model_stock_names_a_model_that_is_not_finite(folder: Path) -> None:
    broken = states(folder)[1]
    broken["0.weight"][0, 0] = float("nan")
    save_file(broken, folder / "pool" / "model_1.safetensors")
    with pytest.raises(PoolError, match=r"model_1.safetensors: .*0\.weight"):
        average(folder / "pool", base=folder / "base.safetensors", method="model_stock")


@pytest.mark.parametrize("place", ["pool", ".", "pool/../pool"])
def test_a_soup_does_not_take_the_place_of_what_it_is_made_of(folder: Path, place: str) -> None:
    before = sorted(folder.rglob("*"))
    with pytest.raises(SoupError, match=r"model_0\.safetensors, which this soup is made of"):
        average(folder / "pool", folder / place, overwrite=True)
    assert sorted(folder.rglob("*")) == before


def test_overwriting_removes_no_folders(folder: Path) -> None:
    (folder / "home" / "thesis").mkdir(parents=True)
    with pytest.raises(SoupError, match="expected an earlier soup, which may be removed, found a folder in it, thesis"):
        average(folder / "pool", folder / "home", overwrite=True)
    assert (folder / "home" / "thesis").is_dir()

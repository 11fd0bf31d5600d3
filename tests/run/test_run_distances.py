"""Distances are those of the definition, whatever lies far from zero."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stockpot.layout import Layout
from stockpot.run.distances import Distances, distances
from zoo import fine_tunes, layout_of, mlp, write


def test_distances_equal_the_definition_for_close_models_far_from_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = {"a": 1e3 + torch.randn(70_000), "b": torch.randn(5, 7)}
    states = [
        {name: value + 1e-3 * (k + 1) * torch.randn_like(value) for name, value in base.items()}
        for k in range(4)
    ]
    pool = write(tmp_path, states)
    found = distances(pool, layout_of(pool, "model"))
    flat = [torch.cat([state[name].double().reshape(-1) for name in ("a", "b")]) for state in states]
    for i in range(4):
        for j in range(4):
            assert float(found.pairs[i, j]) == pytest.approx(float((flat[i] - flat[j]).norm()), rel=1e-9)
    mean = torch.stack(flat).mean(dim=0)
    assert found.to_mean.tolist() == pytest.approx([float((x - mean).norm()) for x in flat], rel=1e-9)
    assert found.norms.tolist() == pytest.approx([float(x.norm()) for x in flat], rel=1e-9)


def test_only_mixed_tensors_count(tmp_path: Path) -> None:
    pool = write(tmp_path, fine_tunes(mlp, 3))
    whole = distances(pool, layout_of(pool, "model"))
    part = distances(pool, Layout.of(pool, "model", exclude=["2.*"], facts=pool.facts()))
    assert bool((part.to_mean < whole.to_mean).all())


def test_the_outlier_stands_out_and_equals_do_not() -> None:
    def of(*to_mean: float) -> int | None:
        return Distances(
            torch.zeros(len(to_mean), len(to_mean)),
            torch.tensor(to_mean, dtype=torch.float64),
            torch.ones(len(to_mean)),
        ).outlier()

    assert of(1.0, 1.1, 0.9, 1.0, 5.0) == 4
    assert of(1.0, 1.0, 1.0, 1.0, 1.2) is None  # narrow quartiles make no outlier
    assert of(1.0, 9.0) is None  # two cannot say who is out


def test_who_has_no_kin_is_named_and_fine_tunes_are_not(tmp_path: Path) -> None:
    kin = fine_tunes(mlp, 3)
    torch.manual_seed(7)
    alone = {name: torch.randn_like(value) for name, value in kin[0].items()}
    pool = write(tmp_path / "mixed", [kin[0], alone, *kin[1:]])
    assert distances(pool, layout_of(pool, "model")).strangers() == [1]
    pool = write(tmp_path / "one", kin)
    assert distances(pool, layout_of(pool, "model")).strangers() == []
    far = [{name: torch.randn_like(value) for name, value in kin[0].items()} for _ in range(3)]
    pool = write(tmp_path / "none", far)
    assert distances(pool, layout_of(pool, "model")).strangers() == [0, 1, 2]
    kin[1]["0.weight"][0, 0] = float("nan")
    pool = write(tmp_path / "nan", kin)
    assert distances(pool, layout_of(pool, "model")).strangers() == []


def test_who_is_not_finite_is_the_one_that_stands_out(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 5)
    next(iter(states[3].values())).view(-1)[0] = float("nan")
    pool = write(tmp_path, states)
    found = distances(pool, layout_of(pool, "model"))
    assert bool(found.to_mean.isnan().all())  # the mean is not finite either
    assert found.outlier() == 3

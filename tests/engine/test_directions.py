"""project and mix: adjoint in every store, and equal to their plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stockpot.engine import Directions, FlatPlan
from stockpot.engine.directions import TILE, Slot, Tiles, encode_plain, mix, project
from stockpot.task import captured as captured_steps
from stockpot.task.captured import Gather

# dtype -> relative tolerance of a sum of up to a few hundred products
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}

cases = st.tuples(
    st.integers(1, 9),  # b
    st.lists(st.integers(1, 67), min_size=1, max_size=6),  # numbers of parameters of the groups
    st.sampled_from(sorted(TOLERANCE, key=str)),
    st.sampled_from(["exact", "bf16", "int8"]),  # how the rows are kept
    st.integers(0, 2**31),
)


def plan_of(sizes: list[int]) -> FlatPlan:
    stops = torch.tensor(sizes).cumsum(0).tolist()
    bounds = tuple(zip([0, *stops[:-1]], stops, strict=True))
    slots = tuple(Slot((f"t{j}",), (stop - start,), start, stop, j) for j, (start, stop) in enumerate(bounds))
    return FlatPlan(slots, bounds, stops[-1])


def close(found: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    return bool(((found - wanted).abs() <= TOLERANCE[found.dtype] * scale.abs().max() + 1e-30).all())


def stored(rows: Tensor, plan: FlatPlan, store: str) -> tuple[Directions, Tensor]:
    """The rows in a store, and what they are meant to be there. (b, P)"""
    if store == "exact":
        return Directions(rows.clone(), plan), rows
    if store == "bf16":
        return Directions(rows.bfloat16(), plan), rows.bfloat16().to(rows.dtype)
    tiles = Tiles.of(plan, "cpu")
    kept, scale = torch.empty(rows.shape, dtype=torch.int8), torch.empty(tiles.count, len(rows))
    for k, row in enumerate(rows):
        encode_plain(row, kept[k], scale[:, k], plan, tiles)
    factors = scale.repeat_interleave(tiles.length.long(), dim=0).T.to(rows.dtype)  # (b, P)
    return Directions(kept, plan, tiles=tiles, tile_scale=scale), kept.to(rows.dtype) * factors


@given(cases)
@settings(max_examples=60)
def test_project_and_mix_are_adjoint_and_match_their_plain_twins(
    case: tuple[int, list[int], torch.dtype, str, int],
) -> None:
    b, sizes, dtype, store, seed = case
    plan = plan_of(sizes)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    rows, gradient, a, fixed = random(b, plan.size), random(plan.size), random(b, plan.groups), random(plan.size)
    directions, meant = stored(rows, plan, store)
    assert (meant - rows).abs().max() <= (0 if store == "exact" else 0.01 * rows.abs().max())

    projected = directions.project(gradient)
    mixed = torch.empty_like(fixed)
    directions.mix(fixed, a, out=mixed)

    size = meant.abs().sum() * gradient.abs().max()
    assert close(projected, project(meant, gradient, plan.bounds), size)
    assert close(mixed - fixed, mix(meant, a, plan.bounds), fixed.abs().max() + a.abs().sum() * meant.abs().max())
    left, right = torch.dot(mixed - fixed, gradient), (a * projected).sum()
    assert close(left, right, (mixed.abs() + fixed.abs()).dot(gradient.abs()) + (a * projected).abs().sum())


def test_mix_may_write_over_what_it_starts_from() -> None:
    plan = plan_of([5, 3])
    rows, a, theta = torch.randn(2, 8), torch.randn(2, 2), torch.randn(8)
    directions = Directions(rows, plan)
    apart = torch.empty(8)
    directions.mix(theta, a, out=apart)
    directions.mix(theta, a, out=theta)
    assert torch.equal(theta, apart)


@pytest.mark.parametrize("size", [1.0, 1e-20, 1e-36, 1e-40, 2.1e-43, 1.4e-45])
def test_int8_of_the_smallest_numbers_keeps_their_signs_or_is_zero(size: float) -> None:
    """A scale below the smallest normal number would be rounded itself: such a tile counts as zero, here and in the
    kernel (tests/engine/test_engine_gpu.py)."""
    plan = plan_of([TILE])
    tiles = Tiles.of(plan, "cpu")
    row = torch.linspace(-1, 1, TILE) * size
    out, scale = torch.empty(TILE, dtype=torch.int8), torch.zeros(1)
    encode_plain(row, out, scale, plan, tiles)
    tiny = torch.finfo(torch.float32).tiny
    assert (scale == 0) | (scale >= tiny)
    decoded = out.float() * scale
    assert bool((decoded * row.sign() >= 0).all())
    if size / 127 < tiny:
        assert not out.any()
        assert not scale.any()
    else:
        assert (decoded - row).abs().max() <= 0.51 * scale


# Rows of a batch, copied together by several threads.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (), (0,)])
@pytest.mark.parametrize("small", [0, 1 << 20])
def test_the_same_rows_as_index_select(
    dtype: torch.dtype, shape: tuple[int, ...], small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_steps, "SMALL", small)
    column = torch.randint(0, 2, (50, *shape)).to(dtype)
    for rows in (torch.randint(0, 50, (21,)), torch.tensor([49, 0]), torch.tensor([3])):
        out = torch.zeros(len(rows), *shape, dtype=dtype)
        gathered = Gather()
        gathered(column, rows, out)
        gathered.close()
        assert torch.equal(out, column[rows])


def test_a_column_that_is_not_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_steps, "SMALL", 0)
    column = torch.arange(60.0).view(6, 10).T
    out = torch.empty(3, 6)
    Gather()(column, torch.tensor([9, 0, 4]), out)
    assert torch.equal(out, column[[9, 0, 4]])

"""project and mix: adjoint, and equal to their plain definitions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stockpot.engine import Directions, FlatPlan
from stockpot.engine.plan import Slot
from stockpot.engine.reference import mix, project

# dtype -> relative tolerance of a sum of up to a few hundred products
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}

cases = st.tuples(
    st.integers(1, 9),  # b
    st.lists(st.integers(1, 67), min_size=1, max_size=6),  # numbers of parameters of the groups
    st.sampled_from(sorted(TOLERANCE, key=str)),
    st.booleans(),  # unit norm
    st.integers(0, 2**31),
)


def plan_of(sizes: list[int]) -> FlatPlan:
    stops = torch.tensor(sizes).cumsum(0).tolist()
    bounds = tuple(zip([0, *stops[:-1]], stops, strict=True))
    slots = tuple(Slot((f"t{j}",), (stop - start,), start, stop, j) for j, (start, stop) in enumerate(bounds))
    return FlatPlan(slots, bounds, stops[-1])


def close(found: Tensor, wanted: Tensor, scale: Tensor) -> bool:
    return bool(((found - wanted).abs() <= TOLERANCE[found.dtype] * scale.abs().max() + 1e-30).all())


@given(cases)
@settings(max_examples=60)
def test_project_and_mix_are_adjoint_and_match_the_reference(
    case: tuple[int, list[int], torch.dtype, bool, int],
) -> None:
    b, sizes, dtype, unit, seed = case
    plan = plan_of(sizes)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype)

    rows, gradient, a, fixed = (
        random(b, plan.size),
        random(plan.size),
        random(b, plan.groups),
        random(plan.size),
    )
    directions = Directions(rows.clone(), plan, unit_norm=unit)
    meant = rows.clone()  # the directions as they are meant: scaled row by row, group by group
    if unit:
        for start, stop in plan.bounds:
            meant[:, start:stop] /= rows[:, start:stop].norm(dim=1, keepdim=True)

    projected = directions.project(gradient)
    mixed = torch.empty_like(fixed)
    directions.mix(fixed, a, out=mixed)

    size = meant.abs().sum() * gradient.abs().max()
    assert close(projected, project(meant, gradient, plan.bounds), size)
    assert close(
        mixed - fixed,
        mix(meant, a, plan.bounds),
        fixed.abs().max() + a.abs().sum() * meant.abs().max(),
    )
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


def test_a_direction_of_length_zero_stays_zero_when_scaled() -> None:
    plan = plan_of([3, 2])
    rows = torch.tensor([[0.0, 0.0, 0.0, 3.0, 4.0]])
    directions = Directions(rows, plan, unit_norm=True)
    out = torch.empty(5)
    directions.mix(torch.zeros(5), torch.ones(1, 2), out=out)
    assert out.tolist() == [0.0, 0.0, 0.0, torch.tensor(0.6).item(), torch.tensor(0.8).item()]
    assert directions.project(torch.ones(5))[0, 0] == 0

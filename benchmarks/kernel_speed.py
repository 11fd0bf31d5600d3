"""Bandwidth of `project` and `mix` against a plain copy on the same GPU, ViT-B/32 (88.2M), per-tensor coefficients.

    python benchmarks/kernel_speed.py [--tune] [--out FILE]

Every kernel is compared with engine/directions.py's plain functions in float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

import machine
import shapes
import torch
import triton

from stockpot.engine import directions, kernels
from stockpot.engine.directions import ALIGN, FlatPlan, Tiles
from stockpot.layout import Layout


def plan_of(shapes_: dict[str, tuple[int, ...]]) -> FlatPlan:
    layout = Layout(tuple(shapes_), {name: i for i, name in enumerate(shapes_)}, {})
    return FlatPlan.of(layout, {n: type("S", (), {"shape": s}) for n, s in shapes_.items()}, ALIGN)  # type: ignore[misc]


def median_ms(function) -> float:  # type: ignore[no-untyped-def]
    return float(triton.testing.do_bench(function, warmup=15, rep=60, return_mode="median"))


def copy_bandwidth() -> float:
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e9  # TB/s


def check(rows, scale, tiles, plan, gradient, fixed, c, out) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """Relative errors over some groups against float64."""
    got = kernels.project(rows, gradient, tiles, scale)
    out.fill_(float("nan"))
    kernels.mix(rows, fixed, c, out, tiles, scale)
    assert not out.isnan().any(), "mix left elements unwritten"
    errors = {"project": 0.0, "mix": 0.0}
    for j in range(0, plan.groups, 13):
        begin, end = plan.bounds[j]
        d = rows[:, begin:end].double()
        if scale is not None:
            first, last = tiles.first[j : j + 2].tolist()
            d *= scale[first:last].repeat_interleave(tiles.length[first:last].long(), dim=0).T.double()
        bounds = [(0, end - begin)]
        want = directions.project(d, gradient[begin:end].double(), bounds)[:, 0]
        errors["project"] = max(errors["project"], float((got[:, j] - want).norm() / want.norm()))
        mixed = fixed[begin:end].double() + directions.mix(d, c[:, j : j + 1].double(), bounds)
        errors["mix"] = max(errors["mix"], float((out[begin:end].double() - mixed).norm() / mixed.norm()))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    plan = plan_of(shapes.vit_b_32())
    tiles = Tiles.of(plan, "cuda")
    copy = copy_bandwidth()
    results = []
    for dtype, b in itertools.product((torch.bfloat16, torch.int8), (4, 18, 72)):
        scale = None
        if dtype == torch.int8:
            rows = torch.randint(-127, 128, (b, plan.size), dtype=dtype, device="cuda")
            scale = torch.rand(tiles.count, b, device="cuda") * 1e-4
        else:
            rows = torch.empty(b, plan.size, dtype=dtype, device="cuda").normal_(std=1e-3)
        gradient = torch.randn(plan.size, device="cuda", dtype=torch.bfloat16)
        fixed = torch.randn(plan.size, device="cuda")
        c = torch.randn(b, plan.groups, device="cuda") / b
        out = torch.empty(plan.size, device="cuda", dtype=torch.bfloat16)
        errors = check(rows, scale, tiles, plan, gradient, fixed, c, out)
        assert errors["project"] < 1e-4, errors
        assert errors["mix"] < 4e-3, errors  # the result is bf16
        candidates = list(itertools.product((1, 2, 4, 8), (4, 8, 16))) if args.tune else [None]
        bytes_ = {"project": rows.nbytes + gradient.nbytes, "mix": rows.nbytes + fixed.nbytes + out.nbytes}
        times: dict[str, list[tuple[float, object]]] = {"project": [], "mix": []}
        for shape in candidates:
            one = partial(kernels.project, rows, gradient, tiles, scale, shape)
            times["project"].append((median_ms(one), shape))
            two = partial(kernels.mix, rows, fixed, c, out, tiles, scale, shape)
            times["mix"].append((median_ms(two), shape))
        row = {"dtype": str(dtype).removeprefix("torch."), "b": b, "relative_error": errors}
        for name, found in times.items():
            ms, shape = min(found, key=lambda x: x[0])
            rate = bytes_[name] / ms / 1e9
            row[name] = {"ms": round(ms, 4), "tb_s": round(rate, 3), "of_copy": round(rate / copy, 3)}
            if args.tune:
                row[name]["shape"] = shape
                row[name]["all"] = sorted((round(bytes_[name] / t / 1e9 / copy, 3), s) for t, s in found)[::-1][:6]
        print(json.dumps(row), flush=True)
        results.append(row)
        del rows, scale, one, two
    result = {
        "what": __doc__.splitlines()[0],
        "machine": machine.describe("triton"),
        "copy_tb_s": round(copy, 3),
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print("copy", copy)


if __name__ == "__main__":
    main()

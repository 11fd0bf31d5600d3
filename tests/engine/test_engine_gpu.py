"""The CUDA paths against the plain ones. Run on a machine with a GPU: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stockpot.adapters.inputs import ImageInput
from stockpot.engine import Directions, Engine, FlatPlan, Live, ahead, reference
from stockpot.engine.loader import Loader
from stockpot.engine.plan import Slot
from stockpot.engine.rounding import encode_plain
from stockpot.engine.tiles import ALIGN, TILE, Tiles
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.soups import cook
from stockpot.soups.settings import settings_for
from stockpot.task import Task
from zoo import fine_tunes, layout_of, marked, mlp, samples, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run by hand on one"),
]

# Lengths of tensors around everything that matters: one element, a gap, a tile's end, several tiles.
ODD = [1, 7, 127, 128, 129, TILE - 1, TILE, TILE + 1, 3 * TILE + 77]


def plan_of(sizes: list[int], per_group: int) -> FlatPlan:
    slots, bounds, at = [], [], 0
    for i, size in enumerate(sizes):
        slots.append(Slot((f"t{i}",), (size,), at, at + size, i // per_group))
        at += -(-size // ALIGN) * ALIGN
    for j in range(-(-len(sizes) // per_group)):
        mine = [k for k, slot in enumerate(slots) if slot.group == j]
        end = slots[mine[-1] + 1].start if mine[-1] + 1 < len(slots) else at
        bounds.append((slots[mine[0]].start, end))
    return FlatPlan(tuple(slots), tuple(bounds), at)


def vector(plan: FlatPlan, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random where tensors are, zero in the gaps."""
    generator = torch.Generator("cuda").manual_seed(seed)
    out = torch.zeros(plan.size, device="cuda", dtype=dtype)
    for slot in plan.slots:
        n = slot.stop - slot.start
        out[slot.start : slot.stop] = torch.randn(n, generator=generator, device="cuda").to(dtype)
    return out


@pytest.mark.parametrize("per_group", [1, 2, len(ODD)])
@pytest.mark.parametrize("b", [1, 3, 18, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_kernels_match_the_reference(dtype: torch.dtype, b: int, per_group: int) -> None:
    from stockpot.engine import kernels

    plan = plan_of(ODD, per_group)
    tiles = Tiles.of(plan, "cuda")
    rows = torch.empty(b, plan.size, dtype=dtype, device="cuda")
    scale = torch.zeros(tiles.count, b, device="cuda") if dtype == torch.int8 else None
    plain, centre = torch.empty_like(rows), vector(plan, 999)
    plain_scale = None if scale is None else torch.zeros_like(scale)
    for k in range(b):
        x = vector(plan, k)
        kernels.encode(x, centre, rows[k], scale, tiles, first=0, count=tiles.count, offset=0, models=b, k=k)
        column = None if plain_scale is None else plain_scale[:, k]
        encode_plain(x - centre, plain[k], column, plan, tiles)
    assert (rows.float() - plain.float()).abs().max() <= (1 if dtype == torch.int8 else 0)
    if scale is not None and plain_scale is not None:
        assert torch.allclose(scale, plain_scale, rtol=1e-6)
    directions = Directions(rows, plan, tiles=tiles, tile_scale=scale)
    exact = torch.cat([directions._decoded(j, torch.float64) for j in range(plan.groups)], dim=1)
    for width in (torch.float32, torch.bfloat16):
        gradient = vector(plan, 1000, width)
        got = directions.project(gradient)
        want = reference.project(exact, gradient.double(), plan.bounds)
        assert (got - want).norm() <= 1e-5 * want.norm()
        assert torch.equal(got, directions.project(gradient))  # the same sum every time
    fixed = vector(plan, 1001)
    c = torch.randn(b, plan.groups, device="cuda")
    for width, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        out = torch.full((plan.size,), float("nan"), dtype=width, device="cuda")
        directions.mix(fixed, c, out)
        mixed = fixed.double() + reference.mix(exact, c.double(), plan.bounds)
        assert not out.isnan().any()
        assert (out.double() - mixed).norm() <= tolerance * mixed.norm()


def pool_and_task(folder: Path, models: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Pool, Task]:
    return write(folder, fine_tunes(mlp, models)), Task(mlp().cuda().to(dtype), samples(dtype=dtype))


def cooked(
    pool: Pool, task: Task, method: str = "mehl+", **settings: Any
) -> tuple[torch.Tensor, list[Event]]:
    told: list[Event] = []
    options: dict[str, Any] = {"steps": 60, "batch_size": 16, "block_size": 3, **settings}
    result = cook(pool, task, method, listen=told.append, **options)
    assert result.soup is not None
    return result.soup.W, told


def paths(told: list[Event]) -> list[str]:
    return [event.data["path"] for event in told if event.kind == "engine"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"clip": 0.01, "warmup": 0.2},
        {"optimizer": "sgd", "momentum": 0.9},
        {"folds": 3},  # one graph serves all of them
        {"folds": 2, "smooth": True, "retreat": True, "lr": 0.05},
    ],
)
def test_the_graph_takes_the_steps_the_eager_path_takes(tmp_path: Path, settings: dict[str, Any]) -> None:
    pool, task = pool_and_task(tmp_path)
    fast, told = cooked(pool, task, directions="fp32", **settings)
    assert paths(told) == ["CUDA graph"]
    slow, told = cooked(pool, task, directions="fp32", graphs=False, **settings)
    assert paths(told) == ["eager"]
    assert (fast - slow).abs().max() < 2e-3 * slow.abs().max()


def test_the_graph_learns_the_temperature_of_the_eager_path(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)
    given: dict[str, Any] = {
        "steps": 60,
        "batch_size": 16,
        "temperature": True,
        "directions": "fp32",
        "warmup": 0.2,
    }
    found = [cook(pool, task, "hl+", graphs=graphs, **given).soup for graphs in (True, False)]
    fast, slow = (soup.temperature for soup in found if soup is not None)
    assert fast is not None
    assert slow is not None
    assert abs(slow - 1) > 0.05
    assert abs(fast - slow) < 2e-3 * slow


@pytest.mark.parametrize("method", ["learned+", "hl", "mehl", "crossfit"])
def test_gpu_and_cpu_agree(tmp_path: Path, method: str) -> None:
    pool, task = pool_and_task(tmp_path)
    settings: dict[str, Any] = {"steps": 60, "batch_size": 16}
    if method not in ("learned+", "hl"):
        settings["block_size"] = 3
    on_gpu = cook(pool, task, method, directions="fp32", **settings)
    on_cpu = cook(pool, Task(mlp(), samples()), method, **settings)
    assert on_gpu.soup is not None
    assert on_cpu.soup is not None
    assert (on_gpu.soup.W - on_cpu.soup.W).abs().max() < 5e-3


@pytest.mark.parametrize("directions", ["bf16", "int8"])
def test_rounded_directions_learn_nearly_the_same(tmp_path: Path, directions: str) -> None:
    pool, task = pool_and_task(tmp_path)
    exact, _ = cooked(pool, task, directions="fp32")
    rounded, _ = cooked(pool, task, directions=directions)
    assert (exact - rounded).norm() < 0.05 * (exact - 1 / len(pool)).norm()


def test_low_memory_mode_learns_the_same(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)
    usual, _ = cooked(pool, task, directions="bf16")
    spared, told = cooked(pool, task, directions="bf16", low_memory=True)
    assert "low-memory mode" in next(e.data["text"] for e in told if e.kind == "plan")
    assert (usual - spared).abs().max() < 2e-3 * usual.abs().max()


def test_a_bf16_model_learns_with_fp32_sums(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path, dtype=torch.float32)
    exact, _ = cooked(pool, task)
    narrow = Task(mlp().cuda().bfloat16(), samples(dtype=torch.bfloat16))
    rounded, told = cooked(pool, narrow)
    assert paths(told) == ["CUDA graph"]
    assert (exact - rounded).norm() < 0.25 * (exact - 1 / len(pool)).norm()


def test_a_step_that_cannot_be_captured_falls_back_and_says_so(tmp_path: Path) -> None:
    pool, _ = pool_and_task(tmp_path)

    def peeking(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        assert loss.item() >= 0  # a look at the value, which no graph allows
        return loss

    _, told = cooked(pool, Task(mlp().cuda(), samples(), loss=peeking))
    assert len(paths(told)) == 1
    assert paths(told)[0].startswith("eager, because the step cannot be captured: ")


def test_the_streamed_blocks_are_the_plain_ones(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)
    settings = settings_for("mehl+", directions="int8", block_size=3, steps=10, batch_size=16)
    with Live(task, pool, layout_of(pool)) as live:
        engine = Engine(live, settings, task.fit, block_size=3)
        mean = engine.loader.mean()
        assert torch.allclose(mean.cuda(), live.mean(), rtol=1e-6, atol=1e-7)
        plain = Loader(live, torch.int8)
        for block in ([0, 2, 4], [1, 5]):
            engine.loader.prefetch(block, mean)
            for found in (
                engine.loader.load(block, mean),
                engine.loader.load(block, mean),
            ):  # prefetched, then not
                want = plain.load(block, mean.cuda())
                for j in range(live.plan.groups):
                    a, b = found._decoded(j, torch.float32), want._decoded(j, torch.float32)
                    assert (a - b).abs().max() <= 0.01 * b.abs().max()
        engine.close()


def test_out_of_memory_halves_the_block_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = pool_and_task(tmp_path)
    original = Engine.descent
    calls: list[int] = []

    def failing(self: Engine, directions: Directions, *args: Any, **kwargs: Any) -> Any:
        calls.append(directions.rows.shape[0])
        if len(calls) == 2:  # in the second block
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, directions, *args, **kwargs)

    monkeypatch.setattr(Engine, "descent", failing)
    W, told = cooked(pool, task)
    assert calls == [3, 3, 2, 1]
    assert [e.data["text"] for e in told if e.kind == "memory"] == [
        "out of memory; going on with 2 models at a time instead of 3"
    ]
    assert torch.allclose(W.sum(0), torch.ones(W.shape[1], dtype=torch.float64))


def test_resumed_equals_uninterrupted_on_the_gpu(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)

    class KilledError(Exception):
        pass

    class Store:
        interval = 0.0

        def __init__(self, die_at: int) -> None:
            self.saved: Any = None
            self.left = die_at

        def load(self) -> Any:
            return self.saved

        def save(self, tensors: Any, values: Any) -> None:
            self.saved = (dict(tensors), dict(values))
            self.left -= 1
            if self.left == 0:
                raise KilledError

    options: dict[str, Any] = {"steps": 120, "batch_size": 16, "block_size": 3}
    whole = cook(pool, task, "mehl+", **options)
    for die_at in (1, 2, 4):
        store = Store(die_at)
        with pytest.raises(KilledError):
            cook(pool, task, "mehl+", store=store, **options)
        store.left = -1
        again = cook(pool, task, "mehl+", store=store, **options)
        assert whole.soup is not None
        assert again.soup is not None
        assert torch.equal(whole.soup.W, again.soup.W)


@pytest.mark.parametrize(
    "settings", [{}, {"optimizer": "sgd", "momentum": 0.9}, {"clip": 0.01}, {"low_memory": True}], ids=str
)
def test_a_skipped_step_leaves_no_trace_in_the_graph(tmp_path: Path, settings: dict[str, Any]) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 3)), marked(1, device="cuda")
    chosen = settings_for("hl+", directions="fp32", schedule="constant", steps=20, batch_size=8, **settings)
    good = [torch.arange(start, start + 8) for start in (0, 8, 16)]
    bad = torch.arange(40, 48)
    found = []
    for batches in (good, [bad, good[0], bad, bad, *good[1:]]):
        with Live(task, pool, layout_of(pool)) as live, task.learning():
            engine = Engine(live, chosen, task.fit, block_size=3)
            mean = engine.loader.mean()
            directions = engine.loader.load([0, 1, 2], mean)
            raw = torch.zeros(3, len(live.layout))
            descent = engine.descent(directions, mean.cuda(), raw, None, 20, task.fit)
            assert descent.path == "CUDA graph"
            steps = descent.run(task.fit, batches)
            assert [step.skipped for step in steps] == [batch is bad for batch in batches]
            found.append(descent.state()[0])
            engine.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert (found[0]["raw"] != 0).any()


@pytest.mark.parametrize("method", ["mehl+", "crossfit"])
def test_bad_numbers_mean_the_same_on_gpu_and_cpu(tmp_path: Path, method: str) -> None:
    """The same steps are skipped, and the way back is taken after the same one."""
    pool = write(tmp_path, fine_tunes(mlp, 4))
    options: dict[str, Any] = {
        "steps": 150,
        "batch_size": 4,
        "lr": 0.05,
        "block_size": 2,
        "directions": "fp32",
    }
    if method == "crossfit":
        options |= {"steps": 70, "folds": 2, "evaluations": 5, "guard": False}
    results = [
        cook(pool, marked(1, device=device), method, graphs=graphs, **options)
        for device, graphs in (("cpu", True), ("cuda", True), ("cuda", False))
    ]
    places = [
        [
            (h["kind"], h["block"], h["fold"], h["step"])
            for h in r.history
            if h["kind"] in ("skipped", "setback")
        ]
        for r in results
    ]
    assert "setback" in {kind for kind, *_ in places[0]}
    assert places[0] == places[1] == places[2]
    assert results[0].notes == results[1].notes == results[2].notes
    weights = [r.soup.W for r in results if r.soup is not None]
    assert (weights[0] - weights[1]).abs().max() < 5e-3
    assert (weights[0] - weights[2]).abs().max() < 5e-3


def test_images_are_normalised_inside_the_graph(tmp_path: Path) -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 4))

    model = network()
    ImageInput(mean=(0.5, 0.25, 0.0), std=(0.5, 1.0, 2.0)).attach(model)
    pixels = torch.randint(0, 256, (64, 3, 4, 4), dtype=torch.uint8)
    states = []
    for seed in range(3):
        torch.manual_seed(seed)
        states.append(network().state_dict())
    told: list[Event] = []
    task = Task(model.cuda(), (pixels, torch.arange(64) % 4))
    cook(write(tmp_path, states), task, "hl+", steps=3, batch_size=16, listen=told.append)
    assert [event.data["path"] for event in told if event.kind == "engine"] == ["CUDA graph"]


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("directions", ["fp32", "bf16", "int8"])
def test_what_is_compiled_ahead_is_all_that_learning_needs(
    tmp_path: Path, directions: str, narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whatever order tests run: a variant that learning compiles must have been there before."""
    from stockpot.engine import kernels

    def variants() -> dict[str, set[str]]:
        names = ("_encode_tiles", "_mix_tiles", "_project_tiles", "_add_tiles")
        return {name: {str(key) for key in getattr(kernels, name).device_caches[0][0]} for name in names}

    pool = write(tmp_path, fine_tunes(mlp, 6))
    task = Task(mlp().cuda().to(narrow), samples(dtype=narrow))
    seen: list[dict[str, set[str]]] = []
    plain = ahead.finish

    def finish() -> None:
        plain()
        seen.append(variants())

    monkeypatch.setattr(ahead, "finish", finish)
    ways: list[tuple[str, dict[str, Any]]] = [
        ("hl+", {}),
        ("mehl+", {"block_size": 4}),
        ("mehl", {"block_size": 1}),
    ]
    for method, given in ways:
        cook(pool, task, method, steps=3, batch_size=16, directions=directions, **given)
    assert variants() == seen[0]

"""The CUDA paths against the plain ones. Run on a machine with a GPU: `pytest -m gpu`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stockpot import Pool, Task, cook
from stockpot.adapters.models import ImageInput
from stockpot.engine import AdamW, Directions, Engine, FlatPlan, Live, Options
from stockpot.engine.directions import ALIGN, TILE, Slot, Tiles, encode_plain, mix, project
from stockpot.engine.loader import Loader
from stockpot.engine.memory import MARGIN
from stockpot.events import Event
from zoo import decide, fine_tunes, layout_of, marked, mlp, samples, weights_of, write

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
    exact = directions.part(0, plan.size, torch.float64)
    for width in (torch.float32, torch.bfloat16):
        gradient = vector(plan, 1000, width)
        got = directions.project(gradient)
        want = project(exact, gradient.double(), plan.bounds)
        assert (got - want).norm() <= 1e-5 * want.norm()
        assert torch.equal(got, directions.project(gradient))  # the same sum every time
    fixed = vector(plan, 1001)
    c = torch.randn(b, plan.groups, device="cuda")
    for width, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-3)):
        out = torch.full((plan.size,), float("nan"), dtype=width, device="cuda")
        directions.mix(fixed, c, out)
        mixed = fixed.double() + mix(exact, c.double(), plan.bounds)
        assert not out.isnan().any()
        assert (out.double() - mixed).norm() <= tolerance * mixed.norm()


@pytest.mark.parametrize("size", [1e-30, 1e-36, 1e-38, 1e-40, 1e-45])
def test_the_smallest_numbers_mean_the_same_to_the_kernel(size: float) -> None:
    """A scale below the smallest normal number counts as zero, as in encode_plain."""
    from stockpot.engine import kernels

    plan = plan_of([TILE], 1)
    tiles = Tiles.of(plan, "cuda")
    x = torch.linspace(-1, 1, TILE, device="cuda") * size
    rows, scale = torch.empty(1, TILE, dtype=torch.int8, device="cuda"), torch.zeros(1, 1, device="cuda")
    plain, plain_scale = torch.empty_like(rows), torch.zeros_like(scale)
    kernels.encode(x, None, rows[0], scale, tiles, first=0, count=1, offset=0, models=1, k=0)
    encode_plain(x, plain[0], plain_scale[:, 0], plan, tiles)
    assert torch.allclose(scale, plain_scale, rtol=1e-6, atol=0)
    assert (rows.int() - plain.int()).abs().max() <= 1


def pool_and_task(folder: Path, models: int = 6, dtype: torch.dtype = torch.float32) -> tuple[Pool, Task]:
    return write(folder, fine_tunes(mlp, models)), Task(mlp().cuda().to(dtype), samples(dtype=dtype))


def cooked(pool: Pool, task: Task, method: str = "mehl+", **settings: Any) -> tuple[torch.Tensor, list[Event]]:
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
        {"weight_decay": 0.0, "passes": 2},
        {"accumulate": 3},
        {"folds": 3},  # one graph serves all of them
        {"folds": 2, "lr": 0.05},
    ],
)
def test_the_graph_takes_the_steps_the_eager_path_takes(tmp_path: Path, settings: dict[str, Any]) -> None:
    pool, task = pool_and_task(tmp_path)
    fast, told = cooked(pool, task, directions="fp32", **settings)
    assert paths(told) == ["CUDA graph"]
    slow, told = cooked(pool, task, directions="fp32", graphs=False, **settings)
    assert paths(told) == ["eager"]
    assert (fast - slow).abs().max() < 2e-3 * slow.abs().max()


def test_the_graph_learns_the_beta_of_the_eager_path(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)
    given: dict[str, Any] = {"steps": 60, "batch_size": 16, "beta": True, "directions": "fp32"}
    found = [cook(pool, task, "hl+", graphs=graphs, **given).soup for graphs in (True, False)]
    fast, slow = (soup.about["beta"] for soup in found if soup is not None)
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


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_capture_that_fails_in_low_memory_mode_leaves_no_hooks(tmp_path: Path, low_memory: bool) -> None:
    pool, task = pool_and_task(tmp_path)
    looks: list[int] = []

    def peeking(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        looks.append(len(str(loss.item())))
        return loss

    options: dict[str, Any] = {"directions": "fp32", "low_memory": low_memory}
    usual, _ = cooked(pool, task, graphs=False, **options)
    found, told = cooked(pool, Task(mlp().cuda(), samples(), loss=peeking), **options)
    assert paths(told)[0].startswith("eager, because the step cannot be captured: ")
    assert (usual - found).abs().max() < 2e-3 * usual.abs().max()


def test_the_streamed_blocks_are_the_plain_ones(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)
    options = Options(directions="int8", batch_size=16)
    with Live(task, pool, layout_of(pool)) as live:
        engine = Engine(live, options, task.fit, block_size=3)
        mean = engine.loader.mean()
        assert torch.allclose(mean.cuda(), live.mean(), rtol=1e-6, atol=1e-7)
        plain = Loader(live, torch.int8)
        for block in ([0, 2, 4], [1, 5]):
            engine.loader.prefetch(block, mean)
            want = plain.load(block, mean.cuda()).part(0, live.plan.size, torch.float32)
            for _ in range(2):  # prefetched, then not
                found = engine.loader.load(block, mean).part(0, live.plan.size, torch.float32)
                assert (found - want).abs().max() <= 0.01 * want.abs().max()
        alpha = torch.randn(6, len(live.layout))
        fixed = engine.theta_fix(alpha, [1, 3])
        alpha[[1, 3]] = 0
        exact = plain.add(mean.cuda().clone(), alpha.cuda(), mean.cuda())
        assert torch.allclose(fixed, exact, rtol=1e-5, atol=1e-6)
        engine.close()


def test_out_of_memory_halves_the_block_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, task = pool_and_task(tmp_path)
    original = Engine.load
    calls: list[int] = []

    def failing(self: Engine, block: list[int]) -> Directions:
        if self._block != tuple(block):
            calls.append(len(block))
            if len(calls) == 2:  # in the second block
                raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, block)

    monkeypatch.setattr(Engine, "load", failing)
    W, told = cooked(pool, task)
    assert calls == [3, 3, 2, 1]
    assert [e.data["text"] for e in told if e.kind == "memory"] == [
        "out of memory; going on with 2 models at a time instead of 3"
    ]
    assert torch.allclose(W.sum(0), torch.ones(W.shape[1], dtype=torch.float64))


def test_the_forecast_holds_for_a_model_with_many_classes(tmp_path: Path) -> None:
    """Logits in fp32 are most of what such a model takes: as in a language model."""

    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 32_000))

    states = []
    for seed in range(4):
        torch.manual_seed(seed)
        states.append(network().state_dict())
    x, y = torch.randn(2048, 64), torch.randint(0, 32_000, (2048,))
    told: list[Event] = []
    task = Task(network().cuda(), (x, y), metric="loss")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    result = cook(
        write(tmp_path, states), task, "hl", steps=3, batch_size=1024, directions="fp32", graphs=False,
        listen=told.append,
    )  # fmt: skip
    forecast = next(e.data["forecast"] for e in told if e.kind == "plan")
    own = sum(p.nbytes for p in task.model.parameters())
    taken = result.peak_device - before + own
    assert 0.6 * forecast <= taken <= MARGIN * forecast, (forecast, taken)


def test_resumed_equals_uninterrupted_on_the_gpu(tmp_path: Path) -> None:
    pool, task = pool_and_task(tmp_path)

    class KilledError(Exception):
        pass

    class Store:
        interval = 0.0
        peaks: Any = None

        def __init__(self, die_at: int) -> None:
            self.saved: Any = None
            self.left = die_at

        def load(self) -> Any:
            return self.saved

        def save(self, tensors: Any, values: Any, part: Any = None) -> None:
            self.saved = (dict(tensors), dict(values))
            self.left -= 1
            if self.left == 0:
                raise KilledError

    options: dict[str, Any] = {"steps": 120, "batch_size": 16, "block_size": 3}
    whole = cook(pool, task, "mehl+", **options)
    for die_at in (1, 2, 4):
        store = Store(die_at)
        with pytest.raises(KilledError):
            decide(pool, task, "mehl+", store=store, **options)
        store.left = -1
        again = decide(pool, task, "mehl+", store=store, **options)
        assert whole.soup is not None
        assert again.soup is not None
        assert torch.equal(whole.soup.W, again.soup.W)


@pytest.mark.parametrize("low_memory", [False, True])
def test_a_skipped_step_leaves_no_trace_in_the_graph(tmp_path: Path, low_memory: bool) -> None:
    pool, task = write(tmp_path, fine_tunes(mlp, 3)), marked(1, device="cuda")
    options = Options(directions="fp32", batch_size=8, low_memory=low_memory)
    good = [torch.arange(start, start + 8) for start in (0, 8, 16)]
    bad = torch.arange(40, 48)
    found = []
    for batches in (good, [bad, good[0], bad, bad, *good[1:]]):
        with Live(task, pool, layout_of(pool)) as live, task.learning():
            engine = Engine(live, options, task.fit, block_size=3)
            D = engine.load([0, 1, 2])
            alpha = torch.zeros(3, len(live.layout))
            theta_fix = engine.theta_fix(alpha, [0, 1, 2])
            x: AdamW = engine.optimiser(alpha, None, 0.1)

            def step(rate: torch.Tensor, batch: Any, x: AdamW = x, D: Any = D, fix: Any = theta_fix) -> torch.Tensor:
                engine.mix(fix, x.alpha)  # noqa: B023
                loss, slope, _ = engine.gradient(D, batch, None)  # noqa: B023
                return x.step(loss, slope, None, rate)

            take = engine.prepared(step, x, task.fit, None)
            assert take is not step
            rate = torch.tensor(0.05, device="cuda")
            steps = [take(rate, engine.batch(task.fit, batch)).tolist() for batch in batches]
            assert [bool(skipped) for _, skipped in steps] == [batch is bad for batch in batches]
            found.append(x.save())
            engine.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert (found[0]["x"] != 0).any()


@pytest.mark.parametrize("method", ["mehl+", "crossfit"])
def test_bad_numbers_mean_the_same_on_gpu_and_cpu(tmp_path: Path, method: str) -> None:
    """The same steps are skipped."""
    pool = write(tmp_path, fine_tunes(mlp, 4))
    options: dict[str, Any] = {"steps": 60, "batch_size": 4, "lr": 0.05, "block_size": 2, "directions": "fp32"}
    if method == "crossfit":
        options |= {"folds": 2}
    results = [
        cook(pool, marked(1, device=device), method, graphs=graphs, **options)
        for device, graphs in (("cpu", True), ("cuda", True), ("cuda", False))
    ]
    places = [[(h["block"], h["fold"], h["step"]) for h in r.history if h["kind"] == "skipped"] for r in results]
    assert len(places[0]) > 3
    assert places[0] == places[1] == places[2]
    assert results[0].notes == results[1].notes == results[2].notes
    weights = [weights_of(r) for r in results]
    assert (weights[0] - weights[1]).abs().max() < 5e-3
    assert (weights[0] - weights[2]).abs().max() < 5e-3


def test_fp16_autocast_learns_with_a_factor_on_the_loss(tmp_path: Path) -> None:
    def timid(model: nn.Module, batch: Any) -> torch.Tensor:
        return 2e-7 * nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    pool = write(tmp_path, fine_tunes(mlp, 4))
    exact = Task(mlp().cuda(), samples(), loss=timid)
    narrow = Task(mlp().cuda(), samples(), loss=timid, autocast=torch.float16)
    settings: dict[str, Any] = {"steps": 30, "batch_size": 16, "directions": "fp32", "lr": 0.05}
    wanted, found = (weights_of(cook(pool, task, "hl+", **settings)) for task in (exact, narrow))
    assert (found - wanted).norm() < 0.2 * (wanted - 0.25).norm()


def test_bf16_theta_fix_is_rounded_without_bias() -> None:
    """Steps far below the last digit move the soup as far as they should, in the mean; no step moves nothing."""
    plan = plan_of([1 << 20], 1)
    d = torch.full((1, plan.size), 1.0, dtype=torch.bfloat16, device="cuda")
    directions = Directions(d, plan, tiles=Tiles.of(plan, "cuda"))
    fixed = vector(plan, 5).mul_(0.1).add_(1.4).clamp_(1.01, 1.99).bfloat16()  # the last digit is 1/128
    out = torch.full_like(fixed, float("nan"))
    directions.mix(fixed, torch.zeros(1, 1, device="cuda"), out)
    assert torch.equal(out, fixed)
    for c in (1e-4, -7e-4, 3e-3):
        directions.mix(fixed, torch.full((1, 1), c, device="cuda"), out)
        moved = float((out.double() - fixed.double()).mean())
        assert abs(moved - c) < 0.05 * abs(c)


def bf16_zoo(folder: Path) -> tuple[Pool, Task]:
    states = [{n: t.bfloat16() for n, t in state.items()} for state in fine_tunes(mlp, 6)]
    return write(folder, states), Task(mlp().cuda().bfloat16(), samples(dtype=torch.bfloat16))


def test_a_bf16_pool_learns_with_nothing_in_fp32(tmp_path: Path) -> None:
    pool, task = bf16_zoo(tmp_path)
    with Live(task, pool, layout_of(pool)) as live:
        engine = Engine(live, Options(batch_size=16), task.fit, block_size=3)
        assert engine.fixed.dtype == engine.theta_bar.dtype == torch.bfloat16
        engine.close()
    narrow, told = cooked(pool, task)
    assert paths(told) == ["CUDA graph"]
    exact, _ = cooked(pool, Task(mlp().cuda(), samples()))
    assert (exact - narrow).norm() < 0.3 * (exact - 1 / len(pool)).norm()


@pytest.mark.parametrize("graphs", [True, False])
def test_gradients_one_by_one_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    from stockpot.engine import memory

    pool, task = pool_and_task(tmp_path)
    usual, _ = cooked(pool, task, directions="bf16", graphs=graphs)
    monkeypatch.setattr(memory, "LARGE", 0)
    single, _ = cooked(pool, task, directions="bf16", graphs=graphs)
    assert not torch.equal(usual, torch.full_like(usual, 1 / len(pool)))
    assert (usual - single).abs().max() < 2e-3 * usual.abs().max()


@pytest.mark.parametrize("preset", ["authors"])
def test_the_authors_preset_is_the_same_on_gpu_and_cpu(tmp_path: Path, preset: str) -> None:
    pool, task = pool_and_task(tmp_path)
    settings: dict[str, Any] = {"steps": 40, "batch_size": 16, "block_size": 3, "preset": preset}
    on_gpu, on_cpu = (weights_of(cook(pool, one, "mehl+", **settings)) for one in (task, Task(mlp(), samples())))
    assert (on_gpu - on_cpu).abs().max() < 5e-3


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
    compile_ahead = kernels.compile_ahead

    def watched(*args: Any) -> Any:
        thread = compile_ahead(*args)
        thread.join()
        seen.append(variants())
        return thread

    monkeypatch.setattr(kernels, "compile_ahead", watched)
    ways: list[tuple[str, dict[str, Any]]] = [("hl+", {}), ("mehl+", {"block_size": 4}), ("mehl", {"block_size": 1})]
    for method, given in ways:
        cook(pool, task, method, steps=3, batch_size=16, directions=directions, **given)
    assert variants() == seen[0]

"""The inner step of MEHL-Soup+ on a GPU against a plain forward + backward and against the published way.

    python benchmarks/gpu_step.py [--model vit_b_32] [--out FILE]

torchvision's ViT, batch 128 at 224 x 224 (uint8 on the device, normalised there), per-tensor coefficients, random
weights: time and memory do not depend on them. Ours and the published way take the same steps in fp32 first and must
agree. Medians over repeated graph replays or steps; ratios are within this run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import peers
import torch
from torch import nn

import stockpot
from stockpot.engine import Batch, Engine, Live, Options
from stockpot.layout import Layout
from stockpot.soups.mehl import State, mehl_soup
from zoo import Normalised, make_files

BATCH = 128


def median_ms(step: Any, repeat: int = 30, warm: int = 5) -> float:
    for _ in range(warm):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def captured(function: Any) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        function()
    return graph.replay


def plain(model_name: str, dtype: torch.dtype, x: Any, y: Any, compiled: bool) -> tuple[float, float]:
    """Forward + backward of one model, as one graph; ms and peak GiB."""
    torch.cuda.empty_cache()
    model = Normalised(model_name).cuda().to(dtype).eval()
    call = torch.compile(model) if compiled else model
    torch.cuda.reset_peak_memory_stats()

    def once() -> None:
        for p in model.parameters():
            p.grad = None
        nn.functional.cross_entropy(call(x).float(), y).backward()

    replay = captured(once)
    peak = torch.cuda.max_memory_allocated() / 2**30
    return median_ms(replay), peak


def ours(model_name: str, files: list[Path], b: int, dtype: str, x: Any, y: Any, compiled: bool) -> dict[str, Any]:
    """One replay of the captured inner step with b models loaded."""
    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model = Normalised(model_name).cuda().bfloat16()
    pool = stockpot.Pool.open(files[:b]).subset(range(b))
    told: list[Any] = []
    task = stockpot.Task(model, (x[:BATCH].cpu(), y[:BATCH].cpu()))
    options = Options(batch_size=BATCH, directions=dtype, compile=compiled)
    torch.cuda.reset_peak_memory_stats()
    with Live(task, pool, Layout.of(pool, "tensor")) as live, task.learning():
        engine = Engine(live, options, task.fit, block_size=b, listen=told.append)
        state = State(torch.zeros(b, len(live.layout)))
        algorithm = mehl_soup(
            engine, [range(b)], task.fit, lambda _: torch.arange(BATCH), J=1000, eta=0.01, state=state
        )
        next(algorithm)
        peak = torch.cuda.max_memory_allocated() - base
        assert engine._captured is not None, [event.data for event in told if event.kind == "engine"]
        ms = median_ms(engine._captured._graph.replay)
        losses = next(algorithm).steps
        result = {
            "b": b,
            "directions": dtype,
            "ms": round(ms, 3),
            "peak_gib": round(peak / 2**30, 3),
            "forecast_gib": round(engine.plan.total / 2**30, 3),
            "losses_finite": not any(step.skipped for step in losses),
        }
        engine.close()
    return result


def published(model_name: str, files: list[Path], b: int, x: Any, y: Any) -> dict[str, Any]:
    from safetensors.torch import load_file

    torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated()
    model = Normalised(model_name).cuda().eval()
    names = [n for n, _ in model.named_parameters()]
    states = [load_file(f) for f in files[:b]]
    mean = {n: sum(s[n] for s in states) / b for n in names}
    directions = [[(s[n] - mean[n]).cuda() for n in names] for s in states]
    with torch.no_grad():
        for n, p in model.named_parameters():
            p.copy_(mean[n])
    step = peers.PublishedStep(model, directions)
    del directions, states
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    rows = {}
    for label, allow in (("fp32", False), ("tf32", True)):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow
        rows[label] = round(median_ms(lambda: step.step(x, y), repeat=8, warm=2), 2)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return {"b": b, "ms": rows, "peak_gib": round((torch.cuda.max_memory_allocated() - base) / 2**30, 3)}


def agreement(model_name: str, files: list[Path], x: Any, y: Any, b: int = 4, steps: int = 5) -> dict[str, float]:
    """Ours and the published way from the same start, fp32: coefficients after a few steps."""
    from safetensors.torch import load_file

    model = Normalised(model_name).cuda().eval()
    names = [n for n, _ in model.named_parameters()]
    pool = stockpot.Pool.open(files[:b])
    task = stockpot.Task(model, (x[:16].cpu(), y[:16].cpu()))
    layout = Layout.of(pool, "tensor")
    found = {}
    for dtype in ("fp32", "bf16", "int8"):
        options = Options(batch_size=16, directions=dtype)
        with Live(task, pool, layout) as live, task.learning():
            engine = Engine(live, options, task.fit, block_size=b)
            directions = engine.load(range(b))
            start = torch.zeros(b, len(layout))
            fixed = engine.theta_fix(start, range(b))
            engine.mix(fixed, start.cuda())
            batch = Batch([task.to_device(task.fit.batch(torch.arange(16)))], 16)
            _, slope, _ = engine.gradient(directions, batch, None)
            state = State(start)
            algorithm = mehl_soup(
                engine, [range(b)], task.fit, lambda _: torch.arange(16), J=1000, eta=0.01, every=steps, state=state
            )
            next(algorithm)
            found[dtype] = (state.alpha.cuda(), slope.clone())
            engine.close()
    peer_model = Normalised(model_name).cuda().eval()
    states = [load_file(f) for f in files[:b]]
    mean_ = {n: sum(s[n] for s in states) / b for n in names}
    with torch.no_grad():
        for n, p in peer_model.named_parameters():
            p.copy_(mean_[n])
    peer = peers.PublishedStep(peer_model, [[(s[n] - mean_[n]).cuda() for n in names] for s in states])
    # The published loop updates at a constant rate; ours follows a cosine that is flat at its start.
    for _ in range(steps):
        peer.step(x[:16], y[:16])
    order = [names.index(g) for g in layout.groups]
    want = peer.a.detach()[:, order]
    relative = float((found["fp32"][0] - want).norm() / want.norm())
    assert relative < 0.02, relative
    cosine = {
        d: float(nn.functional.cosine_similarity(found[d][1].flatten(), found["fp32"][1].flatten(), dim=0))
        for d in ("bf16", "int8")
    }
    return {"coefficients_relative_difference_to_published": relative, "gradient_cosine_to_fp32": cosine}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_b_32")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stockpot-zoo"))
    parser.add_argument("--blocks", default="bf16:18,int8:18,int8:72")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_step.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    blocks = [(d, int(n)) for d, n in (item.split(":") for item in args.blocks.split(","))]
    began = time.time()
    files = make_files(args.folder, args.model, max(n for _, n in blocks))
    print("files", len(files), round(time.time() - began, 1), "s", flush=True)
    x = torch.randint(0, 256, (BATCH, 3, 224, 224), dtype=torch.uint8, device="cuda")
    y = torch.randint(0, 1000, (BATCH,), device="cuda")
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "machine": machine.describe("triton", "torchvision")}
    result["agreement"] = agreement(args.model, files, x, y)
    print(json.dumps(result["agreement"]), flush=True)
    for compiled in [False, True] if args.compile else [False]:
        ms, peak = plain(args.model, torch.bfloat16, x, y, compiled)
        key = "compiled" if compiled else "eager"
        result[key] = {"plain": {"ms": round(ms, 3), "peak_gib": round(peak, 3)}, "ours": []}
        print(key, result[key], flush=True)
        for dtype, b in blocks:
            row = ours(args.model, files, b, dtype, x, y, compiled)
            row["ratio_to_plain"] = round(row["ms"] / ms, 3)
            result[key]["ours"].append(row)
            print(json.dumps(row), flush=True)
    if not args.no_peer:
        result["published"] = published(args.model, files, 18, x, y)
        for row in result["eager"]["ours"]:
            row["speedup_to_published_fp32"] = round(result["published"]["ms"]["fp32"] / row["ms"], 2)
            row["memory_of_published"] = round(row["peak_gib"] / result["published"]["peak_gib"], 3)
        print(json.dumps(result["published"]), json.dumps(result["eager"]["ours"]), flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

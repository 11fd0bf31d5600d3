"""The inner step of MEHL-Soup+ on Llama-shaped models against a plain forward + backward, with memory and forecast.

    python benchmarks/llm_step.py [--shapes 1b,0.3b,7b] [--only NAME;...] [--burst 10] [--profile] [--out FILE]

Random bf16 weights, 8 checkpoints as sharded Hugging Face folders, batches of 8 x 512 tokens, one coefficient per model
and tensor. The disk need not hold 8 whole models of 7B: two sets of shards are written, and a checkpoint is its own
choice of one or the other for every shard, by hard links. Every tensor differs between checkpoints, no two checkpoints
are equal, and all the bytes of all 8 are read. Plain and soup steps are timed in one process, as a CUDA graph and
launched one by one; ratios are between steps of the same kind. Peaks of device memory are those of each stage alone.
Peak host memory is what the process holds itself (anonymous pages) and what is pinned: checkpoints are mapped, and
their pages belong to the system, which takes them back when it needs them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import machine
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import stockpot
from stockpot.engine import Engine, Live, Options
from stockpot.layout import Layout
from stockpot.soups.mehl import State, mehl_soup
from stockpot.soups.result import PeakMemory

GIB = 2**30
MODELS, BATCH, LENGTH, SHARDS = 8, 8, 512, 4
SHAPES: dict[str, dict[str, int]] = {
    "0.3b": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 14, "num_attention_heads": 16},
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 15, "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}  # fmt: skip
# What is loaded at once and how: block size, then settings of the engine.
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1b bf16": ("1b", 8, {"directions": "bf16"}),
    "1b int8": ("1b", 8, {"directions": "int8"}),
    "1b bf16 low memory": ("1b", 8, {"directions": "bf16", "low_memory": True}),
    "1b bf16 in 4 pieces": ("1b", 8, {"directions": "bf16", "accumulate": 4}),
    "0.3b bf16": ("0.3b", 8, {"directions": "bf16"}),
    "0.3b int8 in 2 pieces": ("0.3b", 8, {"directions": "int8", "accumulate": 2}),
    "7b int8, 2 at a time": ("7b", 2, {"directions": "int8", "memory": 48 * GIB, "accumulate": 4}),
    "7b int8, all 8": ("7b", 8, {"directions": "int8", "memory": 80 * GIB}),
}


def model_of(shape: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=32_000, max_position_embeddings=2048, tie_word_embeddings=False, **SHAPES[shape])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    return model.eval()


def checkpoints(folder: Path, shape: str, model: nn.Module) -> list[Path]:
    """8 folders of shards, each a choice of one of two sets."""
    names = list(model.state_dict())
    shards = [names[i::SHARDS] for i in range(SHARDS)]
    generator = torch.Generator("cuda").manual_seed(0)
    for part, own in enumerate(shards):
        state = model.state_dict()
        for which in range(2):
            file = folder / shape / f"set{which}-{part}.safetensors"
            if file.exists():
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            moved = {}
            for name in own:
                noise = torch.randn(state[name].shape, generator=generator, device="cuda", dtype=torch.bfloat16)
                moved[name] = state[name].add(noise, alpha=2e-3).cpu()
            save_file(moved, file)
    index = {
        name: f"model-{part + 1:05d}-of-{SHARDS:05d}.safetensors" for part, own in enumerate(shards) for name in own
    }
    out = []
    for k, choice in zip(range(MODELS), itertools.product(range(2), repeat=SHARDS), strict=False):
        home = folder / shape / f"checkpoint-{k}"
        home.mkdir(exist_ok=True)
        # The last of the choices would be the same for all: every shard takes its turn.
        for part in range(SHARDS):
            which = choice[part] if part else (k + 1) % 2
            target = home / f"model-{part + 1:05d}-of-{SHARDS:05d}.safetensors"
            if not target.exists():
                os.link(folder / shape / f"set{which}-{part}.safetensors", target)
        (home / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        out.append(home)
    return out


def median_ms(step: Any, repeat: int = 10, warm: int = 3) -> float:
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


def plain(model: nn.Module, batch: dict[str, Tensor], repeat: int) -> dict[str, Any]:
    """Forward and backward of one model: launched one by one, and as one graph."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()

    def once() -> None:
        for p in model.parameters():
            p.grad = None
        model(**batch).loss.backward()

    result: dict[str, Any] = {"eager_ms": round(median_ms(once, repeat), 2)}
    result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            once()
        torch.cuda.synchronize()
        for p in model.parameters():
            p.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            model(**batch).loss.backward()
        result["graph_ms"] = round(median_ms(graph.replay, repeat), 2)
        del graph
    except RuntimeError as error:
        result["graph_ms"] = None
        result["graph_error"] = str(error).splitlines()[0][:200]
    for p in model.parameters():
        p.grad = None
    return result


class Stages:
    """Peaks of device memory, one stage after the other."""

    def __init__(self) -> None:
        self.allocated: dict[str, float] = {}
        self.reserved: dict[str, float] = {}
        torch.cuda.reset_peak_memory_stats()

    def over(self, stage: str) -> None:
        torch.cuda.synchronize()
        for found, now in (
            (self.allocated, torch.cuda.max_memory_allocated()),
            (self.reserved, torch.cuda.max_memory_reserved()),
        ):
            found[stage] = max(found.get(stage, 0.0), round(now / GIB, 2))
        torch.cuda.reset_peak_memory_stats()


def pinned_gib() -> float | None:
    """Pinned host memory at most, as PyTorch allocates it (powers of two); None where this version does not tell."""
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    found = [value for name, value in stats.items() if name in ("allocated_bytes.peak", "allocated_bytes.all.peak")]
    return round(max(found) / GIB, 2) if found else None


def soup(
    model: nn.Module,
    files: list[Path],
    rows: dict[str, Tensor],
    block: int,
    given: dict[str, Any],
    burst: int,
    profile: bool,
) -> dict[str, Any]:
    """Steps of Algorithm 1 as `cook` takes them, in one block of `block` models, or in two where there are more."""
    told: list[Any] = []
    began = time.perf_counter()
    pool = stockpot.Pool.open(files)
    task = stockpot.Task(model, rows, metric="loss")
    layout = Layout.of(pool, "tensor")
    opened = time.perf_counter() - began
    result: dict[str, Any] = {"block_size": block, "settings": {k: str(v) for k, v in given.items()}}
    stages = Stages()
    with PeakMemory(torch.device("cuda")) as peak:
        with Live(task, pool, layout) as live, task.learning():
            stages.over("model laid out")
            began = time.perf_counter()
            engine = Engine(live, Options(batch_size=BATCH, **given), task.fit, block_size=block, listen=told.append)
            first = time.perf_counter() - began
            stages.over("planning and averaging")
            state = State(torch.zeros(len(pool), len(layout)))
            # Two blocks: the second one's theta_fix has the share of the first.
            blocks = [list(range(block)), list(range(len(pool) - block, len(pool)))][: 2 if block < len(pool) else 1]
            algorithm = mehl_soup(
                engine, blocks, task.fit, lambda i: torch.arange(BATCH) + BATCH * (i % 4), J=4 * burst, eta=0.01,
                every=burst, state=state,
            )  # fmt: skip
            times, skipped, losses = [], 0, []
            for turn in range(4 * len(blocks)):
                torch.cuda.synchronize()
                began = time.perf_counter()
                next(algorithm)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                stages.over("steps" if turn % 4 else "loading a block and first steps")
                skipped += sum(step.skipped for step in state.steps)
                losses += [step.loss for step in state.steps]
                if turn % 4:  # not the one that loads the block
                    times.append(1000 * seconds / len(state.steps))
            result |= {
                "ms": round(statistics.median(times), 2),
                "path": [event.data["path"] for event in told if event.kind == "engine"],
                "plan": str(engine.plan),
                "forecast_gib": round(engine.plan.total / GIB, 2),
                "parts_gib": {name: round(size / GIB, 2) for name, size in engine.plan.parts.items()},
                "groups": len(layout),
                "seconds": {"opening": round(opened, 1), "plan and mean": round(first, 1),
                            "loading blocks": round(engine.loader.waited, 1)},
                "skipped": skipped,
                "loss_first_and_last": [round(losses[0], 4), round(losses[-1], 4)],
            }  # fmt: skip
            if profile:
                result["profile"] = profiled(engine, task, state, blocks[-1])
            algorithm.close()  # as when it has ended: it holds the block and theta_fix
            engine.close()
            gc.collect()
        stages.over("leaving")  # every tensor of the model gets memory of its own again
    result["peaks_gib"], result["peaks_reserved_gib"] = stages.allocated, stages.reserved
    result["peak_gib"] = max(stages.allocated.values())
    result["forecast_error"] = round(result["forecast_gib"] / result["peak_gib"] - 1, 3)
    result["peak_host_gib"] = {"anonymous": round(peak.host / GIB, 2), "pinned": pinned_gib()}
    return result


def profiled(engine: Engine, task: Any, state: State, block: list[int]) -> list[str]:
    """The kernels of one step, launched one by one, longest first."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    D = engine.load(block)
    alpha = state.alpha[block].cuda()
    batch = engine.batch(task.fit, torch.arange(BATCH))
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        engine.mix(engine.fixed, alpha)
        engine.gradient(D, batch, None)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)
    return [f"{row.device_time_total / 1000:.2f} ms {row.count} x {row.key[:90]}" for row in rows[:25]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="0.3b,1b,7b")
    parser.add_argument("--only", default="", help="names of cases, separated by ';'")
    parser.add_argument(
        "--burst", type=int, default=10, help="steps that are timed together; four times as many a block"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stockpot-llm"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "llm_step.json")
    args = parser.parse_args()
    only = [name for name in args.only.split(";") if name]
    result: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "machine": machine.describe("triton", "transformers"),
        "batch": [BATCH, LENGTH],
        "models": MODELS,
    }
    for shape in args.shapes.split(","):
        torch.manual_seed(0)
        model = model_of(shape)
        began = time.perf_counter()
        files = checkpoints(args.folder, shape, model)
        ids = torch.randint(0, 32_000, (4 * BATCH, LENGTH))
        batch = {"input_ids": ids[:BATCH].cuda(), "labels": ids[:BATCH].cuda()}
        found: dict[str, Any] = {
            "parameters": sum(math.prod(p.shape) for p in model.parameters()),
            "files_s": round(time.perf_counter() - began, 1),
            "plain": plain(model, batch, args.burst),
        }
        print(shape, json.dumps(found), flush=True)
        for name, (of, block, given) in CASES.items():
            if of != shape or (only and name not in only):
                continue
            gc.collect()
            torch.cuda.empty_cache()
            try:
                row = soup(model, files, {"input_ids": ids, "labels": ids}, block, given, args.burst, args.profile)
            except torch.OutOfMemoryError as error:
                row = {"error": str(error)[:200]}
            kind = "graph_ms" if row.get("path") == ["CUDA graph"] else "eager_ms"
            if row.get("ms") and found["plain"].get(kind):
                row["ratio_to_plain"] = round(row["ms"] / found["plain"][kind], 3)
            found[name] = row
            print(name, json.dumps(row, indent=1), flush=True)
        result[shape] = found
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        del model
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

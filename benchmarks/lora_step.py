"""The inner step of MEHL-Soup+ on LoRA adapters of a Llama-shaped model, against training one such adapter with PEFT.

    python benchmarks/lora_step.py [--shape 7b] [--adapters 8,64] [--burst 10] [--profile] [--out FILE]

Random bf16 weights and factors, rank 16 on all linear layers, batches of 8 x 512 tokens, one coefficient per adapter
and tensor, all adapters in one block. PEFT trains one adapter in bf16 with a fused AdamW, launched step by step and as
one CUDA graph; ratios are between steps of the same kind. Factors and base are made in memory: opening and reading
files is not measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import machine
import torch
from llm_step import BATCH, GIB, LENGTH, median_ms, model_of
from torch import Tensor, nn

import stockpot
from stockpot.engine import Engine, Options
from stockpot.engine.factored import FactoredLive
from stockpot.engine.wide import wide_modules
from stockpot.layout import Layout
from stockpot.pool.facts import PoolFacts
from stockpot.pool.lora import Adapters
from stockpot.pool.peft_folders import Adapter, Factors
from stockpot.pool.pool import Pool
from stockpot.pool.source import Checkpoint, spec_of
from stockpot.soups.mehl import State, mehl_soup
from stockpot.soups.result import PeakMemory

RANK, ALPHA = 16, 32


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lm_head" not in n}


def pool_of(model: nn.Module, count: int) -> tuple[Pool, PoolFacts]:
    """Adapters in memory: nothing of the files is part of what is measured."""
    state = model.state_dict()
    specs = {name: spec_of(value.dtype, tuple(value.shape)) for name, value in state.items()}
    base = Checkpoint(Path("base"), "memory", (), specs, state.__getitem__)
    device = next(model.parameters()).device
    each = []
    for k in range(count):
        shapes, factors = {}, {}
        for name, layer in linear_layers(model).items():
            A, B = f"{name}.lora_A", f"{name}.lora_B"
            shapes[A], shapes[B] = (RANK, layer.in_features), (layer.out_features, RANK)
            factors[f"{name}.weight"] = Factors(A, B, ALPHA / RANK, False)

        def read(key: str, shapes: dict[str, Any] = shapes) -> Tensor:
            return torch.randn(shapes[key], device=device, dtype=torch.bfloat16) * 0.02

        file = Checkpoint(Path(f"a{k}"), "memory", (), {n: spec_of(torch.bfloat16, s) for n, s in shapes.items()}, read)
        each.append(Adapter(Path(f"a{k}"), {}, file, factors, {}, {}))
    adapters = Adapters(base, tuple(each), specs)
    pool = Pool([f"a{k}" for k in range(count)], [adapters.checkpoint(k) for k in range(count)], specs, {}, adapters)
    frozen = frozenset(name for name in specs if not adapters.each[0].factors.get(name))
    return pool, PoolFacts(frozen, (), (), tuple(f"{k:03d}" for k in range(count)), {}, None)


def one_adapter(model: nn.Module, batch: dict[str, Tensor], repeat: int) -> dict[str, Any]:
    """PEFT training one adapter: forward, backward and AdamW."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(linear_layers(model)), lora_dropout=0.0)
    torch.set_default_device("cuda")  # PEFT makes the factors where the default is
    trained: Any = get_peft_model(model, config, autocast_adapter_dtype=False)
    torch.set_default_device("cpu")
    own = [p for p in trained.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(own, lr=1e-4, fused=True, capturable=True)
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    def once() -> None:
        optimiser.zero_grad()
        trained(**batch).loss.backward()
        optimiser.step()

    result: dict[str, Any] = {"dtype": str(own[0].dtype), "parameters": sum(p.numel() for p in own)}
    result["eager_ms"] = round(median_ms(once, repeat), 2)
    result["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            once()
        torch.cuda.synchronize()
        optimiser.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            trained(**batch).loss.backward()
            optimiser.step()
        result["graph_ms"] = round(median_ms(graph.replay, repeat), 2)
        del graph
    except RuntimeError as error:
        result["graph_ms"], result["graph_error"] = None, str(error).splitlines()[0][:200]
    trained.unload()
    return result


def soup(
    model: nn.Module, rows: dict[str, Tensor], count: int, burst: int, profile: bool, **given: Any
) -> dict[str, Any]:
    pool, facts = pool_of(model, count)
    task = stockpot.Task(model, rows, metric="loss")
    layout = Layout.of(pool, "tensor", facts=facts)
    began = time.perf_counter()
    wide, notes = wide_modules(task, pool.adapters)  # type: ignore[arg-type]
    told: list[Any] = []
    result: dict[str, Any] = {"adapters": count, "modules": len(wide), "notes": notes}
    torch.cuda.synchronize()
    result["factors_s"] = round(time.perf_counter() - began, 1)
    gc.collect()
    torch.cuda.empty_cache()
    began = time.perf_counter()
    with PeakMemory(torch.device("cuda")) as peak, FactoredLive(task, pool, layout, wide) as live, task.learning():
        options = Options(batch_size=BATCH, **given)
        engine = Engine(live, options, task.fit, block_size=count, listen=told.append)
        result["plan_s"] = round(time.perf_counter() - began, 1)
        state = State(torch.zeros(count, len(layout)))
        algorithm = mehl_soup(
            engine, [list(range(count))], task.fit, lambda i: torch.arange(BATCH) + BATCH * (i % 4),
            J=4 * burst, eta=0.01, every=burst, state=state,
        )  # fmt: skip
        times, losses, skipped = [], [], 0
        for turn in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            next(algorithm)
            torch.cuda.synchronize()
            if turn:
                times.append(1000 * (time.perf_counter() - began) / len(state.steps))
            losses += [step.loss for step in state.steps]
            skipped += sum(step.skipped for step in state.steps)
        result |= {
            "ms": round(min(times), 2),
            "path": [event.data["path"] for event in told if event.kind == "engine"],
            "plan": str(engine.plan),
            "forecast_gib": round(engine.plan.total / GIB, 2),
            "factors_gib": round(live.beside / GIB, 2),
            "coefficients": count * len(layout),
            "skipped": skipped,
            "loss_first_and_last": [round(losses[0], 4), round(losses[-1], 4)],
        }
        if profile:
            result["profile"] = profiled(engine, task, state, list(range(count)))
        algorithm.close()
        engine.close()
    result["peak_gib"] = round(peak.device / GIB, 2)
    return result


def profiled(engine: Engine, task: Any, state: State, block: list[int]) -> list[str]:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    D = engine.load(block)
    alpha = state.alpha.cuda()
    batch = engine.batch(task.fit, torch.arange(BATCH))
    with watch(activities=[ProfilerActivity.CUDA]) as seen:
        engine.mix(engine.fixed, alpha)
        engine.gradient(D, batch, None)
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.device_time_total)
    return [f"{row.device_time_total / 1000:.2f} ms {row.count} x {row.key[:90]}" for row in rows[:20]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="7b")
    parser.add_argument("--adapters", default="8,64")
    parser.add_argument("--burst", type=int, default=10, help="steps that are timed together")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lora_step.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = model_of(args.shape)
    ids = torch.randint(0, 32_000, (4 * BATCH, LENGTH))
    batch = {"input_ids": ids[:BATCH].cuda(), "labels": ids[:BATCH].cuda()}
    result: dict[str, Any] = {
        "what": __doc__.splitlines()[0],
        "machine": machine.describe("triton", "transformers", "peft"),
        "shape": args.shape,
        "batch": [BATCH, LENGTH],
        "rank": RANK,
        "peft, one adapter": one_adapter(model, batch, args.burst),
    }
    one = result["peft, one adapter"]
    print(json.dumps(result, indent=1), flush=True)
    for count in map(int, args.adapters.split(",")):
        gc.collect()
        torch.cuda.empty_cache()
        row = soup(model, {"input_ids": ids, "labels": ids}, count, args.burst, args.profile)
        kind = "graph_ms" if row["path"] == ["CUDA graph"] else "eager_ms"
        row["ratio_to_peft"] = round(row["ms"] / one[kind], 3) if one.get(kind) else None
        row["peak_over_peft_gib"] = round(row["peak_gib"] - one["peak_gib"], 2)
        result[f"{count} adapters"] = row
        print(json.dumps(row, indent=1), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

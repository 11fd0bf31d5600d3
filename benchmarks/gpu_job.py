"""Whole jobs on a GPU: 72 ViT-B/32 checkpoints on disk (25 GB), 26,000 images in host memory, files read included.

    python benchmarks/gpu_job.py [--parts greedy,default,small,scoring,minilm,mehl,...] [--limit SECONDS] [--out FILE]

`greedy`, `default`, `mehl` and `hl` are `stockpot.cook` from opened files to scored soup. `scoring` and `minilm` say
how fast ingredients are scored against loops that do nothing but forward passes, eager and compiled, data on the
device, for ViT-B/32 and for MiniLM's shape. `small` repeats `default` with a quarter of the images, and of the models.
`classic` is Learned-Soup+ as published: models in host memory, autograd through all of them; its step is measured at
three K. `growth` holds b and varies K. `large` is ViT-L/16 with b = 8 within 24 GiB, arranged by the memory plan,
against no limit. Every job says where the host's time went; one that takes longer than `--limit` is given up there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import machine
import peers
import torch
import where

import stockpot
from stockpot.events import Event
from stockpot.soups.result import anonymous_bytes
from zoo import Normalised, make_files, make_pool

GIB = 2**30


class Log:
    """What the run said, with times."""

    def __init__(self) -> None:
        self.events: list[tuple[float, Event]] = []
        self.phases: dict[str, list[float]] = {}  # what progress was told about, from first to last
        self.began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        now = time.perf_counter() - self.began
        if event.kind != "progress":
            self.events.append((now, event))
            return
        span = self.phases.setdefault(str(event.data["what"]), [now, now])
        span[1] = now

    def first(self, kind: str) -> float | None:
        return next((round(t, 2) for t, e in self.events if e.kind == kind), None)

    def text(self, kind: str, key: str) -> list[Any]:
        return [e.data[key] for _, e in self.events if e.kind == kind]

    def step_ms(self) -> float:
        """Median time of a step, from bursts of steps between reports."""
        times = [t for t, e in self.events if e.kind == "step"]
        marks = [t for i, t in enumerate(times) if i == 0 or t - times[i - 1] > 1e-3]
        rates = []
        for i, (a, b) in enumerate(itertools.pairwise(marks)):  # the burst that ended at b took b - a
            end = marks[i + 2] if i + 2 < len(marks) else float("inf")
            rates.append((b - a) / sum(1 for t in times if b <= t < end))
        return round(1000 * statistics.median(rates), 3) if rates else float("nan")


class OverTheLimitError(Exception):
    """A job took longer than it was given."""


def _over(number: int, frame: Any) -> None:  # noqa: ARG001
    raise OverTheLimitError


def job(files: list[Path], data: Any, model_name: str, method: str, limit: int = 0, **settings: Any) -> dict[str, Any]:
    from stockpot.soups import learn

    torch.cuda.empty_cache()
    model = Normalised(model_name).cuda().bfloat16()
    log = Log()
    before = anonymous_bytes()
    began = time.perf_counter()
    pool = stockpot.Pool.open(files)
    opened = time.perf_counter() - began
    task = stockpot.Task(model, data)
    made = time.perf_counter() - began
    waited: list[float] = []
    close = learn.Engine.close

    def closing(engine: Any) -> None:
        waited.append(engine.loader.waited)
        close(engine)

    learn.Engine.close = closing  # type: ignore[method-assign]
    result, sampled = None, where.Sampled()
    signal.signal(signal.SIGALRM, _over)
    signal.alarm(limit)
    try:
        with sampled:
            result = stockpot.cook(pool, task, method, listen=log, **settings)
    except OverTheLimitError:
        print(f"{method}: given up after {limit} s", flush=True)
    finally:
        signal.alarm(0)
        learn.Engine.close = close  # type: ignore[method-assign]
    seconds = time.perf_counter() - began
    print(f"{method}: where the host's time went", *sampled.lines(), sep="\n", flush=True)
    phases = {name: [round(t, 2) for t in span] for name, span in log.phases.items()}
    if result is None:
        kinds = Counter(event.kind for _, event in log.events)
        return {"method": method, "given_up_after": limit, "phases": phases, "events": dict(kinds)}
    assert result.fit is not None
    row = {
        "method": method,
        "K": len(files),
        "images": len(data[1]),
        "settings": {k: str(v) for k, v in settings.items()},
        "seconds": round(seconds, 2),
        "peak_gpu_gib": round(result.peak_device / GIB, 3),
        "score": round(result.fit.value, 5),
        "models_used": result.models_used,
        "opened_at": round(opened, 2),
        "task_made_at": round(made, 2),
        "phases": phases,
        "soup_built_at": log.first("built"),
    }
    if method == "greedy":
        tried = [h for h in result.history if h["index"] != result.history[0]["index"]]
        return {**row, "chosen": [h["index"] for h in result.history if h["added"]],
                "evaluated": sum(h["evaluated"] for h in tried)}  # fmt: skip
    forecast = log.text("plan", "forecast")[0]
    return {
        **row,
        "learning_began_at": log.first("step"),
        "learning_ended_at": round(max(t for t, e in log.events if e.kind == "step"), 2),
        "step_ms": log.step_ms(),
        "steps": len(log.text("step", "loss")),
        "plan": log.text("plan", "text")[0],
        "path": log.text("engine", "path"),
        "waited_for_blocks_s": round(sum(waited), 2),
        "waited_share": round(sum(waited) / seconds, 4),
        "forecast_gib": round(forecast / GIB, 3),
        "peak_host_anonymous_gib": round(result.peak_host / GIB, 3),
        "host_before_gib": round(before / GIB, 3),
        "columns_sum_to_one": bool((result.soup.W.sum(0) - 1).abs().max() < 1e-9) if result.soup else None,
    }


def rate(run: Any, samples: int) -> float:
    """Samples a second of the second of two runs."""
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return round(samples / seconds, 1)


def scoring(files: list[Path], model: Any, data: Any, call: Any, sizes: list[int]) -> dict[str, Any]:
    """Samples a second: forward-only loops over data on the device, and `Problem.individual` with files read."""
    from stockpot.soups.problem import Problem

    def loop(function: Any, size: int, steps: int) -> None:
        with torch.no_grad():
            for i in range(steps):
                function(tuple(column[i * size : (i + 1) * size] for column in there))

    n = len(data[-1]) // max(sizes) * max(sizes)
    there = tuple(column[:n].cuda() for column in data)
    model.eval()
    out: dict[str, Any] = {
        f"eager, batch {size}": rate(lambda size=size: loop(call, size, n // size), n) for size in sizes
    }
    task = stockpot.Task(model, as_batch(data))
    pool = stockpot.Pool.open(files)
    problem = Problem(pool, task)
    torch.cuda.reset_peak_memory_stats()  # as cooking does
    with task.evaluator.fast(), problem.live(problem.layout("model")):
        problem.individual()  # reads the files and captures for the first time
        problem.known = None
        began = time.perf_counter()
        problem.individual()
        out["product"] = round(len(files) * len(data[-1]) / (time.perf_counter() - began), 1)
        out["batch"] = list(task.evaluator._grown.values())
        out["captured"] = [graph is not None for graph in task.evaluator._graphs.values()]
    compiled = torch.compile(call, dynamic=False)
    began = time.perf_counter()
    size = sizes[-1]
    try:
        out[f"compiled, batch {size}"] = rate(lambda: loop(compiled, size, n // size), n)
    except Exception as error:  # a machine without a compiler
        out["compiled"] = f"failed: {str(error)[:100]}"
    out["compiling_s"] = round(time.perf_counter() - began, 1)
    loops = [v for k, v in out.items() if k.startswith(("eager", "compiled, "))]
    out["share_of_the_faster_loop"] = round(out["product"] / max(loops), 3)
    return out


def as_batch(data: Any) -> Any:
    """Token ids, mask and labels become keyword arguments."""
    return dict(zip(("input_ids", "attention_mask", "labels"), data, strict=True)) if len(data) == 3 else data


def minilm(folder: Path, models: int, samples: int) -> tuple[list[Path], Any, Any]:
    """Files of MiniLM-L6's shape with a head, the model, and random tokens of length 128."""
    from safetensors.torch import save_file
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    model = BertForSequenceClassification(BertConfig(**sizes, num_labels=2))
    (folder / "minilm").mkdir(parents=True, exist_ok=True)
    files = [folder / "minilm" / f"model_{k}.safetensors" for k in range(models)]
    for file in files:
        save_file(
            {n: p + 1e-3 * torch.randn_like(p) for n, p in model.state_dict().items() if p.is_floating_point()}, file
        )
    tokens, mask = torch.randint(1000, 30000, (samples, 128)), torch.ones(samples, 128, dtype=torch.long)
    return files, model.cuda().bfloat16(), (tokens, mask, torch.randint(0, 2, (samples,)))


def classic(files: list[Path], x: Any, y: Any, counts: list[int], steps: int = 5) -> list[dict[str, Any]]:
    from safetensors.torch import load_file

    rows = []
    for k in counts:
        model = Normalised("vit_b_32").cuda().eval()
        names = [n for n, _ in model.named_parameters()]
        began = time.perf_counter()
        models = [[state[n] for n in names] for state in (load_file(f) for f in files[:k])]
        loading = time.perf_counter() - began
        soup = peers.ClassicLearnedSoup(model, models)
        times, peak = [], 0
        for _ in range(steps + 1):
            torch.cuda.synchronize()
            began = time.perf_counter()
            soup.step(x, y)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            peak = max(peak, anonymous_bytes())
        row = {"K": k, "step_s": round(statistics.median(times[1:]), 3), "loading_s": round(loading, 2)}
        row["host_after_step_gib"] = round(peak / GIB, 2)
        print(json.dumps(row), flush=True)
        rows.append(row)
        del soup, models, model
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="greedy,default,small,scoring,minilm,mehl,hl,classic,growth,large")
    parser.add_argument("--images", type=int, default=26_000)
    parser.add_argument("--models", type=int, default=72)
    parser.add_argument("--steps", type=int, default=1000, help="J of mehl and hl")
    parser.add_argument("--settings", default="{}", metavar="JSON", help='of default and small: {"directions": "int8"}')
    parser.add_argument("--limit", type=int, default=0, help="seconds at most for each job; 0: no limit")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/stockpot-zoo"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gpu_job.json")
    args = parser.parse_args()
    parts = args.parts.split(",")
    own = json.loads(args.settings)
    torch.manual_seed(0)
    result: dict[str, Any] = {"what": __doc__.splitlines()[0], "machine": machine.describe("triton", "torchvision")}
    began = time.perf_counter()
    files, images, labels = make_pool(args.folder, "vit_b_32", args.models, args.images)
    data = (images, labels)
    result["files_made_in_s"] = round(time.perf_counter() - began, 1)
    print("files made in", result["files_made_in_s"], flush=True)

    def keep(name: str, value: Any) -> None:
        result[name] = value
        print(name, json.dumps(value), flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=2) + "\n")

    if "greedy" in parts:
        keep("greedy", job(files, data, "vit_b_32", "greedy", args.limit))
    if "default" in parts:
        keep("default", job(files, data, "vit_b_32", "crossfit", args.limit, **own))
    if "small" in parts:
        quarter = (images[: args.images // 4], labels[: args.images // 4])
        keep("default, a quarter of the images", job(files, quarter, "vit_b_32", "crossfit", args.limit, **own))
        fewer = files[: args.models // 4]
        keep("default, a quarter of the models", job(fewer, data, "vit_b_32", "crossfit", args.limit, **own))
    if "scoring" in parts:
        vit = Normalised("vit_b_32").cuda().bfloat16()
        keep("scoring ViT-B/32", scoring(files[:4], vit, data, lambda batch: vit(batch[0]), [256, 1024]))
    if "minilm" in parts:
        bert_files, bert, tokens = minilm(args.folder, 6, args.images)

        def forward(batch: Any) -> Any:
            return bert(input_ids=batch[0], attention_mask=batch[1]).logits

        keep("scoring MiniLM, length 128", scoring(bert_files, bert, tokens, forward, [256, 1024]))
    if "mehl" in parts:
        keep(
            "mehl",
            job(
                files, data, "vit_b_32", "mehl+", steps=args.steps, limit=args.limit, directions="int8", memory=5 * GIB
            ),
        )
    if "hl" in parts:
        keep("hl", job(files, data, "vit_b_32", "hl+", steps=args.steps, limit=args.limit, directions="int8"))
    if "growth" in parts:
        small = (images[:2048], labels[:2048])
        keep(
            "growth",
            [
                {
                    "K": k,
                    **job(files[:k], small, "vit_b_32", "mehl+", steps=150, block_size=8, blocks=2 if k > 8 else 1),
                }
                for k in (8, 24, 72)
            ],
        )
    if "classic" in parts:
        x, y = images[:128].cuda(), labels[:128].cuda()
        keep("classic", classic(files, x, y, [8, 24, 72]))
    if "large" in parts:
        for file in files:
            file.unlink()  # the disk holds one zoo at a time
        large = make_files(args.folder, "vit_l_16", 8)
        few = (images[:1024], labels[:1024])
        keep("large_unlimited", job(large, few, "vit_l_16", "mehl+", steps=150, block_size=8))
        keep("large_24gib", job(large, few, "vit_l_16", "mehl+", steps=150, block_size=8, memory=24 * GIB))
        keep("large_8gib", job(large, few, "vit_l_16", "mehl+", steps=100, block_size="auto", memory=8 * GIB))
        ratio = result["large_24gib"]["step_ms"] / result["large_unlimited"]["step_ms"]
        keep("large_ratio", round(ratio, 3))
    if "classic" in result and "hl" in result:
        scaled = 1000 * result["classic"][-1]["step_s"] + result["classic"][-1]["loading_s"]
        keep("hl_speedup_to_classic", round(scaled / result["hl"]["seconds"], 1))


if __name__ == "__main__":
    main()

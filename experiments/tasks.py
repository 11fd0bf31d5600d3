"""Cooks the zoos that are no plain classification, seed by seed, and gathers what came out.

    python experiments/tasks.py cook lm-llama --seed 0 1 2          # every method, on test, into experiments/runs
    python experiments/tasks.py cook lm-llama --pool adapters --seed 0 1 2      # the zoo's second pool
    python experiments/tasks.py cook lm-llama --seed 0 --report dev --name dev-steps --methods crossfit \\
        --each '{"crossfit": {"steps": 1000}}'
    python experiments/tasks.py collect lm-llama                    # into experiments/results/tasks/lm-llama.json

A seed is one draw of the fitting data and one seed of learning. The second report set is what was pre-trained on, where
that is text. All of it goes through the Python API; a zoo's `model.py` says what its task is, which pools it has, and
what `others` make of a pool, whose soups are scored beside ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from studies import tasks

HOME = Path(__file__).resolve().parent
ZOOS = ("lm-llama", "imdb-lora", "regression")


def zoo_of(name: str) -> ModuleType:
    """A zoo's model.py, by its path: several zoos have one of that name."""
    spec = importlib.util.spec_from_file_location(f"model_of_{name.replace('-', '_')}", HOME / name / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def cook(zoo: ModuleType, chosen: argparse.Namespace, seed: int, out: Path) -> None:
    """All methods decide, then all sets are scored, dev for later questions: a file of scores and one of facts."""
    from stockpot import compare
    from stockpot.task import Data

    parts = {"report": chosen.report, "second": zoo.SECOND, "dev": "dev"}
    parts = {which: part for which, part in parts.items() if part is not None}
    sizes = {**json.loads(chosen.sizes), **({"compiled": True} if chosen.compiled else {})}
    task, pool = zoo.task(seed, parts.values(), **sizes), getattr(zoo, chosen.pool)()
    began = time.perf_counter()
    found = compare(pool, task, chosen.methods, seed=seed, each=json.loads(chosen.each), listen=_say)
    for name, why in found.failed.items():
        print(f"{name} failed: {why}", file=sys.stderr)
    scored = {name: result.reports for name, result in found.items()}
    methods = {name: tasks.facts(result) for name, result in found.items()}
    start = load_file(zoo.DATA / zoo.START)
    own = zoo.task(seed, parts.values(), **sizes)  # whose model held no soup
    data = {part: Data.of(zoo.batch(zoo.read(part))) for part in {*parts.values()}}
    own.load(start)
    scored["base"] = {part: own.score(data[part]) for part in data}
    cooked_before = out.with_suffix(".json").is_file()  # with other methods
    for name, tensors, seconds in () if cooked_before else zoo.others(chosen.pool, own.device):
        own.load(tensors)
        scored[name] = {part: own.score(data[part]) for part in data}
        methods[name] = {"seconds": round(seconds, 2)}
    arrays = {
        f"{name}/{which}": tasks.by_sample(sets[part]) for name, sets in scored.items() for which, part in parts.items()
    }
    if zoo.UNIT is not None:
        arrays |= {f"units/{which}": zoo.units(part) for which, part in parts.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "seed": seed,
        "metric": zoo.METRIC,
        "parts": parts,
        "models": len(pool),
        "parameters": sum(value.numel() for value in start.values()),
        "fitted": len(task.fit),
        "failed": dict(found.failed),
        "methods": methods,
        "seconds": time.perf_counter() - began,
        "command": ["python", "experiments/tasks.py", *sys.argv[1:]],
        "commit": chosen.commit or _commit(),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "made": time.strftime("%Y-%m-%d"),
    }
    if cooked_before:
        arrays = {**np.load(out.with_suffix(".npz")), **arrays}
        earlier = json.loads(out.with_suffix(".json").read_text("utf-8"))
        facts |= {key: {**earlier[key], **facts[key]} for key in ("methods", "failed")}
        facts["seconds"] += earlier["seconds"]
    np.savez_compressed(out.with_suffix(".npz"), **{key: value.astype(np.float32) for key, value in arrays.items()})
    out.with_suffix(".json").write_text(json.dumps(facts, indent=1))
    for name in methods:
        print(f"{name:10} {arrays[f'{name}/report'].mean():.5f}  {methods[name]['seconds']:.1f} s", flush=True)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HOME)
    return found.stdout.strip() or "unknown"


def _say(event: Any) -> None:
    if event.kind == "cooked":
        print(f"{event.data['method']}: {event.data['seconds']:.1f} s", flush=True)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cook", "collect"))
    parser.add_argument("zoo", choices=ZOOS)
    parser.add_argument("--pool", default="pool", choices=("pool", "adapters"))
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--report", default="test", choices=("dev", "test"))
    parser.add_argument("--methods", nargs="+", default=list(tasks.METHODS))
    parser.add_argument("--each", default="{}", metavar="JSON", help="settings by method")
    parser.add_argument("--name", default="main", help="of the runs")
    parser.add_argument("--sizes", default="{}", metavar="JSON", help="of a smaller model, for a trial")
    parser.add_argument("--compiled", action="store_true", help="lm-llama's layers, by torch.compile; not its adapters")
    parser.add_argument("--commit", help="where there is no repository")
    parser.add_argument("--runs", type=Path, default=HOME / "runs")
    chosen = parser.parse_args(given)
    named = chosen.zoo if chosen.pool == "pool" else f"{chosen.zoo}-{chosen.pool}"
    folder = chosen.runs / named
    if chosen.what == "cook":
        for seed in chosen.seed:
            cook(zoo_of(chosen.zoo), chosen, seed, folder / f"{chosen.name}-{seed}")
        return 0
    out = HOME / "results" / "tasks" / f"{named}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(tasks.gathered(folder, named), indent=1) + "\n", "utf-8")
    print(f"{out.name}: {out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

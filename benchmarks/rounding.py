"""Does it matter that models are rounded while a soup is learned? Test accuracy with fp32, bf16 and int8 directions.

    python benchmarks/rounding.py experiments/small/recipe.yaml [--seeds 0,1,2] [--methods hl+,mehl+] [--set KEY=VALUE]

Every run is a plain `stockpot compare`. Differences to fp32 are paired sample by sample; their standard error adds that
of the samples' means (over seeds) and that of the seeds' means (over samples).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import machine
import numpy as np

from stockpot.run.record import read_run

KINDS = ("fp32", "bf16", "int8")


def run(recipe: Path, out: Path, kind: str, seed: int, methods: list[str], sets: list[str]) -> dict[str, Any]:
    """Scores of every method on the report data, sample by sample."""
    stated = [
        *sets, f"method.directions={kind}", f"output.seed={seed}", f"method.methods={json.dumps(methods)}"
    ]  # fmt: skip
    words = [word for one in stated for word in ("--set", one)]
    command = [sys.executable, "-m", "stockpot", "compare", str(recipe), "--out", str(out), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return {method.name: method.tables["report"][:, 0] for method in read_run(out, tables=True).methods}


def compared(values: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> dict[str, Any]:
    """values, exact: (seeds, samples)."""
    difference = values - exact
    seeds, samples = difference.shape
    variance = float(difference.mean(axis=0).var(ddof=1)) / samples
    if seeds > 1:
        variance += float(difference.mean(axis=1).var(ddof=1)) / seeds
    mean, error = float(difference.mean()), variance**0.5
    return {
        "accuracy": float(values.mean()),
        "minus_fp32": mean,
        "standard_error": error,
        "by_seed": difference.mean(axis=1).tolist(),
        "within_one_standard_error": abs(mean) <= error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default="hl+,mehl+")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rounding.json")
    args = parser.parse_args()
    seeds, methods = [int(seed) for seed in args.seeds.split(",")], args.methods.split(",")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        waiting = {
            (kind, seed): pool.submit(run, args.recipe, Path(folder) / f"{kind}-{seed}", kind, seed, methods, args.set)
            for seed, kind in product(seeds, KINDS)
        }
        found = {}
        for key, future in waiting.items():
            found[key] = future.result()
            print(*key, {name: f"{100 * values.mean():.3f}" for name, values in found[key].items()}, flush=True)
    stacked = {
        (kind, method): np.stack([found[kind, seed][method] for seed in seeds]).astype(float)
        for kind, method in product(KINDS, methods)
    }
    rows = {
        method: {kind: compared(stacked[kind, method], stacked["fp32", method]) for kind in KINDS} for method in methods
    }
    for method, kind in product(methods, KINDS[1:]):
        row = rows[method][kind]
        print(
            f"{method:6s} {kind}: {100 * row['accuracy']:.3f} %, minus fp32 {100 * row['minus_fp32']:+.3f}"
            f" (standard error {100 * row['standard_error']:.3f})"
        )
    result = {
        "what": " ".join((__doc__ or "").split("\n")[0:1]),
        "machine": machine.describe(),
        "recipe": args.recipe.as_posix(),
        "set": args.set,
        "seeds": seeds,
        "samples": next(iter(stacked.values())).shape[1],
        "methods": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

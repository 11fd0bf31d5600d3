"""Building a uniform soup of 16 files of 88M fp32 parameters: stockpot against mergekit `linear`.

    python benchmarks/build_uniform.py --peer path/to/mergekit-pytorch

Each side runs as its own process from start to finish (imports included), alternating; both results are compared with
each other and with float64 arithmetic before any figure is printed. Peak memory is RssAnon, sampled: memory-mapped
files do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import machine
import shapes
import torch
from safetensors import safe_open
from safetensors.torch import save_file

OURS = """
import sys, stockpot
soup = stockpot.Soup.uniform(stockpot.Pool.open(sys.argv[1]))
getattr(soup, sys.argv[3])(sys.argv[2], overwrite=True)
"""


def make(folder: Path, models: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for k in range(models):
        file = folder / f"model_{k}.safetensors"
        files.append(file)
        if not file.exists():
            generator = torch.Generator().manual_seed(k)
            base = torch.Generator().manual_seed(10**6)
            tensors = {
                name: torch.randn(shape, generator=base)
                .mul_(0.02)
                .add_(torch.randn(shape, generator=generator), alpha=1e-3)
                for name, shape in shapes.vit_b_32().items()
            }
            save_file(tensors, file, metadata={"format": "pt"})
    return files


def run(command: list[str]) -> tuple[float, int]:
    """Wall-clock seconds and peak RssAnon in bytes of a process."""
    peak = 0
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, *(int(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("RssAnon")), 0)
        except OSError:
            pass
        time.sleep(0.01)
    seconds = time.perf_counter() - began
    if process.returncode:
        assert process.stderr is not None
        sys.exit(f"{command[0]} failed:\n{process.stderr.read().decode()}")
    return seconds, peak


def agree(files: list[Path], ours: Path, theirs: Path | None) -> dict[str, float]:
    """Largest difference from the float64 mean, ours and theirs, over a sample of tensors."""
    worst = {"ours": 0.0, "peer": 0.0}
    opened = [safe_open(file, "pt") for file in files]
    sides = {"ours": safe_open(ours, "pt")} | ({"peer": safe_open(theirs, "pt")} if theirs else {})
    for name in list(shapes.vit_b_32())[::7]:
        exact = sum(file.get_tensor(name).double() for file in opened) / len(opened)
        for side, file in sides.items():
            worst[side] = max(worst[side], float((file.get_tensor(name).double() - exact).abs().max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=shutil.which("mergekit-pytorch"), help="mergekit-pytorch of mergekit 0.1.4")
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "stockpot-bench-uniform")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "build_uniform.json")
    args = parser.parse_args()
    files = make(args.folder / "models", args.models)
    config = args.folder / "linear.yaml"
    config.write_text(
        "merge_method: linear\ndtype: float32\nmodels:\n"
        + "".join(f"  - model: {file}\n    parameters:\n      weight: 1.0\n" for file in files)
    )
    ours, theirs = args.folder / "ours", args.folder / "theirs"
    models = str(args.folder / "models")
    # `export` writes weights, as the peer does; `save` also writes the record with a SHA-256 of every ingredient.
    commands = {
        "stockpot": [sys.executable, "-c", OURS, models, str(ours), "export"],
        "stockpot_with_digests": [sys.executable, "-c", OURS, models, str(ours), "save"],
    }
    if args.peer:
        commands["mergekit"] = [args.peer, str(config), str(theirs), "--quiet"]
    for file in files:  # both sides start with the files in the page cache
        file.read_bytes()
    figures: dict[str, list[tuple[float, int]]] = {side: [] for side in commands}
    for _ in range(args.repeat):
        for side, command in commands.items():
            shutil.rmtree(theirs, ignore_errors=True)
            os.sync()
            figures[side].append(run(command))
    peer_file = next(iter(theirs.glob("*.safetensors")), None) if args.peer else None
    worst = agree(files, ours / "model.safetensors", peer_file)
    assert max(worst.values()) < 1e-7, worst
    result = {
        "what": f"uniform soup of {args.models} files of 88.2M fp32 parameters, one process from start to finish",
        "machine": machine.describe(),
        "largest_difference_from_float64": worst,
        "sides": {
            side: {
                "seconds": [round(s, 2) for s, _ in rows],
                "median_seconds": round(statistics.median(s for s, _ in rows), 2),
                "peak_anonymous_gb": round(max(p for _, p in rows) / 1e9, 3),
            }
            for side, rows in figures.items()
        },
    }
    if args.peer:
        sides = result["sides"]
        peer = sides["mergekit"]["median_seconds"]
        result["ratio"] = round(sides["stockpot"]["median_seconds"] / peer, 3)
        result["ratio_with_digests"] = round(sides["stockpot_with_digests"]["median_seconds"] / peer, 3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

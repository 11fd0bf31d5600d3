"""A hundred small comparisons in one process: memory, file handles, threads and children stay where they are.

python -m torture.soak --runs 100
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from torture.cases import prepare

WARM = 15  # runs until caches and allocators have what they keep
GROWTH = 0.05  # share of memory that may come on top after that


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--warm", type=int, default=WARM)
    parser.add_argument("--charts", type=int, default=5, help="a report with charts in every so many runs")
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="stockpot-soak-"))
    began = time.monotonic()
    try:
        seen = [_measured(folder, number, given.charts) for number in range(given.runs)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    before = max(seen[: given.warm], key=lambda state: state["memory"])
    after = seen[-1]
    growth = after["memory"] / before["memory"] - 1
    print(f"{given.runs} runs in {time.monotonic() - began:.0f} s")
    first, last = (f"{state['memory'] / 2**20:.1f} MiB" for state in (before, after))
    print(f"  memory   {first} after {given.warm} runs, {last} at the end ({100 * growth:+.1f} %)")
    wrong = [f"memory grew by {100 * growth:.1f} %"] if growth > GROWTH else []
    for what in ("handles", "threads", "children"):
        held, more = seen[given.warm - 1][what], after[what] - seen[given.warm - 1][what]
        print(f"  {what:<8} {held} after {given.warm} runs, {held + more} at the end")
        if more > 0:
            wrong.append(f"{what}: {more} more")
    for line in wrong:
        print(f"FAILED {line}")
    print(f"{len(wrong)} leaks")
    sys.exit(1 if wrong else 0)


def _measured(folder: Path, number: int, charts: int) -> dict[str, int]:
    place = folder / f"{number}"
    place.mkdir()
    _compare(place, number, charts)
    shutil.rmtree(place)
    gc.collect()
    state = _state()
    if number % 10 == 9:
        print(f"{number + 1} runs: {state}", flush=True)
    return state


def _compare(place: Path, number: int, charts: int) -> None:
    """As the command does it: recipe, run, report; plain and with BatchNorm in turn."""
    from stockpot import compare
    from stockpot.recipe import load_recipe
    from stockpot.recipe.build import build_pool, build_task, cook_arguments
    from stockpot.report import write_report

    prepare(place, seed=number % 3)
    recipe = load_recipe(place / ("normed.yaml" if number % 2 else "plain.yaml"), ["output.dir=out", "method.steps=6"])
    compared = compare(build_pool(recipe), build_task(recipe), **cook_arguments(recipe, "compare", "soak"))
    assert not compared.failed, compared.failed
    assert compared.path is not None
    if charts and number % charts == 0:
        write_report(compared.path)


def _state() -> dict[str, int]:
    import multiprocessing

    status = Path("/proc/self/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))
    return {
        "memory": memory * 1024,
        "handles": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  (its own handle comes and goes)
        "threads": len(os.listdir("/proc/self/task")),  # noqa: PTH208
        "children": len(multiprocessing.active_children()) + _children(),
        "python threads": threading.active_count(),
    }


def _children() -> int:
    return len(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


if __name__ == "__main__":
    main()

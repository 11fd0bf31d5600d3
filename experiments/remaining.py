"""How long the default still learns, as the bar says: the share of the time that it is right within a factor of 1.5.

    python experiments/remaining.py                  # the small pools of the bench, four draws, CPU
    python experiments/remaining.py --kept-apart     # the pools that the figure was not chosen on
    python experiments/remaining.py --only surface --seeds 0

`least` is what is left if nothing gets better any more, `most` all steps. Beside them the line before learning goes on:
in how many runs it was within 1.5 of what then was left. The clock counts steps, and judging a fold as a fifth of one,
as it was on a CPU: so the table is about what is not known, and the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import torch
from studies import ablation
from studies.pools import POOLS

from stockpot import Event, cook
from stockpot.progress import LIKELY, Activity

HOME = Path(__file__).resolve().parent
FACTOR = 1.5
TAKES = {"step": 1.0, "held_out": 0.2}
Figures = tuple[float, float, float]  # seconds: as shown, at least, at most


def followed(name: str, seed: int, made: Path) -> tuple[dict[str, float], bool]:
    """Shares of the time of one run, and whether the line was right."""
    pool, task, _ = ablation.opened(name, seed, made)
    activity, told, ends = Activity(), list[tuple[float, Figures]](), list[float]()
    lines = list[tuple[float, float]]()
    now = 0.0

    def clock() -> float:
        return now

    def listen(event: Event) -> None:
        nonlocal now
        now += TAKES.get(event.kind, 0.0)
        data = event.data
        activity.hear(event)
        if event.kind == "held_out":
            ends.append(now)
        if event.kind == "pace":
            lines.append((now, min(LIKELY * data["least"], data["seconds"])))
        if event.kind == "step" and (found := activity.left()) is not None:
            told.append((now, found))

    time.monotonic = time.perf_counter = clock
    cook(pool, task, seed=seed, listen=listen)
    return {
        what: _share([(now, figures[i]) for now, figures in told], ends[-1])
        for i, what in enumerate(("shown", "least", "most"))
    }, all(_holds(seconds, ends[-1] - now) for now, seconds in lines)


def _share(told: Sequence[tuple[float, float]], end: float) -> float:
    """Every figure stands until the next one."""
    times = [now for now, _ in told] + [end]
    stood = [after - now for now, after in pairwise(times)]
    held = [_holds(figure, end - now) for now, figure in told]
    return sum(span for span, ok in zip(stood, held, strict=True) if ok) / sum(stood)


def _holds(figure: float, true: float) -> bool:
    return true / FACTOR <= figure <= true * FACTOR


def table(pools: Iterable[str], seeds: Sequence[int], made: Path) -> list[str]:
    rows, means = list[str](), list[list[float]]()
    for name in pools:
        found = [followed(name, seed, made) for seed in seeds]
        means.append([fmean(shares[what] for shares, _ in found) for what in ("shown", "least", "most")])
        right = sum(line for _, line in found)
        rows.append(f"{name:16}" + "".join(f"{one:8.0%}" for one in means[-1]) + f"   line: {right} of {len(seeds)}")
    head = f"{'':16}{'shown':>8}{'least':>8}{'most':>8}"
    return [head, *rows, f"{'mean':16}" + "".join(f"{fmean(column):8.0%}" for column in zip(*means, strict=True))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="POOL", help="these pools")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(4)))
    parser.add_argument("--kept-apart", action="store_true", help="the pools that no rule was tried on, and no others")
    parser.add_argument("--made", type=Path, default=HOME / "data" / "ablation", help="where small pools are put")
    given = parser.parse_args()
    torch.set_num_threads(1)
    pools = given.only or [name for name, one in POOLS.items() if one.kept_apart == given.kept_apart]
    print("\n".join(table(pools, given.seeds, given.made)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

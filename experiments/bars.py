"""What the default must show on a CPU, each in minutes: the runs, the table, and whether it was met.

    python experiments/bars.py samples     # 100, 300, 1,000 to fit on, eight draws, two zoos
    python experiments/bars.py rates       # rates of 0.002 to 0.1, half to four times the steps, seven pools
    python experiments/bars.py few         # 20 pools with 100 samples: is it below best, uniform and greedy at once?
    python experiments/bars.py chance      # labels by chance, 100 runs: are held-out scores right?
    python experiments/bars.py demo        # the demo's pool with ten seeds, beside hl+

Every run is a line of experiments/results/default/NAME.jsonl; what is there is not run again. No test data.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import torch
import yaml
from studies import ablation
from studies.ablation import DEFAULT, Candidate, Row, gap
from studies.candidates import CANDIDATES
from studies.pools import POOLS

from stockpot import Task, cook

HOME = Path(__file__).resolve().parent
SIMPLE = ("best", "uniform", "greedy")
CROSSED = "greedy, held out"
Rows = Mapping[tuple[str, int, str], Row]  # by pool, seed, candidate


@dataclass(frozen=True)
class Bar:
    pools: Sequence[str]
    seeds: int
    candidates: Mapping[str, Candidate]
    told: Callable[[Rows], tuple[list[str], bool]]  # the table, and whether the bar was met


def as_in_the_demo() -> dict[str, Candidate]:
    """The default and hl+ with the settings of the demo's recipe."""
    from stockpot.zoo.demo import demo_recipe

    method = yaml.safe_load(demo_recipe(0))["method"]
    own = method.get("each", {}).get("crossfit", {})
    common = {name: method[name] for name in ("steps", "batch_size", "lr")}
    return {DEFAULT: Candidate(settings={"batch_size": method["batch_size"], **own}), "hl+": Candidate("hl+", common)}


# Tables -------------------------------------------------------------------------------------------------


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) / math.sqrt(len(values))


def gaps(rows: Rows, pool: str, name: str, base: str) -> list[float]:
    """One candidate minus another, draw by draw: points of accuracy, or per cent of the loss."""
    seeds = [seed for where, seed, who in rows if where == pool and who == name]
    return [gap(rows[pool, seed, name], rows[pool, seed, base]) for seed in seeds]


def pools_of(rows: Rows) -> list[str]:
    return list(dict.fromkeys(pool for pool, _, _ in rows))


def samples(rows: Rows) -> tuple[list[str], bool]:
    """Not below greedy or best by more than a standard error on average, nor below best by a point in any draw."""
    lines = ["| pool, samples | minus greedy | minus best | worst draw minus best | met |", "|---|---|---|---|---|"]
    met = True
    for pool in pools_of(rows):
        greedy, best = (gaps(rows, pool, DEFAULT, rival) for rival in ("greedy", "best"))
        found = [mean_and_error(each) for each in (greedy, best)]
        good = all(mean >= -error for mean, error in found) and min(best) >= -1
        met &= good
        cells = [f"{mean:+.2f} ({error:.2f})" for mean, error in found]
        lines.append(f"| {pool} | {' | '.join(cells)} | {min(best):+.2f} | {'yes' if good else 'no'} |")
    return lines, met


def rates(rows: Rows) -> tuple[list[str], bool]:
    """Less than 0.2 points, or 0.5 % of the loss."""
    names = list(dict.fromkeys(name for _, _, name in rows if name != DEFAULT))
    lines = [f"| minus the default | {' | '.join(names)} | range | met |", f"|---|{'---|' * (len(names) + 2)}"]
    met = True
    for pool in pools_of(rows):
        points = rows[pool, 0, DEFAULT]["accuracy"]
        found = {name: mean_and_error(gaps(rows, pool, name, DEFAULT)) for name in names}
        most = max(abs(mean) for mean, _ in found.values())
        good = most < (0.2 if points else 0.5)
        met &= good
        unit = "" if points else " %"
        cells = [f"{mean:+.2f}{unit} ({error:.2f})" for mean, error in found.values()]
        lines.append(f"| {pool} | {' | '.join(cells)} | {most:.2f} | {'yes' if good else 'no'} |")
    return lines, met


def few(rows: Rows) -> tuple[list[str], bool]:
    """Below all three in at most 2 of 20."""
    lines = ["| pool | minus the worst of best, uniform, greedy, draw by draw | below all |", "|---|---|---|"]
    below = 0
    for pool in pools_of(rows):
        draws = zip(*(gaps(rows, pool, DEFAULT, rival) for rival in SIMPLE), strict=True)
        found = [max(draw) for draw in draws]
        count = sum(one < 0 for one in found)
        below += count
        lines.append(f"| {pool} | {', '.join(f'{one:+.2f}' for one in found)} | {count} |")
    return [*lines, "", f"below all three: {below} of {sum(who == DEFAULT for _, _, who in rows)}"], below <= 2


def chance(rows: Rows) -> tuple[list[str], bool]:
    """Held-out scores agree with that of the uniform soup, for which nothing was chosen, within two standard errors."""
    lines = ["| pool, held out | accuracy | minus 50 | minus uniform | within two |", "|---|---|---|---|---|"]
    met = True
    for pool in pools_of(rows):
        found: dict[str, list[float]] = {"learned": [], "best": [], "uniform": [], "greedy": []}
        for (where, _, who), row in rows.items():
            if where == pool and who == DEFAULT:
                for name, value in row["guarded"].items():
                    found[name].append(100 * value)
            elif where == pool:
                found["greedy"].append(100 * row["held_out"])
        for name, values in found.items():
            truth = mean_and_error([value - 50 for value in values])
            other = mean_and_error([a - b for a, b in zip(values, found["uniform"], strict=True)])
            good = abs(other[0]) <= 2 * other[1]
            met &= good
            cells = [f"{mean:+.2f} ({error:.2f})" for mean, error in (truth, other)]
            lines.append(f"| {pool}, {name} | {fmean(values):.2f} | {' | '.join(cells)} | {'yes' if good else 'no'} |")
    winners = [row["guard"] for row in rows.values() if row["guard"]]
    stepped_in = sum(winner != "learned" for winner in winners)
    return [*lines, "", f"the guard stepped in {stepped_in} of {len(winners)} times"], met


def demo(rows: Rows) -> tuple[list[str], bool]:
    """Not below hl+ beyond chance, and at most three times its time."""
    (pool,) = pools_of(rows)
    found = gaps(rows, pool, DEFAULT, "hl+")
    mean, error = mean_and_error(found)
    seeds = [seed for _, seed, who in rows if who == DEFAULT]
    times = [rows[pool, seed, DEFAULT]["seconds"] / rows[pool, seed, "hl+"]["seconds"] for seed in seeds]
    lines = [
        "| | over the seeds | mean (standard error), or median |", "|---|---|---|",
        f"| minus hl+, points | {', '.join(f'{one:+.2f}' for one in found)} | {mean:+.2f} ({error:.2f}) |",
        f"| time over hl+'s | {', '.join(f'{one:.1f}' for one in times)} | {median(times):.1f} |",
    ]  # fmt: skip
    return lines, mean >= -2 * error and median(times) <= 3


BARS = {
    "samples": Bar(
        [f"{name}-{fitted}" for name in ("digits", "mixture") for fitted in (100, 300, 1000)], 8,
        {name: CANDIDATES[name] for name in (DEFAULT, "best", "greedy")}, samples,
    ),
    "rates": Bar(
        [name for name, one in POOLS.items() if not one.kept_apart], 4,
        {name: one for name, one in CANDIDATES.items() if name.startswith((DEFAULT, "rate ", "500", "4,000"))},
        rates,
    ),
    "few": Bar(
        [f"{name}-100" for name in ("digits", "images", "mixture", "surface", "language")], 4,
        {name: CANDIDATES[name] for name in (DEFAULT, *SIMPLE)}, few,
    ),
    "chance": Bar(["coins", "coins-400"], 100, {DEFAULT: Candidate()}, chance),
    "demo": Bar(["demo"], 10, {}, demo),
}  # fmt: skip


def crossed_greedy(name: str, seed: int, results: Path, made: Path) -> None:
    """The held-out score of greedy soups, each chosen without a fold and scored on it."""
    rows = ablation.read(results)
    if any((row["pool"], row["candidate"], row["seed"]) == (name, CROSSED, seed) for row in rows):
        return
    pool, task, _ = ablation.opened(name, seed, made)
    right = 0.0
    for inside, outside in task.fit.folds(4, seed):
        part = Task(task.model, task.fit.subset(inside), batch_size=2000, device="cpu")
        found = cook(pool, part, "greedy")
        assert found.soup is not None
        found.soup.load_into(task.model)
        right += task.score(task.fit.subset(outside)).value * len(outside)
    row = {"pool": name, "seed": seed, "candidate": CROSSED, "held_out": right / len(task.fit), "guard": None}
    ablation.write(results, row)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bar", choices=BARS)
    parser.add_argument("--seeds", type=int, help="so many, instead of all")
    parser.add_argument("--results", type=Path, default=HOME / "results" / "default")
    parser.add_argument("--made", type=Path, default=HOME / "data" / "ablation", help="where pools are put")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)  # these networks are too small for more
    bar, results = BARS[chosen.bar], chosen.results / f"{chosen.bar}.jsonl"
    seeds = range(chosen.seeds or bar.seeds)
    candidates = bar.candidates or as_in_the_demo()
    if not chosen.table:
        ablation.run(bar.pools, seeds, candidates, results, chosen.made)
        if chosen.bar == "chance":
            for name, seed in product(bar.pools, seeds):
                crossed_greedy(name, seed, results, chosen.made)
    rows: dict[tuple[str, int, str], Any] = {
        (row["pool"], row["seed"], row["candidate"]): row for row in ablation.read(results) if row["seed"] in seeds
    }
    lines, met = bar.told(rows)
    print("\n".join([*lines, "", "met" if met else "NOT met"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

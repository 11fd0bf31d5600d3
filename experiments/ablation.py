"""Every candidate for the default on every pool's dev data with common seeds, and the table. No test data.

    python experiments/ablation.py                          # small pools that are made here in minutes, eight draws
    python experiments/ablation.py --only digits surface --seeds 0 1 --candidates default "no guard"
    python experiments/ablation.py --large                  # also the zoos whose pools are in experiments/data
    python experiments/ablation.py --kept-apart             # once, at the end: the pools no rule was tried on
    python experiments/ablation.py --table                  # of what there is

A row is a line of experiments/runs/ablation/NAME.jsonl; what is there is not run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from studies import ablation
from studies.candidates import CANDIDATES
from studies.pools import POOLS

HOME = Path(__file__).resolve().parent


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="POOL", help="these pools")
    parser.add_argument("--candidates", nargs="+", metavar="NAME", help=f"of {', '.join(CANDIDATES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--large", action="store_true", help="also the zoos whose pools are there")
    parser.add_argument("--kept-apart", action="store_true", help="the pools that no rule was tried on, and no others")
    parser.add_argument("--name", default="small", help="of the results file")
    parser.add_argument("--runs", type=Path, default=HOME / "runs" / "ablation")
    parser.add_argument("--made", type=Path, default=HOME / "data" / "ablation", help="where small pools are put")
    parser.add_argument("--base", default=ablation.DEFAULT, help="the candidate that others are compared with")
    parser.add_argument("--table", action="store_true", help="run nothing")
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)  # these networks are too small for more
    pools = [name for name, one in POOLS.items() if one.kept_apart == chosen.kept_apart]
    if chosen.large:
        pools += ablation.present(HOME / "data")
    pools = chosen.only or pools
    wanted = chosen.candidates or list(CANDIDATES)
    unknown = [name for name in wanted if name not in CANDIDATES]
    if unknown:
        print(f"no candidate {unknown[0]!r}; there are {', '.join(CANDIDATES)}", file=sys.stderr)
        return 1
    results = chosen.runs / f"{chosen.name}.jsonl"
    if not chosen.table:
        ablation.run(pools, chosen.seeds, {name: CANDIDATES[name] for name in wanted}, results, chosen.made)
    rows = [
        row
        for row in ablation.read(results)
        if row["pool"] in pools and row["candidate"] in {*wanted, chosen.base} and row["seed"] in chosen.seeds
    ]
    print("\n".join(ablation.table(rows, chosen.base)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

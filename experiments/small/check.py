"""Is the ordering right? The default method above greedy, uniform and the best ingredient; exit code 1 if not.

python experiments/small/check.py experiments/data/small/run
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from stockpot.run.record import read_run

DEFAULT = "crossfit"
BELOW = ("greedy", "uniform", "best")


def scores(run: Path) -> dict[str, float]:
    """Accuracy of each method on the report data, from the records of a run."""
    found = {method.name: method.scores["report"]["value"] for method in read_run(run).methods}
    return {name: found[name] for name in (DEFAULT, *BELOW)}


def wrong(found: Mapping[str, float]) -> list[str]:
    """What is not as it should be, one sentence each."""
    return [
        f"{DEFAULT} ({100 * found[DEFAULT]:.2f} %) is not above {name} ({100 * found[name]:.2f} %)"
        for name in BELOW
        if found[DEFAULT] <= found[name]
    ]


def main(run: Path) -> int:
    found = scores(run)
    for name, score in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{100 * score:6.2f} %  {name}")
    problems = wrong(found)
    print("; ".join(problems) if problems else f"The ordering is right: {DEFAULT} is above {', '.join(BELOW)}.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

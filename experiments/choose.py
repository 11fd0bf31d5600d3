"""Compare ideas for the default over several zoos: `python experiments/choose.py ZOO ... --against IDEA`.

What is compared are tries on the dev splits: `study.py ZOO ... --try top-0 method.start=top output.seed=0 --try
top-1 ...` is two seeds of an idea called top. The last line names the best one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from studies.choosing import gains
from studies.markdown import interval, points

from stockpot.errors import StockpotError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("zoo", nargs="+", help="folder in experiments/runs/")
    parser.add_argument("--against", required=True, metavar="IDEA", help="what the others are compared with")
    parser.add_argument(
        "--home", type=Path, default=Path(__file__).parent, metavar="DIR", help="folder of the zoos"
    )
    options = parser.parse_args(arguments)
    try:
        found = gains(options.home, options.zoo, options.against, lambda line: print(line, file=sys.stderr))
    except StockpotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for gain in found:
        own = ", ".join(f"{zoo} {interval(one)}" for zoo, one in gain.by_zoo.items())
        print(f"{gain.idea}: {interval(gain.over_all)} points, loss {points(gain.loss)} % lower ({own})")
    better = [gain.idea for gain in found if gain.over_all[0] > 0]
    print(f"best: {better[0] if better else options.against}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write docs/results.md, its figures and the tables in READMEs: `python experiments/results.py`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from studies.loaded import read_all
from studies.page import read_notes, update_project, update_zoo, write
from studies.tasks import read_gathered

from stockpot.errors import StockpotError


def main(arguments: list[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=here / "results", metavar="DIR", help="gathered results")
    parser.add_argument("--out", type=Path, default=here.parent / "docs" / "results.md", metavar="FILE")
    parser.add_argument(
        "--home",
        type=Path,
        metavar="DIR",
        help="folder of the zoos' READMEs, below the project's; default: the one above --results",
    )
    options = parser.parse_args(arguments)
    # Not the repository's: where other results are read, its zoos are not the ones measured.
    home = options.home or options.results.parent
    try:
        found = read_all(options.results)
        write(found, read_notes(options.results / "notes.yaml"), options.out, read_gathered(options.results / "tasks"))
        for zoo in found:
            update_zoo(zoo, home / zoo.zoo / "README.md")
        update_project(found, home.parent / "README.md")
    except StockpotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.out.name}: {', '.join(zoo.zoo for zoo in found) or 'no zoo measured yet'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

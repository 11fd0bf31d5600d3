"""Gather a zoo's finished runs: `python experiments/collect.py ZOO [-o experiments/results/ZOO.json]`.

Of a run directory it needs everything but the
soups and reports, so runs can be moved between machines without those.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from studies.gather import gather

from stockpot import files
from stockpot.errors import StockpotError


def main(arguments: list[str] | None = None) -> int:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", help="folder in experiments/runs/")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: experiments/results/ZOO.json")
    parser.add_argument("--home", type=Path, default=here, metavar="DIR", help="folder of the zoos")
    options = parser.parse_args(arguments)
    runs = options.home / "runs" / options.zoo
    try:
        value = gather(runs, options.zoo)
    except StockpotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not value["runs"]:
        print(f"error: no finished run of {options.zoo}; see experiments/study.py", file=sys.stderr)
        return 1
    out = options.out or options.home / "results" / f"{options.zoo}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    # One line per run: small, and a change of one run is one line of a difference.
    lines = [f'"{name}":{_json(run)}' for name, run in value.pop("runs").items()]
    head = _json(value)[:-1]
    files.write_bytes(out, (head + ',\n"runs":{\n' + ",\n".join(lines) + "\n}}\n").encode())
    print(f"{out.name}: {len(lines)} runs, {out.stat().st_size / 1000:.0f} kB")
    return 0


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


if __name__ == "__main__":
    sys.exit(main())

"""Run the studies of zoos: `python experiments/study.py ZOO ... [--only NAME ...] [--pools] [--jobs N] [--dry-run]`.

Every run is `stockpot compare experiments/ZOO/recipe.yaml --set ... --out experiments/runs/ZOO/NAME`. Called again, it
goes on where it was; finished runs are skipped. Logs lie beside the runs. Of several zoos, all have their first study
before any has its second; with --pools each begins when its pool is there, and pre-training comes before that.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.plans import STUDIES, plan_all, planned_steps
from studies.running import Job, finished, making, run_all
from studies.zoo import Zoo

from stockpot.errors import StockpotError


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        home = options.home.resolve()
        zoos = [Zoo.open(home, name, options.set, complete=not options.pools) for name in dict.fromkeys(options.zoo)]
        runs = [Job(zoo, run) for zoo, run in plan_all(zoos, options.only)]
        if options.dry_run:
            _show(runs)
            return 0
        todo = [job for job in runs if job.run is not None and not finished(job.zoo, job.run)]
    except StockpotError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if len(todo) < len(runs):
        print(f"{len(runs) - len(todo)} of {len(runs)} runs finished earlier")
    if options.pools:
        todo = [*making(zoos), *todo]
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))
    try:
        failed = run_all(
            todo, jobs=options.jobs, python=shlex.split(options.python), say=_say, limit=options.seconds
        )  # fmt: skip
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130
    if failed:
        print(f"not finished: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _options(arguments: list[str] | None) -> Any:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", nargs="+", help="folder in experiments/")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME",
        help=f"studies ({', '.join(STUDIES)}) or runs, in this order; ZOO/NAME: of that zoo alone",
    )  # fmt: skip
    parser.add_argument("--pools", action="store_true", help="pre-train (where a zoo does) and fine-tune first")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once (default: 1)")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and how many steps it takes")
    parser.add_argument("--python", default=sys.executable, metavar="CMD", help="runs `CMD -m stockpot`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every run")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop after so long; continue another time")
    parser.add_argument("--home", type=Path, default=here, metavar="DIR", help="folder of the zoos")
    return parser.parse_args(arguments)


def _show(jobs: Sequence[Job]) -> None:
    total, left = 0, 0
    for job in jobs:
        zoo, run = job.zoo, job.run
        assert run is not None
        recipe = zoo.recipe(run.stated)
        steps = sum(
            planned_steps(name, vars(recipe.method.settings(name)), run.models(zoo)) for name in recipe.method.compared
        )
        state = "finished" if finished(zoo, run) else "to do"
        total += steps
        left += steps if state == "to do" else 0
        values = " ".join(f"{key}={value}" for key, value in run.values)
        name = f"{run.name:26}" if len({job.zoo.name for job in jobs}) == 1 else f"{zoo.name:21} {run.name:26}"
        print(f"{name} {state:9} {steps:>9,} steps  K = {run.models(zoo):<3} {values}")
    print(f"{len(jobs)} runs, {total:,} steps in all, {left:,} to do")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Kill commands at random instants, again and again, and compare what they end with to an uninterrupted run.

    python -m torture.kills --kills 220 --seed 0

A quarter of the kills come at a random time; a quarter at a random call that changes the disk, before it, after it, or
with half of a file written; the rest shortly after a random phase was entered. Exit code 1 when any file was damaged or
any result differs by a bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torture.cases import Case, prepare
from torture.evidence import damaged, differences, facts
from torture.process import LIMIT, Command, warm_up


@dataclass(frozen=True)
class Whole:
    """A case that nobody interrupted."""

    facts: dict[str, Any]
    seconds: float
    calls: int
    entries: dict[int, int]


@dataclass
class Tally:
    kills: int = 0
    runs: int = 0
    by_command: Counter[str] = field(default_factory=Counter)
    by_phase: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--keep", action="store_true", help="leave the files of failures behind")
    given = parser.parse_args()
    began = time.monotonic()
    warm_up()
    # In memory where that can be: a kill does not tell flushed from unflushed, and flushing takes most of the time.
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="stockpot-torture-", dir=place))
    tally = Tally()
    try:
        torture(folder, given.kills, given.seed, given.only, tally)
    finally:
        if not (given.keep and tally.failures):
            shutil.rmtree(folder, ignore_errors=True)
    _print(tally, time.monotonic() - began)
    sys.exit(1 if tally.failures or tally.kills < given.kills else 0)


def torture(folder: Path, kills: int, seed: int, only: list[str], tally: Tally) -> None:
    chance = random.Random(seed)
    cases = [case for case in prepare(folder, seed) if any(part in case.name for part in only)]
    wholes: dict[str, Whole] = {}
    weights = [0.3 if case.parallel else 1.0 for case in cases]
    while tally.kills < kills and len(tally.failures) < 10:
        case = chance.choices(cases, weights)[0]
        if case.name not in wholes:
            wholes[case.name] = _uninterrupted(case, folder)
        _run(case, wholes[case.name], folder, chance, tally)
        print(f"{tally.kills:4d} kills, {len(tally.failures)} failures; last: {case.name}", flush=True)


def _uninterrupted(case: Case, folder: Path) -> Whole:
    """Twice: that two runs agree is what every comparison rests on."""
    found = []
    for number in range(2):
        out = folder / f"whole-{number}"
        command = Command(case.arguments(out), folder, folder / "log", charts=number == 0)
        if not command.wait() or command.code != 0:
            command.kill()
            raise SystemExit(f"{case.name} does not run at all:\n{command.text()}")
        board = command.board
        found.append(Whole(facts(out), time.monotonic() - command.began, board.calls, board.entries))
        shutil.rmtree(out)
    if found[0].facts != found[1].facts:
        raise SystemExit(f"{case.name} is not repeatable: {differences(found[0].facts, found[1].facts)}")
    return found[1]


def _run(case: Case, whole: Whole, folder: Path, chance: random.Random, tally: Tally) -> None:
    """One case to its end, over up to five kills."""
    tally.runs += 1
    out = folder / f"run-{tally.runs}"
    story = []
    for _ in range(chance.randint(1, 5)):
        kind = chance.choice(("time", "call", "phase", "phase"))
        command, how = _stricken(case, whole, out, folder, kind, chance)
        story.append(how)
        if command is None:
            tally.failures.append(f"{case.name}: hangs after {story}")
            return
        if not command.killed:
            break  # it was faster
        phase = command.board.phase
        tally.kills += 1
        tally.by_command[case.command[0] + (" in parallel" if case.parallel else "")] += 1
        tally.by_phase[phase] += 1
        tally.by_kind[how.partition(" ")[0]] += 1
        story[-1] = f"{how} while {phase}"
        tally.failures += [f"{case.name}: after {story}: {line}" for line in damaged(out)]
    last = Command(case.arguments(out), folder, folder / "log", charts=False)
    if not last.wait() or last.code != 0:
        last.kill()
        tally.failures.append(f"{case.name}: cannot be continued after {story}: code {last.code}\n{last.text()}")
        return
    wrong = differences(whole.facts, facts(out))
    tally.failures += [f"{case.name}: after {story}: {line}" for line in wrong]
    if not wrong:
        shutil.rmtree(out)


def _stricken(
    case: Case, whole: Whole, out: Path, folder: Path, kind: str, chance: random.Random
) -> tuple[Command | None, str]:
    """The command, ended in one way or another, and by what; None where it hung."""
    given: dict[str, Any] = {"charts": chance.random() < 0.1, "save_every": chance.choice((0.0, 0.1, 1e9))}
    how = kind
    if kind == "call":
        given["at"], given["save_every"] = (chance.randint(1, max(1, whole.calls)), 0.0)  # as when they were counted
        how = f"call {given['at']}"
    elif kind == "phase":
        phase = chance.choice(list(whole.entries))
        entry = phase, chance.randint(1, whole.entries[phase]), chance.choice((0.0, 0.001, 0.005))
        given["entry"] = entry
        how = f"phase {entry}"
    # A second process beside it is killed with it, or goes on and takes over what the first one leaves.
    second = Command(case.arguments(out), folder, folder / "log2", charts=False) if case.parallel else None
    command = Command(case.arguments(out), folder, folder / "log", **given)
    if kind == "time":
        delay = chance.uniform(0, whole.seconds)
        if not command.wait(delay):
            command.kill()
            how = f"time {delay:.3f} s"
    if second is not None and chance.random() < 0.5:
        second.kill()
    for one in (command, second):
        if one is not None and not one.wait(LIMIT):
            return _gone(one), how
    if second is not None and not second.killed and second.code != 0:
        return None, f"{how}; the second process: {second.text()}"
    return command, how


def _gone(command: Command) -> Command | None:
    command.kill()
    return None


def _print(tally: Tally, seconds: float) -> None:
    print(f"\n{tally.kills} kills over {tally.runs} runs in {seconds:.0f} s")
    for title, counts in (("command", tally.by_command), ("phase", tally.by_phase), ("by", tally.by_kind)):
        print(f"  {title}:")
        for name, count in counts.most_common():
            print(f"    {count:5d}  {name}")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    print(f"{len(tally.failures)} mismatches")


if __name__ == "__main__":
    main()

"""Kill one of several ranks at random instants: all stop soon, one says why, and the run resumes to the same soup.

    python -m torture.rank_kills --kills 30 --seed 0

No launcher ends the others: they notice by themselves. Most runs are resumed with as many ranks, and everything in the
run directory must be the same to the last bit; the rest with another number, and W must be the same to rounding.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from torture.evidence import damaged, differences, facts
from torture.faults import PHASES
from torture.process import LIMIT, Command, warm_up
from zoo import fine_tunes, mlp, write

SOON = 30.0  # seconds within which all ranks must have stopped
ROUNDING = 1e-10
JOINED = PHASES.index("joining other ranks")
CODE = """
import torch
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()

def data(which):
    generator = torch.Generator().manual_seed(0 if which == "fit" else 1)
    x = torch.randn(83, 6, generator=generator, dtype=torch.float64)
    rule = torch.randn(6, 3, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return x, (x @ rule).argmax(dim=1)
"""
RECIPE = """
pool: {path: pool}
model: {python: "toy:model", device: cpu}
data: {python: "toy:data", batch_size: 20}
method:
  {methods: [greedy, mehl+, crossfit], steps: 40, batch_size: 21, lr: 0.05, block_size: 2, parallel: PARALLEL,
   each: {crossfit: {steps: 40, lr: 0.05, batch_size: 21}}}
output: {dir: run}
"""


@dataclass(frozen=True)
class Case:
    parallel: str  # how the ranks share the learning
    ranks: int


CASES = (Case("data", 2), Case("folds", 2), Case("data", 3), Case("auto", 4), Case("shards", 2))


class Ranks:
    """One command on several ranks, started as srun does."""

    def __init__(self, folder: Path, case: Case, out: Path, ranks: int, save_every: float) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        arguments = ["compare", str(folder / f"{case.parallel}.yaml"), "--out", str(out)]
        self.each = [
            Command(
                arguments, folder, folder / f"log-{rank}", {**shared, "RANK": str(rank), "LOCAL_RANK": "0"},
                charts=False, save_every=save_every,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def met(self) -> bool:
        """Whether all ranks have found each other; until then it is for the launcher to end those that wait."""
        last = time.monotonic() + LIMIT
        while not all(JOINED in one.board.entries for one in self.each):
            if time.monotonic() > last or any(one.poll() for one in self.each):
                return False
            time.sleep(0.002)
        return True

    def wait(self, seconds: float) -> bool:
        last = time.monotonic() + seconds
        return all(one.wait(max(0.0, last - time.monotonic())) for one in self.each)

    def kill(self) -> None:
        for one in self.each:
            one.kill()

    def text(self) -> str:
        return "\n".join(f"rank {rank}, code {one.code}: {one.text()}" for rank, one in enumerate(self.each))


@dataclass
class Tally:
    kills: int = 0
    runs: int = 0
    slowest: float = 0.0  # seconds from a kill until all had stopped
    by: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=len(CASES), help="only so many of the cases")
    given = parser.parse_args()
    began, chance, tally = time.monotonic(), random.Random(given.seed), Tally()
    warm_up()
    folder = Path(tempfile.mkdtemp(prefix="stockpot-rank-kills-"))
    try:
        write(folder / "pool", [{n: v.double() for n, v in s.items()} for s in fine_tunes(mlp, 5)])
        (folder / "toy.py").write_text(CODE)
        for case in CASES:
            (folder / f"{case.parallel}.yaml").write_text(RECIPE.replace("PARALLEL", case.parallel))
        wholes: dict[Case, tuple[Path, float]] = {}
        while tally.kills < given.kills and len(tally.failures) < 5:
            case = CASES[tally.runs % given.cases]
            if case not in wholes:
                wholes[case] = uninterrupted(folder, case)
            tally.runs += 1
            torture(folder, case, *wholes[case], chance, tally)
            print(f"{tally.kills:3d} kills, {len(tally.failures)} failures; last: {case}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{tally.kills} kills over {tally.runs} runs in {time.monotonic() - began:.0f} s")
    print(f"all ranks had stopped after at most {tally.slowest:.1f} s")
    for what, times in sorted(tally.by.items()):
        print(f"    {times:3d}  {what}")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    print(f"{len(tally.failures)} mismatches")
    sys.exit(1 if tally.failures or tally.kills < given.kills else 0)


def uninterrupted(folder: Path, case: Case) -> tuple[Path, float]:
    """Where a whole run is, and how many seconds it took from when its ranks had met."""
    out = folder / f"whole-{case.parallel}-{case.ranks}"
    ranks = Ranks(folder, case, out, case.ranks, 0.0)
    met = ranks.met()
    began = time.monotonic()
    if not met or not ranks.wait(LIMIT) or any(one.code for one in ranks.each):
        ranks.kill()
        raise SystemExit(f"{case} does not run at all:\n{ranks.text()}")
    return out, time.monotonic() - began


def torture(folder: Path, case: Case, whole: Path, seconds: float, chance: random.Random, tally: Tally) -> None:
    """One run over up to three kills, resumed to its end."""
    out, story = folder / f"run-{tally.runs}", list[str]()

    def fail(why: str) -> None:
        tally.failures.append(f"{case} after {story}: {why}")

    for _ in range(chance.randint(1, 3)):
        ranks = Ranks(folder, case, out, case.ranks, chance.choice((0.0, 0.1, 1e9)))
        victim = chance.randrange(case.ranks)
        if not ranks.met():
            wrong = ["the ranks have not met"]
        else:
            time.sleep(chance.uniform(0, seconds))
            if ranks.each[victim].poll():
                ranks.wait(LIMIT)
                break  # it was faster
            phase = ranks.each[victim].board.phase
            story.append(f"rank {victim} killed while {phase}")
            tally.kills += 1
            tally.by[f"rank {'0' if victim == 0 else 'above 0'} while {phase}"] += 1
            wrong = after_kill(ranks, victim, tally)
        for line in wrong:
            fail(f"{line}\n{ranks.text()}")
        ranks.kill()
        for line in damaged(out):
            fail(line)
    other = chance.random() < 0.25
    again = Ranks(folder, case, out, case.ranks + chance.choice((-1, 1)) if other else case.ranks, 1e9)
    tally.by[f"resumed with {'another number of' if other else 'as many'} ranks"] += 1
    if not again.wait(LIMIT) or any(one.code for one in again.each):
        again.kill()
        fail(f"cannot be resumed\n{again.text()}")
        return
    for line in apart(out, whole) if other else differences(facts(whole), facts(out)):
        fail(line)
    shutil.rmtree(out)


def after_kill(ranks: Ranks, victim: int, tally: Tally) -> list[str]:
    """What went otherwise than it should when this rank is killed."""
    ranks.each[victim].kill()
    killed = time.monotonic()
    if not ranks.wait(SOON):
        return ["not all ranks stop"]
    tally.slowest = max(tally.slowest, time.monotonic() - killed)
    said = ranks.text().count(f"stopped, because rank {victim} on ")
    unfinished = any(one.code for rank, one in enumerate(ranks.each) if rank != victim)
    return [] if said == int(unfinished) else [f"said {said} times why they stopped"]


def apart(out: Path, whole: Path) -> list[str]:
    """Weights that differ by more than rounding."""
    found: list[str] = []
    for file in sorted(whole.glob("methods/*/weights.safetensors")):
        ours: Any = load_file(out / file.relative_to(whole))["W"]
        off = float((ours - load_file(file)["W"]).abs().max())
        found += [f"{file.parent.name}: W is {off:.1e} off"] if off > ROUNDING else []
    return found


if __name__ == "__main__":
    main()

"""Every way to share the learning, on two ranks and on four, against one process: the same W, scores and notes.

    python -m torture.rank_laws

`make test` has a sample of it (tests/ranks/test_shards.py).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ranks.worker_shards import RUNS, apart, bound, run, ways, write_pools


def main() -> None:
    began, wrong = time.monotonic(), list[str]()
    torch.set_num_threads(1)
    names = [f"{way}: {name}" for name in RUNS for way in ways(name)]
    with tempfile.TemporaryDirectory(prefix="stockpot-rank-laws-") as place:
        folder = Path(place)
        write_pools(folder)
        alone: dict[str, dict[str, Any]] = {name: run(folder, name) for name in RUNS}
        for size in (2, 4):
            command = [sys.executable, "-m", "ranks.worker_shards", str(size), str(folder), *names]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
            for rank in range(size):
                found = torch.load(folder / f"rank_{rank}_of_{size}.pt")
                for each in names:
                    name = each.partition(": ")[2]
                    off = apart(found[each], alone[name])
                    if rank == 0:
                        print(f"{size} ranks, {each}: {off:.1e} apart")
                    if not off <= bound(name):
                        wrong.append(f"rank {rank} of {size}, {each}: {off:.1e} apart")
    for line in wrong:
        print(f"FAILED {line}")
    print(f"{len(names)} cases on 2 and on 4 ranks in {time.monotonic() - began:.0f} s: {len(wrong)} apart")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

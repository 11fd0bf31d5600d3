"""Run by a test as a rank: several commands and calls, one after the other in one process, which loads torch once."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def command(*arguments: str) -> dict[str, object]:
    """`python -m stockpot ...`: its exit code and what it says."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["stockpot", *arguments]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module("stockpot", run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


def script() -> dict[str, object]:
    """`cook` and `compare` as a script calls them, without a run directory."""
    from stockpot import Pool, Task, compare, cook

    sys.path.insert(0, str(Path.cwd()))
    toy = __import__("toy")
    found: dict[str, object] = {}
    settings: dict[str, Any] = {"steps": 5, "batch_size": 21, "lr": 0.05}
    for name in ("cook", "compare"):
        task = Task(toy.model(), toy.data("fit"), toy.data("report"), batch_size=20)
        pool = Pool.open("pool")
        result = (
            cook(pool, task, "hl+", **settings) if name == "cook" else compare(pool, task, ["hl+"], **settings)["hl+"]
        )
        assert result.soup is not None
        found[name] = result.soup.W.tolist()
    return found


if __name__ == "__main__":
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "alone"))
    from stockpot import ranks

    leave, ranks.leave = ranks.leave, lambda: None  # torch joins a process group once
    said: dict[str, object] = {"script": script()}
    for line in json.loads(os.environ["COMMANDS"]):
        said[" ".join(line)] = command(*(word.replace("2RANK", f"2{rank}") for word in line))
    Path(os.environ["SAID"] + f"-{rank}.json").write_text(json.dumps(said))
    leave()

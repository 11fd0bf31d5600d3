"""Reads, rebuilds and continues thousands of damaged run directories: `python -m torture.mutated_runs --count 5000`.

Values, bytes, links, FIFOs, whatever a stranger may put into one. Each command ends well or with an error of ours,
within 5 seconds of work and 1 GB, and nothing outside of the directory is written, created or deleted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from stockpot import compare
from stockpot.errors import StockpotError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.report.page import page_of
from stockpot.report.reading import Run
from stockpot.run.rebuild import rebuild_soup, recommended_soup
from stockpot.task import Task
from zoo import mlp, samples, zoo

SLOWEST, LONGEST = 5, 30  # seconds of work; seconds of waiting, on a machine that others use too
MOST_MEMORY = 2**30  # bytes
METHODS = ["best", "ensemble", "hl+", "crossfit"]
OPTIONS: dict[str, Any] = {"steps": 3, "each": {"crossfit": {"steps": 3, "folds": 2}}}
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 10**30, 1e308, float("nan"), float("inf"), "", "x", "x" * 100_000, "../../outside/file", "/",
    "\x1b[2J\u202e\ud800", [], [[]], {}, {"x": 1}, [None] * 1000, {"format": 2}, "hl+", "NaN", ["best"], 0.5, 2**63,
)  # fmt: skip


class SlowError(BaseException):
    """Not an Exception: nothing on the way may take it for an error of its own."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="stockpot-runs-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    began, outcomes, failures = time.monotonic(), Counter[str](), list[str]()
    try:
        honest = prepare(folder)
        for case in range(given.count):
            what, found = one(random.Random(f"{given.seed}.{case}"), folder, honest)
            outcomes[found.partition(":")[0]] += 1
            if not found.startswith(("refused", "done")):
                failures.append(f"case {case}: {what}: {found}")
                print(failures[-1], flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for found, count in outcomes.most_common():
        print(f"{count:6d}  {found}")
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - honest.memory
    if more > MOST_MEMORY:
        failures.append(f"{more / 2**20:.0f} MiB of memory")
    seconds = time.monotonic() - began
    print(f"{given.count} damaged runs, seed {given.seed}, {len(failures)} failures in {seconds:.0f} s")
    sys.exit(1 if failures else 0)


class Honest:
    """Two runs to damage, one finished and one interrupted, and what lies outside of them."""

    def __init__(self, folder: Path) -> None:
        self.pool: Pool = zoo(folder / "pool", 3)[0]
        self.runs = [folder / "finished", folder / "interrupted"]
        self.outside = folder / "outside"
        (self.outside / "folder" / "best").mkdir(parents=True)
        for name in ("file", "folder/x.json", "folder/result.json", "folder/best/result.json", "folder/soup.json"):
            (self.outside / name).write_text("what only the user has")
        compare(self.pool, task(), METHODS, run=self.runs[0], **OPTIONS)

        def stop(event: Event) -> None:
            if event.kind == "held_out" and event.data["step"] > 1:
                raise KeyboardInterrupt

        try:
            compare(self.pool, task(), METHODS, run=self.runs[1], listen=stop, **OPTIONS)
        except KeyboardInterrupt:
            assert list(self.runs[1].rglob("state.safetensors"))
        page_of(Run(self.runs[0]))  # what drawing loads, it loads once
        self.memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.before = snapshot(self.outside)


def task() -> Task:
    return Task(mlp(), samples(), {"test": samples(30, seed=5), "shifted": samples(20, seed=6)})


def prepare(folder: Path) -> Honest:
    import stockpot.run.state

    stockpot.run.state.INTERVAL = 0.0
    return Honest(folder)


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of the last reading and writing."""
    found = {}
    for path in sorted(folder.rglob("*")):
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        found[str(path)] = (digest, path.stat().st_mtime_ns)
    return found


def one(rng: random.Random, folder: Path, honest: Honest) -> tuple[str, str]:
    """(what was done, what happened)."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(rng.choice(honest.runs), run)
    done = [damage(run, honest.outside, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
    name, command = rng.choice(COMMANDS)
    what = f"{name} after {done}"

    def late(number: int, frame: FrameType | None) -> None:
        raise SlowError

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    began = time.process_time()
    try:
        command(run, honest)
        found = f"done, {name}"
    except StockpotError as error:
        words = str(error)
        found = f"refused, {name}" if words and "unexpected" not in words.lower() else f"bad words: {words}"
    except SlowError:
        found = f"slow: waited {LONGEST} s"
    except BaseException as error:
        import traceback

        found = f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    finally:
        signal.alarm(0)
    if time.process_time() - began > SLOWEST:
        found = f"slow: {time.process_time() - began:.1f} s of work"
    if snapshot(honest.outside) != honest.before:
        found = "outside: something was written, created or deleted"
    return what, found


def _report(run: Path, honest: Honest) -> None:
    Run(run)


def _page(run: Path, honest: Honest) -> None:
    page_of(Run(run))


def _rebuild(run: Path, honest: Honest) -> None:
    recommended_soup(run)
    rebuild_soup(run, ingredients=[checkpoint.path for checkpoint in honest.pool.checkpoints])


def _continue(run: Path, honest: Honest) -> None:
    compare(honest.pool, task(), METHODS, run=run, **OPTIONS)


def _overwrite(run: Path, honest: Honest) -> None:
    compare(honest.pool, task(), ["best"], run=run, overwrite=True)


COMMANDS: list[tuple[str, Callable[[Path, Honest], None]]] = [
    *[("read", _report)] * 4,
    ("report", _page),
    *[("rebuild", _rebuild)] * 2,
    *[("continue", _continue)] * 4,
    ("overwrite", _overwrite),
]


def damage(run: Path, outside: Path, rng: random.Random) -> str:
    """One change of the kind a stranger or a broken disk makes; in words."""
    entries = sorted(path for path in run.rglob("*") if not path.is_symlink() and (path.is_dir() or path.is_file()))
    documents = [path for path in entries if path.suffix == ".json" and path.is_file()]
    kind = rng.choice(("value", "value", "value", "value", "bytes", "bytes", "special", "special"))
    if kind == "value" and documents:
        path = rng.choice(documents)
        try:
            document = json.loads(path.read_text())
        except (ValueError, RecursionError):
            return "nothing"
        place, odd = mutate(document, rng)
        path.write_text(json.dumps(document), errors="surrogatepass")
        return f"{path.relative_to(run)}: {place} = {str(odd)[:40]!r}"
    files = [path for path in entries if path.is_file()]
    if kind == "bytes" and files:
        path = rng.choice(files)
        path.write_bytes(spoilt(path.read_bytes(), rng))
        return f"{path.relative_to(run)}: bytes"
    path = rng.choice(entries)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    how = rng.choice(("link to a file", "link to a folder", "link to nothing", "FIFO", "folder", "gone", "device"))
    if how.startswith("link"):
        target = {"file": "file", "folder": "folder", "nothing": "nothing"}[how.split()[-1]]
        path.symlink_to(outside / target)
    elif how == "FIFO":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "device":
        path.symlink_to("/dev/zero")
    return f"{path.relative_to(run)}: {how}"


def mutate(document: Any, rng: random.Random) -> tuple[str, Any]:
    """Change one value somewhere inside, in place."""
    place, inner = "", document
    while True:
        if not isinstance(inner, (dict, list)) or not inner:
            return place, "nothing"
        key = rng.choice(list(inner)) if isinstance(inner, dict) else rng.randrange(len(inner))
        place += f".{key}"
        child = inner[key]
        if isinstance(child, (dict, list)) and child and rng.random() < 0.7:
            inner = child
            continue
        what = rng.random()
        odd: Any = rng.choice(ODD)
        if what < 0.15:
            del inner[key]
            odd = "deleted"
        elif what < 0.25 and isinstance(inner, dict):
            inner["new"] = odd
        elif what < 0.35 and isinstance(inner, list):
            inner.extend([child] * rng.choice((1, 1000)))
        else:
            inner[key] = odd
        return place, odd


def spoilt(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    how = rng.randrange(5)
    if how == 0 or not data:
        return bytes(data[: rng.randrange(len(data) + 1)])
    if how == 1:
        return bytes(data) + rng.randbytes(rng.choice((1, 100, 100_000)))
    if how == 2:
        return b"[" * 100_000 + bytes(data)
    if how == 3:
        data[:8] = rng.randbytes(8)  # of a safetensors file: the length of its header
        return bytes(data)
    for _ in range(rng.choice((1, 3, 30))):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


if __name__ == "__main__":
    main()

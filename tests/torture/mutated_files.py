"""Opens thousands of damaged checkpoints: `python -m torture.mutated_files --count 20000 --seed 0`.

Each either raises an error of ours or holds exactly what an independent decoder finds in its bytes. Anything
else, a crash, a wait of more than 5 seconds or a process of more than 1 GB beyond its start is a failure; the
exit code is then 1.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

from stockpot.errors import StockpotError
from stockpot.pool import open_checkpoint
from stockpot.pool.source import dtype_name
from torture.decoders import Tensors
from torture.mutations import Original, damage, originals

SLOWEST = 5.0  # seconds
MOST_MEMORY = 2**30  # bytes
_SILENT = f"no answer within {SLOWEST:g} s"
_BATCH = 200
_ADDRESSES = 16 * 2**30  # of virtual memory; keeps the machine alive when something goes wrong

REFUSED, WHOLE, AS_ITS_BYTES = "refused", "opened, the original's tensors", "opened, as its bytes say"


class WrongError(Exception):
    """A file was opened and does not hold what its bytes say."""


def judge(original: Original, path: Path, honest: Tensors) -> str:
    """What happened to a damaged copy."""
    try:
        checkpoint = open_checkpoint(path)
        found: Tensors = {}
        for name, spec in checkpoint.specs.items():
            tensor = checkpoint.tensor(name)
            if (tensor.dtype, tuple(tensor.shape)) != (spec.dtype, spec.shape):
                raise WrongError(f"{name}: {tensor.dtype} {tuple(tensor.shape)}, announced as {spec}")
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            found[name] = (dtype_name(spec.dtype), spec.shape, raw)
    except StockpotError as error:
        if "weights_only" in str(error) or not str(error):
            raise WrongError(f"bad words: {error}") from error
        return REFUSED
    if found == honest:
        return WHOLE
    try:
        said = original.read(path, checkpoint.key)
    except Exception as error:
        raise WrongError(f"opened, but a decoder cannot: {type(error).__name__}: {error}") from error
    if found != said:
        names = [name for name in {*found, *said} if found.get(name) != said.get(name)]
        raise WrongError(f"other tensors than its bytes say: {names[:5]}")
    return AS_ITS_BYTES


def one(case: int, seed: int, pool: list[Original], honest: dict[str, Tensors], room: Path) -> tuple[str, str]:
    """(what was done, what happened)."""
    rng = random.Random(f"{seed}.{case}")
    original = pool[case % len(pool)]
    path, what = damage(original, room, rng)
    try:
        return what, judge(original, path, honest[original.name])
    finally:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _work(cases: range, seed: int, pool: list[Original], honest: dict[str, Tensors], room: Path, out: int) -> None:
    """In a process of its own: one line per case, before and after, so that the parent knows where it died."""
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    start = _peak()
    for case in cases:
        os.write(out, f"start\t{case}\n".encode())
        try:
            what, happened = one(case, seed, pool, honest, room)
        except WrongError as error:
            what, happened = str(error), "FAILED"
        except BaseException as error:
            what, happened = f"{type(error).__name__}: {error}", "FAILED"
        if _peak() - start > MOST_MEMORY:
            what, happened = f"memory grew by {_peak() - start:,} bytes", "FAILED"
            start = _peak()
        what = what.replace("\n", " ").replace("\t", " ")[:300]
        os.write(out, f"end\t{case}\t{happened}\t{what}\n".encode("utf-8", "replace"))


def _batch(
    cases: range, seed: int, pool: list[Original], honest: dict[str, Tensors], folder: Path
) -> Iterator[tuple[int, str, str]]:
    """(case, what happened, what was done); a process that dies or waits is a failure of its case."""
    rest = cases
    again: int | None = None  # a case that is tried a second time, because the machine may have been busy
    while rest:
        room = Path(tempfile.mkdtemp(dir=folder))
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.close(reader)
                _work(rest, seed, pool, honest, room, writer)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        last = rest.start - 1
        ended = False
        trouble = "the process died"
        buffer = b""
        while not ended:
            ready, _, _ = select.select([reader], [], [], SLOWEST)
            if not ready:
                trouble = _SILENT
                os.kill(child, signal.SIGKILL)
                break
            content = os.read(reader, 65536)
            ended = not content
            buffer += content
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                kind, number, *told = line.decode("utf-8", "replace").split("\t")
                if kind == "end":
                    last = int(number)
                    yield last, told[0], told[1]
        os.close(reader)
        _, status = os.waitpid(child, 0)
        shutil.rmtree(room, ignore_errors=True)
        if last + 1 >= rest.stop and status == 0:
            return
        if trouble == _SILENT and again != last + 1:
            again = last + 1
            rest = range(last + 1, rest.stop)
            continue
        if last + 1 < rest.stop:
            yield last + 1, "FAILED", f"{trouble} (status {status})"
        rest = range(last + 2, rest.stop)


def run(count: int, seed: int, first: int = 0) -> tuple[Counter[tuple[str, str]], list[tuple[int, str]]]:
    """Counts by (file, what happened), and the failures."""
    counts: Counter[tuple[str, str]] = Counter()
    failures: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(prefix="mutated-") as place:
        folder = Path(place)
        pool = originals(folder / "originals")
        honest = {original.name: original.read(original.path, original.key) for original in pool if original.openable}
        honest |= {original.name: {} for original in pool if not original.openable}
        for original in pool:  # the decoders and the package agree on what is not damaged
            expected = WHOLE if original.openable else REFUSED
            assert judge(original, original.path, honest[original.name]) == expected, original.name
        for start in range(first, first + count, _BATCH):
            cases = range(start, min(start + _BATCH, first + count))
            for case, happened, what in _batch(cases, seed, pool, honest, folder):
                counts[pool[case % len(pool)].name, happened] += 1
                if happened == "FAILED":
                    failures.append((case, what))
    return counts, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    counts, failures = run(given.count, given.seed, given.first)
    for (name, happened), count in sorted(counts.items()):
        print(f"{name:22} {happened:32} {count:7,}")
    for case, what in failures[:50]:
        print(f"case {case}: {what}")
    total = sum(counts.values())
    print(f"{total:,} damaged files, seed {given.seed}, {len(failures)} failures, {time.monotonic() - began:.0f} s")
    return 1 if failures or total != given.count else 0


if __name__ == "__main__":
    sys.exit(main())

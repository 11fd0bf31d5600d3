"""Several runs of `stockpot compare` at once, each in its own process with its own log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stockpot import atomic
from stockpot.errors import StockpotError
from studies.plans import Planned
from studies.zoo import Zoo

Say = Callable[[str], None]


@dataclass
class _Process:
    run: Planned
    process: subprocess.Popen[bytes]
    log: TextIO
    began: float


def finished(zoo: Zoo, run: Planned) -> bool:
    """Done with these very settings; a run in which a method failed is tried again."""
    folder = zoo.runs / run.name
    about, results = _json(folder / "run.json"), _json(folder / "results.json")
    if about.get("status") != "done" or results.get("failed"):
        return False
    try:
        return bool(about.get("recipe_digest") == zoo.recipe(run.overrides(zoo)).digest())
    except StockpotError:
        return False  # told when its turn comes


def command(zoo: Zoo, run: Planned, python: Sequence[str]) -> list[str]:
    """Relative to the folder above the zoos, so that a record names no machine's paths."""
    above = zoo.home.parent
    words = [*python, "-m", "stockpot", "compare", zoo.recipe_file.relative_to(above).as_posix()]
    for pair in [*zoo.common, *run.overrides(zoo)]:
        words += ["--set", pair]
    return [*words, "--out", (zoo.runs / run.name).relative_to(above).as_posix()]


def run_all(
    zoo: Zoo,
    todo: Sequence[Planned],
    *,
    jobs: int,
    python: Sequence[str],
    say: Say,
    limit: float | None = None,
) -> list[str]:
    """Names of the runs that failed or were stopped. One that fails does not stop the others."""
    waiting, running = list(todo), list[_Process]()
    failed: list[str] = []
    end = None if limit is None else time.monotonic() + limit
    zoo.runs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while len(running) < jobs and (run := _next(waiting, running)) is not None:
                waiting.remove(run)
                try:
                    running.append(_start(zoo, run, python, jobs))
                except StockpotError as error:
                    failed.append(run.name)
                    say(f"{run.name}: failed before it began: {error}")
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                one.log.close()
                if not _tell(zoo, one, say):
                    failed.append(one.run.name)
            if end is not None and time.monotonic() > end:
                say(f"stopped after {limit:.0f} s; the same command continues")
                failed += [one.run.name for one in running] + [run.name for run in waiting]
                break
            time.sleep(0.1)
    finally:
        _stop(running)
    return failed


def _next(waiting: Sequence[Planned], running: Sequence[_Process]) -> Planned | None:
    """The first that need not wait for another one."""
    busy = {run.name for run in waiting} | {one.run.name for one in running}
    return next((run for run in waiting if run.after is None or run.after not in busy), None)


def _start(zoo: Zoo, run: Planned, python: Sequence[str], jobs: int) -> _Process:
    words = command(zoo, run, python)
    log = (zoo.runs / f"{run.name}.log").open("a", encoding="utf-8")
    log.write(f"$ {' '.join(words)}\n")
    log.flush()
    # How many shared the machine (times are to be read with it), and what a run's own record does not say.
    beside = {"jobs": jobs, "trial_seconds": zoo.trial_seconds()}
    atomic.write_json(zoo.runs / f"{run.name}.json", beside)
    environment = {**os.environ}
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(
            str(Path(part).resolve()) for part in path.split(os.pathsep)
        )
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))
    process = subprocess.Popen(
        words, cwd=zoo.home.parent, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    return _Process(run, process, log, time.monotonic())


def _tell(zoo: Zoo, one: _Process, say: Say) -> bool:
    seconds = time.monotonic() - one.began
    folder = zoo.runs / one.run.name
    lost = _json(folder / "results.json").get("failed") or {}
    if one.process.returncode == 0 and not lost:
        say(f"{one.run.name}: {seconds:.0f} s")
        return True
    why = "; ".join(f"{method}: {text.splitlines()[0]}" for method, text in lost.items()) or _last(folder)
    say(f"{one.run.name}: failed after {seconds:.0f} s: {why}")
    return False


def _last(folder: Path) -> str:
    """What the log says went wrong: from the error on, or the last line."""
    lines = folder.with_name(f"{folder.name}.log").read_text("utf-8", errors="replace").splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("error:")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[start:])


def _stop(running: Sequence[_Process]) -> None:
    """As Ctrl-C would: a run saves its state and can be continued."""
    for one in running:
        one.process.send_signal(signal.SIGINT)
    for one in running:
        try:
            one.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
        one.log.close()


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}

"""Several runs of `stockpot compare` at once, of one zoo or of several, each a process with its own log."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from stockpot import files
from stockpot.errors import StockpotError
from studies.plans import Planned, plan, ranked
from studies.zoo import Zoo, read_object

Say = Callable[[str], None]
PRETRAINING, POOL = "pretraining", "pool"
PROCESSES = 8  # that fine-tune one pool at once; they fill a GPU
MISSING = {PRETRAINING: "its pre-training failed", POOL: "its pool is not complete"}


@dataclass(frozen=True)
class Job:
    """A run of a zoo; without one, what all its runs wait for: its pre-training, or the fine-tuning of its pool."""

    zoo: Zoo
    run: Planned | None
    stage: str = POOL

    @property
    def name(self) -> str:
        return self.stage if self.run is None else self.run.name

    @property
    def key(self) -> tuple[str, str]:
        return self.zoo.name, self.name

    @property
    def needs(self) -> tuple[str, str]:
        """The job that must be over first, where it is to be done at all."""
        first = PRETRAINING if self.run is None and self.stage == POOL else POOL
        return self.zoo.name, first

    def waits(self, ahead: set[tuple[str, str]], at_work: set[tuple[str, str]]) -> bool:
        """For one of those that have not begun, or for one that has."""
        if self.run is None and self.stage == PRETRAINING:
            return False
        if self.needs in ahead | at_work:
            return True
        if self.run is None or self.run.after is None:
            return False
        # Scores come early in a run; nobody need wait for the rest of it.
        before = (self.zoo.name, self.run.after)
        return before in ahead or (before in at_work and not ranked(self.zoo))


@dataclass
class _Process:
    job: Job
    processes: list[subprocess.Popen[bytes]]  # one; for a pool several of the same command, which share its trials
    log: TextIO
    began: float


def finished(zoo: Zoo, run: Planned) -> bool:
    """Done with these very settings and as many models; a run in which a method failed is tried again."""
    folder = zoo.runs / run.name
    about, results = read_object(folder / "run.json"), read_object(folder / "results.json")
    if about.get("status") != "done" or results.get("failed"):
        return False
    if len(read_object(folder / "pool.json").get("ingredients") or ()) != run.models(zoo):
        return False
    try:
        return bool(about.get("recipe_digest") == zoo.recipe(run.overrides(zoo)).digest())
    except StockpotError:
        return False  # told when its turn comes


def command(zoo: Zoo, run: Planned, python: Sequence[str]) -> list[str]:
    """Relative to the folder above the zoos, so that a record names no machine's paths."""
    words = _words(zoo, "compare", run.overrides(zoo), python)
    return [*words, "--out", (zoo.runs / run.name).relative_to(zoo.home.parent).as_posix()]


def finetuning(zoo: Zoo, python: Sequence[str]) -> list[str]:
    return _words(zoo, "finetune", [], python)


def making(zoos: Sequence[Zoo]) -> list[Job]:
    """What has to be done before a zoo's runs. The longest first: pre-training, which its fine-tuning waits for."""
    before = [Job(zoo, None, PRETRAINING) for zoo in zoos if zoo.pretraining is not None]
    return [*before, *(Job(zoo, None) for zoo in zoos)]


def _words(zoo: Zoo, verb: str, overrides: Sequence[str], python: Sequence[str]) -> list[str]:
    words = [*python, "-m", "stockpot", verb, zoo.recipe_file.relative_to(zoo.home.parent).as_posix()]
    for pair in [*zoo.common, *overrides]:
        words += ["--set", pair]
    return words


def run_all(
    todo: Sequence[Job], *, jobs: int, python: Sequence[str], say: Say, limit: float | None = None
) -> list[str]:
    """Names of the jobs that failed or were stopped. One that fails does not stop the others."""
    waiting, running = list(todo), list[_Process]()
    several = len({job.zoo.name for job in todo}) > 1
    failed: list[str] = []
    end = None if limit is None else time.monotonic() + limit

    def title(job: Job) -> str:
        return f"{job.zoo.name} {job.name}" if several else job.name

    try:
        while waiting or running:
            while len(running) < jobs and (job := _next(waiting, running)) is not None:
                waiting.remove(job)
                try:
                    running.append(_start(job, python, jobs))
                except StockpotError as error:
                    failed.append(title(job))
                    say(f"{title(job)}: failed before it began: {error}")
            for one in [one for one in running if all(p.poll() is not None for p in one.processes)]:
                running.remove(one)
                one.log.close()
                text, good = _told(one)
                say(f"{title(one.job)}: {text}")
                if not good:
                    failed.append(title(one.job))
                if one.job.name == POOL or (one.job.name == PRETRAINING and not good):
                    waiting, gone = _after_pool(waiting, one.job.zoo, good)
                    missing = f"not begun, because {MISSING[one.job.name]}"
                    for job in gone:
                        say(f"{title(job)}: {'left out, this pool has nothing for it' if good else missing}")
                    failed += [] if good else [title(job) for job in gone]
            if end is not None and time.monotonic() > end:
                say(f"stopped after {limit:.0f} s; the same command continues")
                failed += [title(one.job) for one in running] + [title(job) for job in waiting]
                break
            time.sleep(0.1)
    finally:
        _stop(running)
    return failed


def _next(waiting: Sequence[Job], running: Sequence[_Process]) -> Job | None:
    """The first that need not wait for another one."""
    ahead, at_work = {job.key for job in waiting}, {one.job.key for one in running}
    return next((job for job in waiting if not job.waits(ahead, at_work)), None)


def _after_pool(waiting: Sequence[Job], zoo: Zoo, made: bool) -> tuple[list[Job], list[Job]]:
    """What is still to do, knowing the checkpoints there are now, and what falls away of this zoo."""
    kept: dict[tuple[str, str], Job] = {}
    if made:
        zoo = Zoo.open(zoo.home, zoo.name, zoo.common)
        # Before, nobody could know that it has no BatchNorm, say.
        planned = {run.name for run in plan(zoo)}
        runs = [job.run for job in waiting if job.zoo.name == zoo.name and job.run is not None]
        jobs = [Job(zoo, run) for run in runs if run.name in planned]
        kept = {job.key: job for job in jobs}
    left = [kept.get(job.key, job) for job in waiting if job.zoo.name != zoo.name or job.key in kept]
    return left, [job for job in waiting if job.zoo.name == zoo.name and job.key not in kept]


def _start(job: Job, python: Sequence[str], jobs: int) -> _Process:
    zoo = job.zoo
    if job.run is not None:
        words = command(zoo, job.run, python)
    elif job.stage == POOL:
        words = finetuning(zoo, python)
    else:
        assert zoo.pretraining is not None
        words = [*python, zoo.pretraining.relative_to(zoo.home.parent).as_posix()]
    zoo.runs.mkdir(parents=True, exist_ok=True)
    log = (zoo.runs / f"{job.name}.log").open("a", encoding="utf-8")
    log.write(f"$ {' '.join(words)}\n")
    log.flush()
    cores = os.cpu_count() or 1
    count = min(PROCESSES, cores) if job.name == POOL else 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // (jobs if job.run is not None else count))), **os.environ}
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(part).resolve()) for part in path.split(os.pathsep))
    if job.run is not None:
        # How many shared the machine (times are to be read with it), and what a run's own record does not say.
        beside = {"jobs": jobs, "trial_seconds": zoo.trial_seconds()}
        files.write_json(zoo.runs / f"{job.name}.json", beside)
    started = [
        subprocess.Popen(words, cwd=zoo.home.parent, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        for _ in range(count)
    ]
    return _Process(job, started, log, time.monotonic())


def _told(one: _Process) -> tuple[str, bool]:
    """What is said of a job that has ended, and whether it did what it should."""
    seconds = time.monotonic() - one.began
    folder = one.job.zoo.runs / one.job.name
    lost = read_object(folder / "results.json").get("failed") or {}
    # Of processes that share trials each ends when all trials are done, so one that says so is enough.
    if any(process.returncode == 0 for process in one.processes) and not lost:
        return f"{seconds:.0f} s", True
    why = "; ".join(f"{method}: {text.splitlines()[0]}" for method, text in lost.items()) or _last(folder)
    return f"failed after {seconds:.0f} s: {why}", False


def _last(folder: Path) -> str:
    """What the log says went wrong: from the error on, or the last line."""
    lines = folder.with_name(f"{folder.name}.log").read_text("utf-8", errors="replace").splitlines()
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("error:")), len(lines) - 1)
    return " ".join(line.strip() for line in lines[start:])


def _stop(running: Sequence[_Process]) -> None:
    """As Ctrl-C would: a run saves its state and can be continued."""
    for one in running:
        for process in one.processes:
            process.send_signal(signal.SIGINT)
    for one in running:
        for process in one.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        one.log.close()

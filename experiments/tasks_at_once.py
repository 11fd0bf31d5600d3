"""All steps of lm-llama (both pools) or imdb-lora on one GPU, several processes at once, after fetch.py.

    python experiments/tasks_at_once.py lm-llama
    python experiments/tasks_at_once.py imdb-lora --seconds 300     # whatever is running then is stopped

A seed's scores lie in experiments/runs as soon as it has them, what was printed in experiments/runs/logs. What is asked
first is cooked first: best, uniform, greedy and the default; the other methods follow. Called again, it begins with the
cooking where the pools are there. Six processes share a GPU better after `nvidia-cuda-mps-control -d`: both pools of
lm-llama took 12 minutes on an H200, imdb-lora 7 beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

HOME = Path(__file__).resolve().parent
FIRST, THEN = ("best", "uniform", "greedy", "crossfit"), ("hl+", "learned+", "mehl+")
DONE = "finished"  # an empty file in a pool's folder


class Steps:
    """Starts scripts beside this one, each with a log of its own, until time is up."""

    def __init__(self, seconds: float, runs: Path) -> None:
        self.began, self.end, self.logs, self.failed = time.monotonic(), time.monotonic() + seconds, runs / "logs", 0
        self.logs.mkdir(parents=True, exist_ok=True)

    def run(self, name: str, script: str, *words: str) -> bool:
        began, log = time.monotonic(), self.logs / f"{name}.txt"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        environment.setdefault("OMP_NUM_THREADS", "2")
        environment["PYTHONPATH"] = os.pathsep.join([str(HOME.parent / "src"), environment.get("PYTHONPATH", "")])
        with log.open("wb") as file:
            command = [sys.executable, str(HOME / script), *words]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
            try:
                code = process.wait(max(1.0, self.end - began))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
        self.failed += code != 0
        last = log.read_text("utf-8", "replace").strip().splitlines()[-1:]
        now = time.monotonic()
        print(f"{now - self.began:5.0f} s  {name}: exit {code} after {now - began:.0f} s  {last}", flush=True)
        return code == 0


def at_once(jobs: Sequence[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def make(steps: Steps, pool: Path, name: str, script: str, *words: str) -> bool:
    """A pool, unless it is finished."""
    if (pool / DONE).is_file():
        return True
    if not steps.run(name, script, *words):
        return False
    (pool / DONE).touch()
    return True


def cook(steps: Steps, zoo: str, pool: str, chosen: argparse.Namespace, *words: str) -> None:
    """Every seed in a process of its own: what is asked first, then the other methods."""
    each = {name: json.loads(chosen.settings) for name in ("crossfit", *THEN)}
    common = ["cook", zoo, "--pool", pool, "--runs", str(chosen.runs), "--report", chosen.report, "--name", chosen.name]
    common += ["--each", json.dumps(each), "--sizes", chosen.sizes]
    common += ["--commit", chosen.commit] if chosen.commit else []

    def one(seed: int) -> None:
        for part, methods in (("first", FIRST), ("then", THEN if pool in chosen.then else ())):
            if not methods:
                continue
            own = [*common, "--seed", str(seed), "--methods", *methods]
            name = f"{zoo}-{pool}-{chosen.name}-{seed}-{part}"
            if not steps.run(name, "tasks.py", *own, *words) and words:
                steps.run(f"{name}-plain", "tasks.py", *own)

    at_once([lambda seed=seed: one(seed) for seed in chosen.seeds])  # type: ignore[misc]


def language_model(steps: Steps, chosen: argparse.Namespace) -> None:
    train, data = "lm-llama/train.py", HOME / "data" / "lm-llama"
    compiled, small = ["--compiled"] * chosen.compiled, ["--small"] * (chosen.sizes != "{}")
    begin = ("pretrain", "--epochs", str(chosen.epochs), *small, *compiled)
    if not make(steps, data, "pretrain", train, *begin):
        return
    trials = ["--trials", str(chosen.trials)] if chosen.trials else []

    def full() -> None:
        if make(steps, data / "pool", "finetune", train, "finetune", *trials, *small, *compiled):
            cook(steps, "lm-llama", "pool", chosen, *compiled)

    def factors() -> None:
        if make(steps, data / "adapters", "adapters", train, "adapters", *trials, *small):
            cook(steps, "lm-llama", "adapters", chosen)

    at_once([full, factors])


def classifier(steps: Steps, chosen: argparse.Namespace) -> None:
    train, data = "imdb-lora/train.py", HOME / "data" / "imdb-lora"
    trials = ["--trials", str(chosen.trials)] if chosen.trials else []
    if make(steps, data, "head", train, "head") and make(
        steps, data / "adapters", "adapters", train, "adapters", *trials
    ):
        cook(steps, "imdb-lora", "pool", chosen)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("zoo", choices=("lm-llama", "imdb-lora"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--report", default="test", choices=("dev", "test"))
    parser.add_argument("--name", default="main", help="of the runs")
    parser.add_argument("--epochs", type=float, default=3.0, help="of pre-training")
    parser.add_argument("--settings", default="{}", metavar="JSON", help='of all learned methods: {"batch_size": 64}')
    parser.add_argument("--then", nargs="*", default=["pool", "adapters"], help="pools for the other methods too")
    parser.add_argument("--compiled", action="store_true", help="lm-llama's layers, by torch.compile; not its adapters")
    parser.add_argument("--commit", help="where there is no repository")
    parser.add_argument("--trials", type=int, help="fewer, for a trial")
    parser.add_argument("--sizes", default="{}", metavar="JSON", help="for a trial: of a smaller language model")
    parser.add_argument("--runs", type=Path, default=HOME / "runs")
    chosen = parser.parse_args(given)
    steps = Steps(chosen.seconds, chosen.runs)
    (language_model if chosen.zoo == "lm-llama" else classifier)(steps, chosen)
    return 1 if steps.failed else 0


if __name__ == "__main__":
    sys.exit(main())

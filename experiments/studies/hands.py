"""Processes that make one run after the other.

On a GPU the start of a run can take longer than the run: imports, and kernels that libraries compile for every shape
they meet. A hand pays for that once. What a run finds does not depend on it; what it says of the host's memory does,
for a process keeps some of what its earlier runs needed.

`python -m studies.hands` is such a process: it reads errands from its standard input, a line of JSON each, and answers
each with the exit code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class Hand:
    """One such process, seen from outside; while it is at work it can be asked what a `Popen` can."""

    def __init__(self, python: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        # Where this package lies, so that the process finds it from any folder.
        paths = [str(Path(__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [*python, "-m", "studies.hands"],
            cwd=cwd,
            env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.returncode: int | None = 0  # of the last errand; None: at work

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, words: Sequence[str], log: Path) -> None:
        """`words` as after `python -m`."""
        assert self.returncode is not None, "it is at work"
        self.returncode = None
        self._pipe("stdin").write(json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n")
        self._pipe("stdin").flush()

    def poll(self) -> int | None:
        if self.returncode is None:
            ended = self._process.poll()  # asked first: an answer may be its last deed
            answers = self._pipe("stdout")
            line = answers.readline() if select.select([answers], [], [], 0)[0] else b""
            if line:
                self.returncode = int(line)
            elif ended is not None:  # without an answer, whoever may still hold its pipe
                self.returncode = ended or 1
        return self.returncode

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self, timeout: float | None = None) -> int:
        """For the errand, after which there is no other."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe("stdin").close()
        self._process.wait(timeout)
        answers = self._pipe("stdout")
        if not answers.closed:
            self.poll()
            answers.close()
        return self.returncode or 0

    def kill(self) -> None:
        self._process.kill()

    def end(self, patience: float = 20) -> None:
        """There is no further errand."""
        try:
            self.wait(patience)
        except subprocess.TimeoutExpired:  # a thread that an errand left behind
            self.kill()
            self.wait()

    def _pipe(self, name: str) -> IO[bytes]:
        pipe = getattr(self._process, name)
        assert pipe is not None
        return pipe  # type: ignore[no-any-return]


class Crew:
    """Starts processes, and where they are to be kept gives those that are idle further work."""

    def __init__(self, python: Sequence[str], keep: bool) -> None:
        self._python, self._keep = python, keep
        self._idle: list[Hand] = []

    def start(
        self,
        words: Sequence[str],  # of the command, which is `PYTHON -m MODULE ...` unless it is to be `alone`
        folder: Path,
        environment: Mapping[str, str],
        log: IO[str],
        *,
        alone: bool,
    ) -> subprocess.Popen[bytes] | Hand:
        if alone or not self._keep:
            return subprocess.Popen(
                words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        errand, place = words[len(self._python) + 1 :], Path(log.name).resolve()
        while self._idle:
            hand = self._idle.pop()
            try:
                hand.begin(errand, place)
                return hand
            except BrokenPipeError:
                hand.end()  # it died while it had nothing to do
        hand = Hand(self._python, folder, environment)
        hand.begin(errand, place)
        return hand

    def take_back(self, process: subprocess.Popen[bytes] | Hand) -> None:
        """A process whose run failed may have been spoilt by it, as by an error of the GPU."""
        if isinstance(process, Hand):
            if process.alive and process.returncode == 0:
                self._idle.append(process)
            else:
                process.end()

    def dismiss(self) -> None:
        for hand in self._idle:
            hand.end()
        self._idle = []


def main() -> None:
    # Also where whoever started all this ignores it, as `nohup` in the background does: it is how runs are stopped.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    answers, errands = os.fdopen(os.dup(1), "w"), os.fdopen(os.dup(0))
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # an errand that asks for input gets none
    try:
        for line in errands:
            errand = json.loads(line)
            answers.write(f"{_done(errand)}\n")
            answers.flush()
    except KeyboardInterrupt:
        pass  # between two errands: there is nothing to save


def _done(errand: Mapping[str, Any]) -> int:
    """The exit code."""
    with Path(errand["log"]).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    name, *arguments = errand["words"]
    before, sys.argv = sys.argv, [name, *arguments]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.argv = before
        sys.stdout.flush()
        sys.stderr.flush()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        _clear()
    if code is None or isinstance(code, int):
        return int(code or 0)
    print(code, file=sys.stderr, flush=True)
    return 1


def _clear() -> None:
    """Memory that the next run, or another process, can use."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

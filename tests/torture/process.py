"""A command in a process of its own, forked from one that has everything loaded: torch takes seconds to import."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torture.faults import PHASES, Fault

LIMIT = 180.0  # seconds after which a command counts as hanging


def warm_up() -> None:
    """Load what commands load, before the first fork; one thread, because others do not survive one."""
    import torch

    torch.set_num_threads(1)
    import stockpot.cooking
    import stockpot.recipe.build
    import stockpot.report.page
    import stockpot.run.rebuild
    import stockpot.zoo.demo  # noqa: F401


class Board:
    """Numbers a process writes that outlive it: its phase, its calls so far, how often it was in each phase."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * (2 + len(PHASES)))

    def _get(self, place: int) -> int:
        return int(struct.unpack_from("q", self._memory, 8 * place)[0])

    def _set(self, place: int, value: int) -> None:
        struct.pack_into("q", self._memory, 8 * place, value)

    def set_phase(self, value: int) -> None:
        self._set(0, value)

    def set_calls(self, value: int) -> None:
        self._set(1, value)

    def enter(self, phase: int) -> int:
        times = self._get(2 + phase) + 1
        self._set(2 + phase, times)
        return times

    @property
    def phase(self) -> str:
        return PHASES[self._get(0)]

    @property
    def calls(self) -> int:
        return self._get(1)

    @property
    def entries(self) -> dict[int, int]:
        """Phase -> how often it was entered."""
        return {phase: times for phase in range(len(PHASES)) if (times := self._get(2 + phase))}


class Command:
    """Started at once, in a process group of its own."""

    def __init__(
        self,
        arguments: list[str],
        folder: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        **fault: object,
    ) -> None:
        self.board = Board()
        self.log = log
        self.began = time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                os.environ.update(environment or {})
                self._become(arguments, folder, fault)
            finally:
                os._exit(70)  # never back into the torturer
        with contextlib.suppress(OSError):  # by both: whoever comes first
            os.setpgid(self.pid, self.pid)
        self.status: int | None = None

    def _become(self, arguments: list[str], folder: Path, fault: dict[str, object]) -> None:
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(handle, stream)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # do not outlive the torturer
        os.chdir(folder)
        board = self.board
        Fault(board.set_phase, board.enter, board.set_calls, **fault).install()  # type: ignore[arg-type]
        from stockpot.cli.app import app

        sys.argv = ["stockpot", *arguments]
        code = 1
        try:
            app(arguments, prog_name="stockpot")
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            import traceback

            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> bool:
        """Whether it has ended."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def wait(self, seconds: float = LIMIT) -> bool:
        """Whether it ended within that time."""
        deadline = time.monotonic() + seconds
        while not self.poll():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.001)
        return True

    def kill(self) -> None:
        """SIGKILL to it and its children."""
        if not self.poll():
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.status = signal.SIGKILL

    @property
    def killed(self) -> bool:
        return self.status is not None and os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == 9

    @property
    def code(self) -> int | None:
        return os.waitstatus_to_exitcode(self.status) if self.status is not None else None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

"""What a tortured process does to itself: notes its phase, saves often, dies or fails at the n-th system call."""

from __future__ import annotations

import errno
import functools
import importlib
import io
import os
import signal
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PHASES = (
    "starting",
    "reading ingredients",
    "describing the pool",
    "scoring ingredients",
    "steps",
    "block loads",
    "evaluation",
    "saves",
    "records",
    "report data",
    "writing the soup",
    "writing the report",
    "training",
    "writing a checkpoint",
    "joining other ranks",
)

# Where each phase is entered: module, object in it, name of the function.
_PLACES = (
    ("stockpot.pool.pool", "", "scan", "reading ingredients"),
    ("stockpot.run.record", "", "describe_pool", "describing the pool"),
    ("stockpot.soups.problem", "Problem", "individual", "scoring ingredients"),
    ("stockpot.soups.learn", "Learner", "run", "steps"),
    ("stockpot.engine.loader", "Loader", "load", "block loads"),
    ("stockpot.task.task", "Task", "score", "evaluation"),
    ("stockpot.run.state", "DiskStore", "save", "saves"),
    ("stockpot.run.record", "", "_write", "records"),
    ("stockpot.soups.result", "", "_report_scores", "report data"),
    ("stockpot.soup.soup", "Soup", "save", "writing the soup"),
    ("stockpot.report", "", "write_report", "writing the report"),
    ("stockpot.zoo.search", "", "train", "training"),
    ("stockpot.zoo.training", "", "train", "training"),
    ("stockpot.zoo.folder", "Saved", "save", "saves"),
    ("stockpot.zoo.search", "", "_write", "writing a checkpoint"),
    ("stockpot.ranks", "", "watched", "joining other ranks"),
)
# Calls that change the disk. `io.open` stands for what is then written to the file.
_CALLS = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "truncate", "chmod")
_SAVES = ("stockpot.zoo.folder", "stockpot.soup.adapter")


@dataclass
class Fault:
    """At call `at` (from 1; 0: never) die, or fail with `error`; `count` says how many calls there were."""

    tell_phase: Callable[[int], None]
    tell_entry: Callable[[int], int]
    tell_count: Callable[[int], None]
    at: int = 0
    entry: tuple[int, int, float] | None = None  # phase, which time it is entered, seconds from then to SIGKILL
    error: int | None = None  # None: SIGKILL
    lasting: bool = False  # every later call fails too, as on a full disk
    save_every: float = 0.0
    roomy: bool = False  # the check before the start finds room, whatever there is
    charts: bool = True  # False: the report's pages are a line each, which takes no time to draw
    count: int = 0

    def install(self) -> None:
        for module, owner, name, phase in _PLACES:
            self._follow(module, owner, name, PHASES.index(phase))
        _save_often(self.save_every)
        if not self.charts:
            _plain_pages()
        if self.roomy:
            _feign_room()
        for name in _CALLS:
            setattr(os, name, self._checked(getattr(os, name)))
        io.open = self._opening(io.open)
        for place in _SAVES:
            home: Any = importlib.import_module(place)
            home.save_file = self._checked(home.save_file)

    def _follow(self, module: str, owner: str, name: str, phase: int) -> None:
        home: Any = importlib.import_module(module)
        home = getattr(home, owner) if owner else home
        function = getattr(home, name)
        fault = self

        @functools.wraps(function)
        def followed(*args: Any, **options: Any) -> Any:
            before, fault.phase = fault.phase, phase
            fault.tell_phase(phase)
            fault._enter(phase)
            try:
                return function(*args, **options)
            finally:
                fault.phase = before
                fault.tell_phase(before)

        setattr(home, name, followed)

    phase: int = 0

    def _enter(self, phase: int) -> None:
        times = self.tell_entry(phase)
        if self.entry is not None and self.entry[:2] == (phase, times):
            timer = threading.Timer(self.entry[2], os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def _checked(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **options: Any) -> Any:
            removes = function.__name__ in ("unlink", "rmdir")
            self._maybe(removes)
            result = function(*args, **options)
            self._maybe(removes)  # the call has happened, and nothing after it has
            return result

        return checked

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def opening(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            opened = function(file, mode, *args, **options)
            if mode != "wb" or (isinstance(file, int) and not stat.S_ISREG(os.fstat(file).st_mode)):
                return opened
            write = opened.write

            def half(data: bytes) -> int:
                self.count += 1
                self.tell_count(self.count)
                if self._due():
                    write(data[: len(data) // 2])
                    opened.flush()
                    self._strike()
                return int(write(data))

            return _Wrapped(opened, half)

        return opening

    def _maybe(self, removes: bool) -> None:
        if removes and self.error is not None:
            return  # a full disk lets files go
        self.count += 1
        self.tell_count(self.count)
        if self._due():
            self._strike()

    def _due(self) -> bool:
        return self.at > 0 and (self.count == self.at or (self.lasting and self.count > self.at))

    def _strike(self) -> None:
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(self.error, os.strerror(self.error or errno.EIO))


class _Wrapped:
    """A file whose write is another one."""

    def __init__(self, file: Any, write: Callable[[bytes], int]) -> None:
        self._file = file
        self.write = write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _Wrapped:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _save_often(seconds: float) -> None:
    state: Any = importlib.import_module("stockpot.run.state")
    state.INTERVAL = seconds
    home: Any = importlib.import_module("stockpot.zoo.search")
    home.finetune = functools.partial(home.finetune, save_every=seconds)


def _plain_pages() -> None:
    home: Any = importlib.import_module("stockpot.report.page")
    home.html = lambda page: f"<html>{page}</html>\n"
    home.markdown = lambda page: f"{page}\n"
    home.page_of = lambda record: {"soup": None, "rows": []}


def _feign_room() -> None:
    home: Any = importlib.import_module("stockpot.files")
    home.MARGIN = -(2**62)

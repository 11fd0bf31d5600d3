"""Several trials at once, one process each: a trial does not know that there are others."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import connection, parent_process
from typing import Any

import torch
from torch import multiprocessing

from stockpot.errors import LearningError, StockpotError, describe
from stockpot.events import Event, Listener
from stockpot.finetune.parcel import pack, unpack
from stockpot.finetune.trial import run_trial
from stockpot.finetune.workshop import Workshop

PATIENCE = 60.0  # seconds that a worker may take to save and end


def run_parallel(workshop: Workshop, numbers: list[int], parallel: int, listen: Listener) -> None:
    """Workers take the next number when they are free; the first error ends all of them."""
    count = min(parallel, len(numbers))
    threads = max(1, torch.get_num_threads() // count)
    # Spawned, not forked: neither CUDA nor OpenMP survive a fork.
    context = multiprocessing.get_context("spawn")
    inbox: Any = context.SimpleQueue()
    for number in [*numbers, *[None] * count]:
        inbox.put(number)
    parcels = _parcels(workshop)
    workers: list[tuple[Any, Any]] = []  # process, our end of its pipe
    try:
        for _ in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(parcels, inbox, theirs, threads), daemon=True)
            with _deaf():
                process.start()
            theirs.close()
            workers.append((process, ours))
        _follow(workers, listen)
    finally:
        _end([process for process, _ in workers])
        for _, ours in workers:
            ours.close()


def _end(processes: list[Any]) -> None:
    """Those in the middle of a trial save its state and go; those that do not go are made to."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes started here inherit that Ctrl-C is not for them: the parent hears it and ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _parcels(workshop: Workshop) -> list[tuple[bytes, list[torch.Tensor]]]:
    model = workshop.model
    home = next(model.parameters()).device
    light = dataclasses.replace(workshop, train=None, fit=None, device=workshop.device or home)
    model.cpu()
    try:
        return [pack(light, share=False), pack((workshop.train, workshop.fit), share=True)]
    finally:
        model.to(home)


def _follow(workers: list[tuple[Any, Any]], listen: Listener) -> None:
    """Pass on what the workers say until each has said that it is through."""
    talking = {ours: process for process, ours in workers}
    while talking:
        ready: list[Any] = connection.wait(list(talking))
        for ours in ready:
            try:
                message: Any = ours.recv()
            except (EOFError, OSError):
                process = talking[ours]
                process.join()
                raise LearningError(
                    describe(
                        "parallel trials",
                        expected="workers that live until the last trial",
                        found=f"one that died with exit code {process.exitcode}",
                        fix="run again to continue, nothing is lost; with a smaller parallel if memory was short; "
                        'a script\'s own work belongs under if __name__ == "__main__"',
                    )
                ) from None
            if message is None:
                del talking[ours]
            elif isinstance(message, Event):
                listen(message)
            else:
                raise message


def _work(parcels: list[tuple[bytes, list[torch.Tensor]]], inbox: Any, pipe: Any, threads: int) -> None:
    _die_with_parent()
    torch.set_num_threads(threads)
    try:
        workshop: Workshop = unpack(*parcels[0])
        workshop.folder.join()
        if _orphaned():
            return  # killed before the lock was ours: another search may be at work here by now
        workshop.train, workshop.fit = unpack(*parcels[1])
        while (number := inbox.get()) is not None:
            run_trial(workshop, number, pipe.send)
        pipe.send(None)
    except StockpotError as error:
        pipe.send(error)
    except Exception as error:
        pipe.send(
            LearningError(
                describe(
                    "a parallel trial",
                    expected="a trial that runs to its end",
                    found=f"{type(error).__name__}: {error}",
                    fix="use parallel=1 to see where it happens, or a smaller one if memory was short",
                )
            )
        )


def _orphaned() -> bool:
    parent = parent_process()
    assert parent is not None
    return bool(connection.wait([parent.sentinel], timeout=0))


def _die_with_parent() -> None:
    """A killed search must not leave processes behind that go on writing into its folder."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

"""Asked to stop, work finishes what it is at, saves, and stops; asked twice, it stops at once."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from stockpot.signals import held


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_a_signal_waits_until_it_is_obeyed() -> None:
    done: list[bool | str] = []

    def work() -> None:
        with held() as stop:
            interrupt()
            done.append(stop.asked)
            done.append("saved")
            stop.obey()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True, "saved"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_nobody_obeys_is_obeyed_at_the_end() -> None:
    done = []

    def work() -> None:
        with held():
            interrupt()
            done.append("whole")
        done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_asked_twice_nothing_waits() -> None:
    done = []

    def work() -> None:
        with held():
            interrupt()
            done.append("once")
            interrupt()
            done.append("never")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["once"]


def test_without_a_signal_nothing_happens_and_handlers_are_as_before() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with held() as stop:
        assert signal.getsignal(signal.SIGTERM) is not before
        stop.obey()
        assert not stop.asked
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with held() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_error_under_way_is_not_replaced_by_the_signal() -> None:
    def work() -> None:
        with held():
            interrupt()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        work()


def test_other_threads_hold_nothing() -> None:
    seen = []

    def work() -> None:
        with held() as stop:
            seen.append(stop.asked)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]

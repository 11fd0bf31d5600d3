"""Processes that make one run after the other: what they answer, and that a run does not notice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import study
from safetensors.numpy import load_file
from studies.hands import Crew, Hand
from study_zoo import make

SOURCE = Path(__file__).parents[2] / "src"

ERRAND = """
import os, signal, sys, threading, time
what = sys.argv[1]
print(what, os.getpid(), flush=True)
if what == "fail":
    sys.exit(3)
if what == "words":
    sys.exit("no such thing")
if what == "raise":
    raise ValueError("a mistake")
if what == "die":
    os._exit(7)
if what == "ignore":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if what == "handler":
    sys.exit(0 if signal.getsignal(signal.SIGINT) is signal.default_int_handler else 5)
if what == "read":
    sys.exit(0 if sys.stdin.read() == "" and os.read(0, 9) == b"" else 6)
if what == "stay":
    threading.Thread(target=time.sleep, args=(60,)).start()
if what == "yes":
    sys.exit(True)
if what == "wait":
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        print("saved")
        sys.exit(130)
"""


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[Hand]:
    (tmp_path / "errand.py").write_text(ERRAND)
    hand = Hand([sys.executable], tmp_path, {**os.environ, "PYTHONPATH": str(tmp_path)})
    yield hand
    hand.wait(20)


def ended(hand: Hand) -> int:
    for _ in range(600):
        if (code := hand.poll()) is not None:
            return code
        time.sleep(0.05)
    raise AssertionError("no answer")


def test_one_process_answers_every_errand_with_its_exit_code_and_its_own_log(
    hand: Hand, tmp_path: Path
) -> None:
    codes = {}
    for what in ("good", "fail", "words", "raise", "ignore", "handler", "read", "yes", "good again"):
        hand.begin(["errand", what], tmp_path / f"{what}.log")
        codes[what] = ended(hand)
    assert codes == {
        "good": 0, "fail": 3, "words": 1, "raise": 1, "ignore": 0, "handler": 0, "read": 0, "yes": 1, "good again": 0,
    }  # fmt: skip
    logs = {what: (tmp_path / f"{what}.log").read_text() for what in codes}
    assert len({text.splitlines()[0].split()[-1] for text in logs.values()}) == 1  # the process
    assert logs["words"].endswith("no such thing\n")
    assert "ValueError: a mistake" in logs["raise"]
    assert hand.alive
    assert hand.wait(20) == 0
    assert not hand.alive


def test_a_process_that_dies_is_told_from_one_that_fails(hand: Hand, tmp_path: Path) -> None:
    hand.begin(["errand", "die"], tmp_path / "log")
    assert ended(hand) == 7
    assert not hand.alive


def test_a_process_that_cannot_end_is_ended(hand: Hand, tmp_path: Path) -> None:
    hand.begin(["errand", "stay"], tmp_path / "log")
    assert ended(hand) == 0
    hand.end(patience=1)
    assert not hand.alive


def test_only_a_process_in_good_order_gets_more_work(tmp_path: Path) -> None:
    (tmp_path / "errand.py").write_text(ERRAND)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    crew = Crew([sys.executable], keep=True)

    def process(what: str) -> str:
        """Which one did it."""
        log = tmp_path / f"{time.monotonic_ns()}.log"
        with log.open("a") as file:
            one = crew.start([sys.executable, "-m", "errand", what], tmp_path, environment, file, alone=False)
        assert isinstance(one, Hand)
        ended(one)
        crew.take_back(one)
        return log.read_text().splitlines()[0].split()[-1]

    first = process("good")
    assert process("good") == first
    assert process("fail") == first
    second = process("good")
    assert second != first
    os.kill(int(second), signal.SIGKILL)
    time.sleep(0.5)
    third = process("good")
    assert third not in (first, second)
    crew.dismiss()
    with (tmp_path / "alone.log").open("a") as file:
        words = [sys.executable, "-m", "errand", "good"]
        alone = crew.start(words, tmp_path, environment, file, alone=True)
    assert isinstance(alone, subprocess.Popen)
    assert alone.wait(20) == 0


def test_stopped_as_a_run_is_it_saves_and_ends(hand: Hand, tmp_path: Path) -> None:
    hand.begin(["errand", "wait"], tmp_path / "log")
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.05)
    time.sleep(0.2)
    hand.send_signal(signal.SIGINT)
    assert hand.wait(20) == 130
    assert (tmp_path / "log").read_text().endswith("saved\n")


def test_runs_made_by_one_process_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ("seeds-3", "rates-mehl-plus-0.02", "main-0", "seeds-4")
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begun: list[tuple[Hand, str]] = []
    begin = Hand.begin

    def beginning(self: Hand, words: Sequence[str], log: Path) -> None:
        begun.append((self, log.stem))
        begin(self, words, log)

    monkeypatch.setattr(Hand, "begin", beginning)
    found = {}
    for kept in (True, False):
        home = make(tmp_path / str(kept) / "experiments")
        options = ["--jobs", "1", *(["--keep"] if kept else []), "--only", *runs]
        assert study.main(["tiny", "--home", str(home), *options]) == 0
        files = sorted((home / "runs" / "tiny").glob("*/methods/*/weights.safetensors"))
        found[kept] = {f"{file.parts[-4]} {file.parts[-2]}": load_file(file) for file in files}
        assert all((home / "runs" / "tiny" / f"{run}.log").read_text().count("$ ") == 1 for run in runs)
    # One process made all runs but main-0, which had its own, and was asked for nothing when none is kept.
    assert [name for _, name in begun] == ["seeds-3", "rates-mehl-plus-0.02", "seeds-4"]
    assert len({id(hand) for hand, _ in begun}) == 1
    assert {name.split()[0] for name in found[True]} == set(runs)
    for run, one in found[True].items():
        other = found[False][run]
        assert set(one) == set(other)
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)

"""Progress tells what is going on: lines that stay, and the present; live on a terminal, plain elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from typing import Any

import pytest
import torch

from stockpot import average
from stockpot.events import Event, ignore
from stockpot.progress import Activity, drawing, shown


def test_a_method_is_followed_from_its_first_step_to_its_time() -> None:
    activity = Activity()
    activity.hear(Event("start", {"methods": {"hl": 40}, "folds": {"hl": 4}, "blocks": {"hl": 2}}))
    assert activity.hear(Event("method", {"method": "hl"})) is None
    activity.hear(Event("left", {"least": 6, "most": 40, "budget": None}))
    for step in range(5):
        activity.hear(Event("step", {"block": 0, "fold": 1, "step": step, "of": 5, "loss": 0.5}))
    assert (activity.text, activity.done, activity.total) == ("hl: block 1, fold 2, loss 0.5000", 5, 40)
    activity.hear(Event("progress", {"what": "averaging the ingredients", "done": 3, "total": 9}))
    assert (activity.text, activity.done, activity.total) == ("hl: averaging the ingredients", 3, 9)
    assert activity.hear(Event("cooked", {"method": "hl", "seconds": 2.0})) == "hl: cooked in 2.0 s"


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"folds": {"hl": 1}, "blocks": {"hl": 1}}, "hl: loss 0.5000"),
        ({"folds": {"hl": 4}, "blocks": {"hl": 1}}, "hl: fold 1, loss 0.5000"),
        ({"folds": {"hl": 1}, "blocks": {"hl": 3}}, "hl: block 1, loss 0.5000"),
    ],
)
def test_blocks_and_folds_are_named_where_there_are_several(about: dict[str, Any], text: str) -> None:
    activity = Activity()
    activity.hear(Event("start", {"methods": {"hl": 40}, **about}))
    activity.hear(Event("method", {"method": "hl"}))
    activity.hear(Event("step", {"block": 0, "fold": 0, "step": 0, "of": 9, "loss": 0.5}))
    assert activity.text == text


def test_the_time_that_learning_takes_becomes_a_line() -> None:
    activity = Activity()
    activity.hear(Event("method", {"method": "hl"}))
    told = activity.hear(Event("pace", {"seconds": 90.0, "least": 90.0, "steps": 900, "greedy": None}))
    assert told == "hl: learning takes 1 min 30 s"
    told = activity.hear(Event("pace", {"seconds": 90.0, "least": 9.0, "steps": 900, "greedy": 30.0}))
    assert told == (
        "hl: learning takes about 12 s, and as long as held-out data gets better up to 1 min 30 s;"
        " the greedy soup takes at most 30 s in all"
    )


def test_of_long_learning_the_soup_that_is_there_before_it_is_said() -> None:
    activity = Activity()
    pace = {"seconds": 90.0, "least": 90.0, "steps": 900, "greedy": None}
    build = "stockpot rebuild 'my run/methods/crossfit' --out soup"
    for models, which in ((4, "the best 4 of 8"), (8, "8")):
        activity.hear(Event("method", {"method": "crossfit"}))
        assert activity.hear(Event("kept", {"models": models, "of": 8, "record": "my run/methods/crossfit"})) is None
        told = activity.hear(Event("pace", pace))
        assert told == f"crossfit: learning takes 1 min 30 s; meanwhile, the mean of {which} models: {build}"
        assert activity.hear(Event("pace", {**pace, "seconds": 3.0, "least": 3.0})) == "crossfit: learning takes 3.0 s"
    activity.hear(Event("method", {"method": "hl+"}))
    assert activity.hear(Event("pace", pace)) == "hl+: learning takes 1 min 30 s"


def test_a_run_that_goes_on_counts_what_was_done_before() -> None:
    activity = Activity()
    activity.hear(Event("start", {"methods": {"hl+": 40}, "folds": {"hl+": 1}, "blocks": {"hl+": 2}}))
    activity.hear(Event("method", {"method": "hl+"}))
    activity.hear(Event("step", {"block": 1, "fold": 0, "step": 9, "of": 20, "loss": 0.5}))
    assert (activity.done, activity.total) == (30, 40)
    assert activity.state() == " (75 %)"  # how fast it is, nobody knows yet


def test_what_is_left_where_held_out_data_says_when_to_stop_is_a_little_more_than_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    activity = Activity()

    def learn(least: int, most: int, steps: int, budget: float | None = None) -> str:
        activity.hear(Event("left", {"least": least, "most": most, "budget": budget}))
        for step in range(steps):
            now[0] += 2.0
            activity.hear(Event("step", {"block": 0, "fold": step % 4, "step": step, "of": 100, "loss": 0.5}))
        return activity.state()

    activity.hear(Event("method", {"method": "crossfit"}))
    assert learn(80, 400, 0) == ""
    assert learn(120, 440, 0) == ""
    now[0] += 50.0  # before the first step
    assert learn(80, 400, 40) == " (1 min 44 s left)"  # of 80 s; what came before the first step does not count
    assert learn(20, 360, 15) == " (13 s left)"
    assert learn(80, 345, 5, budget=60.0) == " (50 s left)"
    assert learn(80, 90, 1) == " (2 min 58 s left)"  # never more than all steps
    assert (activity.done, activity.total) == (61, 150)
    now[0] += 60.0  # a pause is forgotten after two judgements
    learn(80, 400, 20)
    learn(80, 400, 20)
    assert learn(80, 400, 40) == " (1 min 44 s left)"
    activity.hear(Event("progress", {"what": "writing the soup", "done": 1, "total": 2}))
    assert activity.state() == " (50 %)"


def test_a_column_of_texts_that_was_taken_for_classes_is_told_in_short() -> None:
    told = Activity().hear(Event("classes", {"names": [f"{k} was a long film " * 40 for k in range(10)]}))
    assert told is not None
    assert "0 was a long fi…" in told
    assert len(told) < 450


def test_classes_become_a_line() -> None:
    told = Activity().hear(Event("classes", {"names": ["ripe", "rotten"]}))
    assert told == (
        "classes in alphabetical order: ripe = 0, rotten = 1 (another order of the model's outputs: data.classes)"
    )
    told = Activity().hear(Event("classes", {"names": [f"c{k}" for k in range(10)]}))
    assert told is not None
    assert "c7 = 7 and 2 more (" in told


def test_failures_and_trials_become_lines() -> None:
    activity = Activity()
    assert activity.hear(Event("failed", {"method": "hl", "error": "too warm"})) == "hl: failed: too warm"
    done = {"trial": "trial_001", "index": 1, "score": {"value": 0.5}, "seconds": 3.0, "failure": None}
    assert activity.hear(Event("trial_done", done)) == "trial_001: score 0.5000, 3.0 s"
    lost = activity.hear(Event("trial_done", {**done, "failure": "loss is NaN at step 3"}))
    assert lost == "trial_001: failed: loss is NaN at step 3"
    assert activity.hear(Event("an event of the future", {})) is None


def test_plain_lines_come_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with drawing() as listen:
        for second in range(200):
            now[0] = float(second)
            listen(Event("progress", {"what": "hash", "done": second, "total": 200}))
    lines = capsys.readouterr().err.splitlines()
    # After 6 seconds, then 11, 21, 41, 61 later: more and more seldom.
    done = ((3, "3 min 14 s"), (8, "3 min 3 s"), (19, "2 min 42 s"), (39, "2 min 1 s"), (70, "1 min 0 s"))
    assert lines == [f"reading checkpoints ({percent} %, {left} left)" for percent, left in done]


IN_A_TERMINAL = """
import sys
from torch import nn, randn
from stockpot import Pool, Task, average, compare, cook, progress
models = [{"weight": randn(2, 3), "bias": randn(2)} for _ in range(3)]
task = Task(nn.Linear(3, 2), (randn(40, 3), (randn(40) > 0).long()))
pool, heard = Pool.open(models), []
how = dict(steps=3, folds=2)
def say(text):
    sys.stderr.write(f"\\n<{text}>")
say("quick"); cook(pool, task, **how)
progress.PATIENCE = 0.0
say("cook"); cook(pool, task, **how)
say("compare"); compare(pool, task, ["uniform", "greedy"])
say("average"); average(models)
say("quiet"); cook(pool, task, progress=False, **how); average(models, progress=False)
say("own"); cook(pool, task, listen=heard.append, **how)
say("end")
assert heard
"""


def in_a_terminal(code: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen([sys.executable, "-c", code], stderr=theirs, env=environment)
    os.close(theirs)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    os.close(ours)
    assert process.wait() == 0, seen.decode()
    return seen.decode()


def test_in_python_a_terminal_gets_a_bar_unless_the_work_is_short_or_it_is_not_wanted() -> None:
    told = in_a_terminal(IN_A_TERMINAL)
    shown = {name: text.strip() for name, _, text in (part.partition(">") for part in told.split("<")[1:])}
    bar = "\u2501"
    assert {name for name, text in shown.items() if bar in text} == {"cook", "compare", "average"}
    assert {name for name, text in shown.items() if text} == {"cook", "compare", "average"}
    assert "crossfit: cooked in" in shown["cook"]
    assert " left)" in shown["cook"]
    assert "\x1b[?25h" in shown["average"]  # the cursor is back


def test_elsewhere_nothing_is_shown_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    models = [{"weight": torch.ones(2, 3)}, {"weight": torch.zeros(2, 3)}]
    average(models)
    with shown(True, ignore) as listen:
        listen(Event("phase", {"text": "cooking"}))
    assert capsys.readouterr().err == ""  # less than two seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stockpot.progress.PATIENCE", 0.0)
        average(models)
        assert capsys.readouterr().err == ""
        with shown(True, ignore) as listen:
            listen(Event("phase", {"text": "cooking \x1b[31m"}))
    assert capsys.readouterr().err == "cooking \\x1b[31m\n"


def test_what_was_said_before_the_bar_is_there_is_not_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with shown(True, ignore) as listen:
        listen(Event("method", {"method": "hl"}))
        listen(Event("memory", {"text": "in two pieces"}))
        assert capsys.readouterr().err == ""
        now[0] = 2.5
        listen(Event("cooked", {"method": "hl", "seconds": 2.5}))
    assert capsys.readouterr().err.splitlines() == ["hl: in two pieces", "hl: cooked in 2.5 s"]

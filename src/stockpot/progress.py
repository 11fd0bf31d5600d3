"""Progress: from events to lines that stay and what is going on just now.

A terminal gets a live bar, a notebook a cell that is written again, anything else a line every few seconds; always on
stderr. The command line shows it from the start, `cook`, `compare` and `average` what takes longer.
"""

from __future__ import annotations

import html
import math
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from stockpot import words
from stockpot.events import Event, Listener, ignore

PATIENCE = 2.0  # seconds that something may take without a word
OFTEN = 0.25  # seconds between two looks of a notebook's cell
_NAMES = {"open": "opening checkpoints", "hash": "reading checkpoints"}
_STAGES = {"probe": "training the head alone", "pretraining": "pre-training"}
_CLASSES = 8  # named in one line
# Where held-out data ends learning: this times what would be left if nothing got better (experiments/remaining.py).
LIKELY = 1.3
LONG = 60.0  # seconds of learning, from which on it is said that there is a soup already
FIRST, SLOWEST = 5.0, 60.0  # seconds until a plain line about work in progress; doubled each time, up to the other


class Activity:
    """`text`, `done` and `total` describe the present; `hear` returns a line when something is finished."""

    def __init__(self) -> None:
        self.text, self.done, self.total = "", 0, 0
        self._since = (0.0, 0)  # when the present work was first heard of, and how much was done by then
        self._judged = (0.0, 0)  # the same of the last judgement
        self._open: tuple[int, int, float] | None = None  # steps at least and at most in all, and the deadline
        self._plan: Mapping[str, Mapping[str, int]] = {"methods": {}, "folds": {}, "blocks": {}}  # counts by method
        self._method = ""
        self._meanwhile = ""  # how to get a soup while this method learns
        self._trials = 0

    def hear(self, event: Event) -> str | None:
        data = event.data
        match event.kind:
            case "progress":
                what = _NAMES.get(data["what"], data["what"])
                self._set(f"{self._method}: {what}" if self._method else what, data["done"], data["total"])
            case "phase":
                return str(data["text"])
            case "classes":
                return _classes(data["names"])
            case "dropped":
                return f"left out, because their weights are not finite: {', '.join(data['names'])}"
            case "run":
                return f"{data['run']}: {data['checkpoint']}, {data['why']} (steps there: {data['steps']})"
            case "strangers":
                who = f"{', '.join(data['names'][:3])}{' and others' if len(data['names']) > 3 else ''}"
                what = (
                    "farther from every other ingredient than from zero; fine-tunes of one model are not so far apart"
                )
                return f"warning: {who}: {what}. An average of models from different starts is no model."
            case "start":
                self._plan = {**self._plan, **data}
            case "reused":
                return f"{data['method']}: finished earlier, not repeated"
            case "method":
                self._method, self._meanwhile = data["method"], ""
                self._set(self._method)
            case "left":
                self._goes_on(data)
            case "pace":
                greedy = data["greedy"]
                beside = "" if greedy is None else f"; the greedy soup takes at most {words.seconds(greedy)} in all"
                most = data["seconds"]
                takes = words.seconds(min(LIKELY * data["least"], most))
                if data["least"] < most:
                    takes = f"about {takes}, and as long as held-out data gets better up to {words.seconds(most)}"
                meanwhile = self._meanwhile if most >= LONG else ""
                return f"{self._method}: learning takes {takes}{beside}{meanwhile}"
            case "step":
                self._step(data)
            case "kept":
                few = f"the best {data['models']} of " if data["models"] < data["of"] else ""
                said = shlex.join(["stockpot", "rebuild", data["record"], "--out", "soup"])
                self._meanwhile = f"; meanwhile, the mean of {few}{data['of']} models: {said}"
            case "memory" | "setback":
                return f"{self._method}: {data['text']}"
            case "cooked":
                name, self._method = self._method, ""
                return f"{name}: cooked in {words.seconds(data['seconds'])}"
            case "failed":
                self._method = ""
                return f"{data['method']}: failed: {data['error']}"
            case "report":
                self._set(f"scoring {data['method']} on the report data")
            case "finetune":
                self._trials = data["trials"]
                return f"{data['done']} of {data['trials']} trials finished earlier" if data["done"] else None
            case "waiting":
                self._set(f"waiting for other processes: {', '.join(data['trials'])}")
            case "probe":
                self._set(_STAGES["probe"])
            case "epoch":
                name = _STAGES.get(data["trial"], f"{data['trial']} of {self._trials}")
                self._set(f"{name}: loss {data['loss']:.4f}", data["epoch"], data["epochs"])
            case "trial_done":
                return _trial(data)
        return None

    def _set(self, text: str, done: int = 0, total: int = 0) -> None:
        self._open = None
        if total != self.total or done < self.done:
            self._since = time.monotonic(), done
        self.text, self.done, self.total = text, done, total

    def _goes_on(self, data: Mapping[str, Any]) -> None:
        """Held-out data says when learning stops: after so many more steps at least, and at most."""
        now, done = time.monotonic(), self.done if self._open else 0
        # Timed since the judgement before this one: what comes before the first step, and the first steps, take longer.
        self._since, self._judged = self._judged if done else (now, 0), (now, done)
        deadline = math.inf if data["budget"] is None else now + data["budget"]
        self._open = done + data["least"], done + data["most"], deadline
        self.done, self.total = done, done + data["most"]

    def _step(self, data: Mapping[str, Any]) -> None:
        where = "".join(
            f"{word} {data[word] + 1}, "
            for word in ("block", "fold")
            if self._plan[f"{word}s"].get(self._method, 1) > 1 or data[word] > 0
        )
        text = f"{self._method}: {where}loss {data['loss']:.4f}"
        if self._open is not None:
            self.text, self.done = text, self.done + 1
            return
        total = self._plan["methods"].get(self._method, 0)
        # The place of the step among all: what an earlier process did counts.
        taken = data["block"] * data["of"] + data["step"] + 1
        self._set(text, min(taken, total), total)

    def state(self) -> str:
        """How far the present work is, and how long it will take at the pace so far."""
        if self._open is None:
            share = f"{100 * self.done // self.total} %" if self.total else ""
            each = self._each()
            left = "" if each is None else f", {words.seconds(each * (self.total - self.done))} left"
            return f" ({share}{left})" if share else ""
        known = self.left()
        return "" if known is None else f" ({words.seconds(known[0])} left)"

    def left(self) -> tuple[float, float, float] | None:
        """Seconds of learning that held-out data ends: what is likely, if nothing gets better, and all there may be."""
        each = self._each()
        if self._open is None or each is None:
            return None
        *ends, deadline = self._open
        least, most = (max(0.0, each * (end - self.done)) for end in ends)
        budget = max(0.0, deadline - time.monotonic())
        return min(LIKELY * least, most, budget), min(least, budget), min(most, budget)

    def _each(self) -> float | None:
        """Seconds of one of the present work's parts; None before one was done."""
        began, first = self._since
        return None if self.done <= first else (time.monotonic() - began) / (self.done - first)


def _classes(names: Sequence[str]) -> str:
    shown = ", ".join(f"{words.middle(name, 30)} = {number}" for number, name in enumerate(names[:_CLASSES]))
    more = f" and {len(names) - _CLASSES} more" if len(names) > _CLASSES else ""
    return f"classes in alphabetical order: {shown}{more} (another order of the model's outputs: data.classes)"


def _trial(data: Mapping[str, Any]) -> str:
    if data["failure"] is not None:
        return f"{data['trial']}: failed: {data['failure']}"
    found, score = data["score"], ""
    if found is not None:
        ends = [found.get(end) for end in ("low", "high")]
        between = "" if None in ends else f" ({ends[0]:.4f} to {ends[1]:.4f})"
        score = f" score {found['value']:.4f}{between},"
    return f"{data['trial']}:{score} {words.seconds(data['seconds'])}"


@contextmanager
def shown(wanted: bool | None, listen: Listener) -> Iterator[Listener]:
    """What `cook`, `compare` and `average` show by themselves of work that takes more than `PATIENCE` seconds.

    Unasked (None) a bar in a terminal or a notebook, and nothing elsewhere or where the caller has a listener of his
    own. `wanted=True` is plain lines elsewhere, `wanted=False` quiet.
    """
    from stockpot import ranks  # which loads torch

    interactive = _notebook() is not None or _terminal()
    quiet = not (interactive and listen is ignore) if wanted is None else not wanted
    if quiet or not ranks.first():
        yield listen
        return
    began, late = time.monotonic(), list[Event]()
    with ExitStack() as stack:
        draw: Listener | None = None

        def both(event: Event) -> None:
            nonlocal draw
            listen(event)
            if draw is None:
                late.append(event)
                if time.monotonic() - began < PATIENCE:
                    return
                draw = stack.enter_context(drawing())
                for missed in late:
                    draw(missed)
            else:
                draw(event)

        yield both


@contextmanager
def drawing() -> Iterator[Listener]:
    """A listener that shows what it hears."""
    if (display := _notebook()) is not None:
        with _cell(display) as listen:
            yield listen
    elif not _terminal():
        yield _plain()
    else:
        with _bar() as listen:
            yield listen


def _terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _notebook() -> Any:
    """What shows things in a notebook's cell; None outside of notebooks."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is None or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    return display


@contextmanager
def _bar() -> Iterator[Listener]:
    """Without rich, which comes with the extra `cli`, plain lines."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _plain()
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=8) as bars:
        task, activity = bars.add_task("", total=None, state=""), Activity()

        def listen(event: Event) -> None:
            line = activity.hear(event)
            if line is not None:
                bars.console.print(words.harmless(line), markup=False, highlight=False)
            total = activity.total or None
            text = words.harmless(activity.text[:60])
            bars.update(task, description=text, completed=activity.done, total=total, state=activity.state().strip())

        yield listen


@contextmanager
def _cell(display: Any) -> Iterator[Listener]:
    """In a notebook: the lines so far, and under them what is going on, in one place that is written again."""
    activity, lines, last = Activity(), list[str](), 0.0
    place = display({"text/plain": ""}, raw=True, display_id=True)

    def show(present: str) -> None:
        text = words.harmless("\n".join([*lines, *filter(None, [present])]))
        bar = (
            f'<progress value="{activity.done}" max="{activity.total}"></progress>'
            if present and activity.total
            else ""
        )
        place.update({"text/plain": text, "text/html": f"<pre>{html.escape(text)}</pre>{bar}"}, raw=True)

    def listen(event: Event) -> None:
        nonlocal last
        line, now = activity.hear(event), time.monotonic()
        if line is not None:
            lines.append(line)
        if line is not None or now - last > OFTEN:
            show(activity.text[:60] + activity.state())
            last = now

    try:
        yield listen
    finally:
        show("")


def _plain() -> Listener:
    activity, last, wait = Activity(), time.monotonic(), FIRST

    def listen(event: Event) -> None:
        nonlocal last, wait
        line, now = activity.hear(event), time.monotonic()
        if line is not None:
            wait = FIRST
        elif activity.text and now - last > wait:
            line, wait = activity.text + activity.state(), min(2 * wait, SLOWEST)
        if line is not None:
            sys.stderr.write(words.harmless(line) + "\n")
            last = now

    return listen

"""Trackers of experiments: what a run's events tell, written where people look at their runs.

Losses and rates by step, one group per method, fold and block; scores on the report data by method. A tracker that
fails later must not cost the run: that is said, and nothing more is written there.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

from stockpot import files
from stockpot.adapters.code import bad_model, need, said
from stockpot.errors import RunError, StockpotError
from stockpot.events import Event, Listener

Track = Literal["tensorboard", "mlflow", "wandb"]
TRACKERS: tuple[Track, ...] = get_args(Track)
TENSORBOARD = "tensorboard"  # its folder in the run directory
PROJECT = "stockpot"  # the experiment or project, where the environment names none
_BATCH = 500  # numbers that MLflow gets at a time; it takes 1,000

Settings = Mapping[str, Mapping[str, Any]]  # by method
Write = Callable[[str, Mapping[str, float], int], None]  # (group, numbers by name, step)
Close = Callable[[bool], None]  # (whether the run was finished)


def check_tracker(track: Any, run: Path | None) -> None:
    """Before anything is read: a tracker that is known and installed, and a place for what it writes."""
    if track is None:
        return
    if track not in TRACKERS:
        fix = "leave it out, or install and name one of these"
        raise RunError.of("track", expected=f"one of {', '.join(TRACKERS)}", found=repr(track), fix=fix)
    if track == "tensorboard" and run is None:
        fix = 'give run="run", in which the folder tensorboard is made'
        raise RunError.of("track='tensorboard'", expected="a run directory", found="none", fix=fix)
    need(track)


@contextmanager
def tracking(
    track: Track | None, run: Path | None, title: str, settings: Settings, listen: Listener
) -> Iterator[Listener]:
    """A listener that passes events on and writes them for a tracker; None: for none."""
    if track is None:
        yield listen
        return
    try:
        write, close = _OPEN[track](run, title, settings)
    except StockpotError:
        raise
    except Exception as error:  # whatever the library has: no server, no key, no room
        expected, fix = "one that can be written to", f"see to what {track} says, or leave track out"
        raise bad_model(f"tracker {track}", expected, said(error), fix) from error
    working, finished, method = True, False, ""

    def safely(action: Callable[[], None]) -> None:
        nonlocal working
        try:
            if working:
                action()
        except Exception as error:
            working = False
            text = f"{track} failed, and nothing more is written there: {said(error)}"
            listen(Event("phase", {"text": text}))

    def both(event: Event) -> None:
        nonlocal method
        method = event.data["method"] if event.kind == "method" else method
        if (found := _numbers(event, method)) is not None:
            safely(lambda: write(*found))
        listen(event)

    try:
        yield both
        finished = True
    finally:
        safely(lambda: close(finished))


def _numbers(event: Event, method: str) -> tuple[str, dict[str, float], int] | None:
    """What there is to write of an event: its group, numbers and step."""
    data = event.data
    if event.kind in ("step", "held_out") and data["loss"] is not None:  # None: not finite
        group = f"{method}/fold{data['fold']}/block{data['block']}"
        if event.kind == "held_out":
            return group, {"held_out_loss": data["loss"]}, data["step"]
        return group, {"fit_loss": data["loss"], "lr": data["lr"]}, data["step"]
    return (data["method"], {data["set"]: data["value"]}, 0) if event.kind == "report" else None


def _tensorboard(run: Path | None, title: str, settings: Settings) -> tuple[Write, Close]:  # noqa: ARG001
    from torch.utils.tensorboard import SummaryWriter

    assert run is not None
    files.make_directory(run / TENSORBOARD, run)
    writer: Any = SummaryWriter(str(files.check_entries(run, run / TENSORBOARD)))

    def write(group: str, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(f"{group}/{name}", value, step)

    return write, lambda _: writer.close()


def _mlflow(run: Path | None, title: str, settings: Settings) -> tuple[Write, Close]:  # noqa: ARG001
    """Where MLflow's own environment says; not the run that the caller may have open."""
    library = need("mlflow")
    from mlflow.entities import Metric, Param

    client = library.MlflowClient()
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known = client.get_experiment_by_name(project)
    number = client.create_experiment(project) if known is None else known.experiment_id
    ident: str = client.create_run(number, run_name=title).info.run_id
    parameters = [Param(_plain(name), json.dumps(one, default=str)) for name, one in settings.items()]
    client.log_batch(ident, params=parameters)
    waiting: list[Any] = []

    def send() -> None:
        client.log_batch(ident, metrics=waiting)
        waiting.clear()

    def write(group: str, numbers: Mapping[str, float], step: int) -> None:
        now = int(1000 * time.time())
        waiting.extend(Metric(_plain(f"{group}/{name}"), value, now, step) for name, value in numbers.items())
        if len(waiting) >= _BATCH:
            send()

    def close(finished: bool) -> None:
        send()
        client.set_terminated(ident, "FINISHED" if finished else "KILLED")

    return write, close


def _plain(name: str) -> str:
    return name.replace("+", "-plus")  # which MLflow does not allow in names


def _wandb(run: Path | None, title: str, settings: Settings) -> tuple[Write, Close]:  # noqa: ARG001
    """Where its own environment says, beside a run that the caller may have open. Steps count in each group anew."""
    library = need("wandb")
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    opened = library.init(project=project, name=title, config=dict(settings), reinit="create_new")
    groups: set[str] = set()

    def write(group: str, numbers: Mapping[str, float], step: int) -> None:
        if group not in groups:
            groups.add(group)
            opened.define_metric(f"{group}/*", step_metric=f"{group}/step")
        opened.log({f"{group}/step": step, **{f"{group}/{name}": value for name, value in numbers.items()}})

    return write, lambda finished: opened.finish(exit_code=0 if finished else 1)


_OPEN = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb}

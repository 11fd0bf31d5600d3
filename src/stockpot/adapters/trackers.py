"""Trackers of experiments: what a run's events tell, written where people look at their runs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from stockpot import files
from stockpot.adapters.extras import need
from stockpot.events import Event, Listener


@contextmanager
def scalars(folder: Path, listen: Listener) -> Iterator[Listener]:
    """A listener that passes events on and writes losses, rates and scores for TensorBoard, one tag per method."""
    need("tensorboard")  # torch's own message does not say how to get it
    from torch.utils.tensorboard import SummaryWriter

    with ExitStack() as stack:

        @functools.cache  # not before there is something: the run's directory is made by then
        def writer() -> Any:
            files.make_directory(folder, folder.parent)
            place = files.check_entries(folder.parent, folder)
            return stack.enter_context(closing(SummaryWriter(str(place))))

        method = ""

        def both(event: Event) -> None:
            nonlocal method
            data = event.data
            if event.kind == "method":
                method = data["method"]
            elif event.kind in ("step", "held_out") and data["loss"] is not None:  # None: not finite
                place = f"{method}/fold{data['fold']}/block{data['block']}"
                loss = "fit_loss" if event.kind == "step" else "held_out_loss"
                writer().add_scalar(f"{place}/{loss}", data["loss"], data["step"])
                if event.kind == "step":
                    writer().add_scalar(f"{place}/lr", data["lr"], data["step"])
            elif event.kind == "report":
                writer().add_scalar(f"{data['method']}/{data['set']}", data["value"], 0)
            listen(event)

        yield both

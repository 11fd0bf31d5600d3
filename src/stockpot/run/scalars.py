"""TensorBoard scalars from events: losses, learning rates and scores, one tag per method."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from stockpot.adapters.extras import need
from stockpot.events import Event, Listener, ignore


class Scalars:
    """A listener that passes every event on."""

    def __init__(self, path: Path, listen: Listener = ignore) -> None:
        need("tensorboard")  # torch's own message does not say how to get it
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(path))
        self._listen = listen
        self._method = ""

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def __call__(self, event: Event) -> None:
        data = event.data
        if event.kind == "method":
            self._method = data["method"]
        elif event.kind in ("step", "held_out") and data["loss"] is not None:  # None: not finite
            place = f"{self._method}/fold{data['fold']}/block{data['block']}"
            self._writer.add_scalar(
                f"{place}/{'fit' if event.kind == 'step' else 'held_out'}_loss", data["loss"], data["step"]
            )
            if event.kind == "step":
                self._writer.add_scalar(f"{place}/lr", data["lr"], data["step"])
        elif event.kind == "report":
            self._writer.add_scalar(f"{data['method']}/report", data["mean"], 0)
        self._listen(event)

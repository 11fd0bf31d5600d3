"""What a method saves so that a killed run continues where it was."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class StateStore(Protocol):
    """Keeps the newest state of one method. The run directory implements it; tests use a dictionary."""

    interval: float  # seconds between saves inside a block

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None: ...


class NoStore:
    """For runs that need not be resumed."""

    interval = float("inf")

    def load(self) -> None:
        return None

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        pass

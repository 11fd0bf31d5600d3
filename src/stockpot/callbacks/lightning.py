"""A callback for the Trainer of Lightning, under either of its names: `lightning` and `pytorch_lightning`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot.adapters.code import need
from stockpot.callbacks import Collector, Every
from stockpot.task import Task

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    # The two packages have a class each; a script uses that of the package it imported.
    other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    Callback = need("pytorch_lightning" if other else "lightning.pytorch").Callback


class SoupCallback(Collector, Callback):  # type: ignore[misc, unused-ignore]
    """Collects ingredients while a Lightning Trainer trains, and cooks them when it is done.

    An ingredient is written after every epoch, every so many optimiser steps (`every=100`) or whenever ModelCheckpoint
    saves (`every="save"`); the newest `keep` stay in `folder/ingredients`. When training is over, `folder/soup` is made
    of them by `method` on the validation data, with cross-entropy and accuracy of `model(x)` for batches `(x, y)`, or
    by `task`, a function that makes a `Task` of the module. `method=None` only collects. `name` tells several trainings
    in one folder apart. `settings` are those of `cook`.

    Afterwards `result`, `soup` and `failure` say what came out. The module keeps its trained weights; with `load=True`
    it has the soup's.
    """

    def __init__(self, folder: str | Path, *, every: Every = "epoch", **options: Any) -> None:
        super().__init__(folder, every=every, **options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = type(trainer.strategy).__name__
        sharded = strategy if any(word in strategy for word in ("FSDP", "DeepSpeed", "ModelParallel")) else ""
        loaders = trainer.val_dataloaders
        how = "give the trainer's fit() val_dataloaders"
        known = self._task is not None or loaders is not None
        self.begin(trainer.global_step, trainer.world_size, sharded, known, how)
        if self.every == "save" and not any(not c.save_weights_only for c in trainer.checkpoint_callbacks):
            fix = "give every=100 (steps) or every='epoch'"
            expected = "a ModelCheckpoint that saves more than weights, for every='save'"
            raise self.wrong("every", expected, "none", fix)
        self.derived(lambda: self._derived(pl_module, loaders))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if isinstance(self.every, int) and trainer.global_step and trainer.global_step % self.every == 0:
            self._write(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.every == "epoch":
            self._write(trainer, pl_module)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if self.every == "save":
            self._write(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self.finish(pl_module)

    def _write(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.collect(pl_module, trainer.global_step)

    def _derived(self, module: Any, loaders: Any) -> Task:
        every = list(loaders.values()) if isinstance(loaders, dict) else loaders
        every = every if isinstance(every, (list, tuple)) else [every]
        if len(every) != 1:
            fix = "say which: task=lambda model: Task(model, loader)"
            raise self.wrong("validation data", "one loader", f"{len(every)}", fix)
        return Task(module, every[0], batch_size=getattr(every[0], "batch_size", None) or 256)

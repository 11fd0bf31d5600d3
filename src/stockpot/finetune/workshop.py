"""Everything a trial needs, in one object that can travel to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from stockpot.finetune.folder import Folder
from stockpot.finetune.plan import Plan
from stockpot.task import Data, Task
from stockpot.task.loss import LossFunction
from stockpot.task.metrics import Metric, MetricFunction


@dataclass
class Workshop:
    """The model is the one thing here that trials change; each begins by loading `start` into it."""

    model: nn.Module
    train: Data | None  # None only while on its way to another process
    fit: Data | None
    plan: Plan
    out: Path
    loss: LossFunction | None
    metric: str | Metric | MetricFunction
    device: str | torch.device | None
    autocast: torch.dtype | None
    batch_size: int  # of evaluation
    as_directories: bool
    companions: Path | None
    interval: float  # seconds between saves inside a trial
    start: Mapping[str, Tensor]

    @property
    def folder(self) -> Folder:
        return Folder(self.out)

    @property
    def training_data(self) -> Data:
        assert self.train is not None
        return self.train

    def training_task(self) -> Task:
        return self._task(self.training_data)

    def validation_task(self) -> Task | None:
        return None if self.fit is None else self._task(self.fit)

    def _task(self, data: Data) -> Task:
        return Task(
            self.model,
            data,
            loss=self.loss,
            metric=self.metric,
            device=self.device,
            autocast=self.autocast,
            batch_size=self.batch_size,
        )

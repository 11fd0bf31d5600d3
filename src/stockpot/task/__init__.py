"""The user's model, loss, metric and data."""

from stockpot.task.data import Data
from stockpot.task.loss import Loss
from stockpot.task.metric import Metric
from stockpot.task.metrics import METRICS
from stockpot.task.scores import Scores
from stockpot.task.task import Task

__all__ = ["METRICS", "Data", "Loss", "Metric", "Scores", "Task"]

"""The user's model, loss, metric and data."""

from stockpot.task.data import Data
from stockpot.task.scores import Scores
from stockpot.task.task import Task

__all__ = ["Data", "Scores", "Task"]

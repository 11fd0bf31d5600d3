"""The live model, the loaded directions, and how steps are taken and planned."""

from stockpot.engine.directions import Directions, FlatPlan
from stockpot.engine.engine import Engine
from stockpot.engine.live import Live
from stockpot.engine.memory import Options, Plan
from stockpot.engine.optimiser import AdamW
from stockpot.task.captured import Batch

__all__ = ["AdamW", "Batch", "Directions", "Engine", "FlatPlan", "Live", "Options", "Plan"]

"""The live model, the loaded directions, and how steps are taken and planned."""

from stockpot.engine.directions import Directions
from stockpot.engine.engine import Engine, Options
from stockpot.engine.flat import FlatPlan
from stockpot.engine.live import Live
from stockpot.engine.optimiser import AdamW
from stockpot.engine.plan import Plan
from stockpot.engine.resources import PeakMemory
from stockpot.task.captured import Batch

__all__ = ["AdamW", "Batch", "Directions", "Engine", "FlatPlan", "Live", "Options", "PeakMemory", "Plan"]

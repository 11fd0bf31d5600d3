from stockpot.engine import ahead, parallel
from stockpot.engine.budget import Plan
from stockpot.engine.descent import Descent
from stockpot.engine.directions import Directions
from stockpot.engine.engine import Engine
from stockpot.engine.live import Live
from stockpot.engine.memory import PeakMemory
from stockpot.engine.plan import FlatPlan

__all__ = ["Descent", "Directions", "Engine", "FlatPlan", "Live", "PeakMemory", "Plan", "ahead", "parallel"]

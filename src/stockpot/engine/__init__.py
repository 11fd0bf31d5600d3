from stockpot.engine import parallel
from stockpot.engine.descent import Descent
from stockpot.engine.directions import Directions
from stockpot.engine.live import Live
from stockpot.engine.memory import PeakMemory
from stockpot.engine.plan import FlatPlan

__all__ = ["Descent", "Directions", "FlatPlan", "Live", "PeakMemory", "parallel"]

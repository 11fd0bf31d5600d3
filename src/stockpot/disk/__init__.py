"""What a directory can be asked before it is written to: is it ours alone, and is there room."""

from stockpot.disk.lock import LOCK, Lock
from stockpot.disk.space import require_space

__all__ = ["LOCK", "Lock", "require_space"]

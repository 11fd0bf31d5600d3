"""Checkpoints as lazy, validated mappings of names to tensors."""

from stockpot.pool.checkpoint import Checkpoint, open_checkpoint
from stockpot.pool.facts import PoolFacts
from stockpot.pool.pool import Pool
from stockpot.pool.spec import TensorSpec

__all__ = ["Checkpoint", "Pool", "PoolFacts", "TensorSpec", "open_checkpoint"]

"""Checkpoints as lazy, validated mappings of names to tensors."""

from stockpot.pool.checkpoint import open_checkpoint
from stockpot.pool.facts import Distances, PoolFacts, verify_finite
from stockpot.pool.pool import Pool
from stockpot.pool.source import Checkpoint, TensorSpec

__all__ = ["Checkpoint", "Distances", "Pool", "PoolFacts", "TensorSpec", "open_checkpoint", "verify_finite"]

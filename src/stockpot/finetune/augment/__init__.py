"""Random changes to training batches, on the device: a pure function of seed and step."""

from stockpot.finetune.augment.batch import augment, check_mixup
from stockpot.finetune.augment.mixup import mixed_loss

__all__ = ["augment", "check_mixup", "mixed_loss"]

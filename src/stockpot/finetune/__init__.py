"""Makes a pool: one pre-trained model, fine-tuned many times with different hyperparameters."""

from stockpot.finetune.plan import SPACES, Augmentation, Plan, Probe, Trial, draw_trials
from stockpot.finetune.record import TrialRecord, read_records
from stockpot.finetune.search import finetune

__all__ = [
    "SPACES",
    "Augmentation",
    "Plan",
    "Probe",
    "Trial",
    "TrialRecord",
    "draw_trials",
    "finetune",
    "read_records",
]

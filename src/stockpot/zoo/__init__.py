"""Makes pools: one pre-trained model, fine-tuned many times with different hyperparameters; and the demo's pool."""

from stockpot.zoo.demo import clear_demo, demo_recipe, make_demo_pool
from stockpot.zoo.folder import TrialRecord, read_records
from stockpot.zoo.plan import SPACES, Augmentation, Plan, Probe, Trial, draw_trials
from stockpot.zoo.search import finetune

__all__ = [
    "SPACES",
    "Augmentation",
    "Plan",
    "Probe",
    "Trial",
    "TrialRecord",
    "clear_demo",
    "demo_recipe",
    "draw_trials",
    "finetune",
    "make_demo_pool",
    "read_records",
]

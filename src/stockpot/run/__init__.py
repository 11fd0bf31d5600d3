"""One run directory: recipe, seed, events, resume, results."""

from stockpot.run.directory import Identity, RunDirectory
from stockpot.run.work import Job, Outcome, run_job

__all__ = ["Identity", "Job", "Outcome", "RunDirectory", "run_job"]

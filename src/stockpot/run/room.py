"""What a run will write, so that a full disk is found before the work and not after it."""

from __future__ import annotations

from pathlib import Path

from stockpot.disk import require_space
from stockpot.run import growth
from stockpot.run.work import Job, steps

_WEIGHT = 40  # bytes of one mixing weight: as float64, and in decimal digits
_STEP = (
    400  # bytes about one step: its line in events.jsonl, its place in the saved state while that is replaced
)
_SAMPLE = 32  # bytes of one sample's scores


def require_room(path: Path, job: Job) -> None:
    require_space(path, forecast(job), "the soup and its record")


def forecast(job: Job) -> int:
    """Bytes, rather too many: the soup, and for every method its weights, scores and history."""
    models, tensors, samples = len(job.pool), len(job.pool.specs), len(job.task.fit)
    cooked = len(job.settings)
    if job.growth:
        cooked += len(growth.methods(job.settings)) * (len(growth.sizes(models)) - 1)
    record = models * tensors * _WEIGHT + samples * _SAMPLE
    taken = sum(steps(job, name, settings) for name, settings in job.settings.items())
    return job.pool.nbytes + cooked * record + models * samples * 8 + (2 if job.growth else 1) * taken * _STEP

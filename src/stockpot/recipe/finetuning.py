"""From a recipe to a pool: what `stockpot finetune` does."""

from __future__ import annotations

from pathlib import Path

from stockpot.errors import RecipeError
from stockpot.events import Listener, ignore
from stockpot.finetune import Augmentation, Plan, Probe, Trial, TrialRecord, finetune
from stockpot.recipe.build import build_judge, build_task, build_train_data
from stockpot.recipe.schema import Recipe


def run_finetune(recipe: Recipe, listen: Listener = ignore) -> list[TrialRecord]:
    """Every trial of the recipe that is not finished yet; the records of all of them."""
    section = recipe.finetune
    if section is None:
        raise RecipeError(
            "finetune: required by `stockpot finetune`, but not there; an empty section will do"
        )
    task = build_task(recipe, listen, pretrained=True, report=False)
    folder = _model_folder(recipe)
    return finetune(
        task.model,
        build_train_data(recipe, listen=listen),
        task.fit,
        pool_directory(recipe),
        plan_of(recipe),
        **build_judge(recipe),
        parallel=section.parallel,
        as_directories=folder is not None,
        companions=folder,
        listen=listen,
    )


def pool_directory(recipe: Recipe) -> Path:
    assert recipe.finetune is not None
    return recipe.path(recipe.finetune.dir)


def plan_of(recipe: Recipe) -> Plan:
    section = recipe.finetune
    assert section is not None
    seed = recipe.output.seed
    return Plan(
        trials=tuple(Trial(**section.trial(n, seed)) for n in range(section.trials)),  # type: ignore[arg-type]
        batch_size=section.batch_size,
        optimizer=section.optimizer,  # type: ignore[arg-type]
        warmup=section.warmup,
        clip=section.clip,
        probe=Probe(section.probe_epochs, section.probe_lr, seed=seed) if section.probe else None,
        head=section.head,
        augmentation=Augmentation(flip=section.flip, mixup=section.mixup),
    )


def _model_folder(recipe: Recipe) -> Path | None:
    """A Hugging Face folder: checkpoints made from it, and soups made from those, should load like it."""
    given = recipe.model.transformers
    if not isinstance(given, str):
        return None
    path = recipe.path(given)
    return path if path.is_dir() else None

"""From a recipe to a run: what `stockpot cook` and `stockpot compare` do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stockpot.errors import RunError, describe
from stockpot.events import Listener, ignore
from stockpot.recipe import Recipe
from stockpot.recipe.build import build_pool, build_settings, build_task, code_digests, layout_options
from stockpot.run.directory import Identity, RunDirectory
from stockpot.run.environment import environment
from stockpot.run.room import require_room
from stockpot.run.verdict import BASELINE
from stockpot.run.work import Job, Outcome, run_job
from stockpot.soups.settings import LEARNED, block_size_for

# Methods that score every ingredient anyway, so that the best one can be shown beside them for nothing.
_SCORES_INGREDIENTS = ("greedy", "crossfit")


def run_compare(
    recipe: Recipe,
    *,
    title: str,
    kind: str = "compare",
    growth: bool = False,
    overwrite: bool = False,
    command: Sequence[str] = (),
    listen: Listener = ignore,
) -> Outcome:
    """Every method of the recipe on one pool; finished ones are not repeated."""
    return _run(recipe, kind, title, recipe.method.methods, None, growth, overwrite, command, listen)


def run_cook(
    recipe: Recipe,
    *,
    title: str,
    overwrite: bool = False,
    command: Sequence[str] = (),
    listen: Listener = ignore,
) -> Outcome:
    """The recipe's one method; the best ingredient comes along where that costs nothing."""
    name = recipe.method.name
    names = (BASELINE, name) if name in _SCORES_INGREDIENTS else (name,)
    return _run(recipe, "cook", title, names, name, False, overwrite, command, listen)


def _require_sense(job: Job) -> None:
    """What the one method that is asked for would refuse later, said while an earlier run is still there.

    In a comparison one method may fail and the others go on.
    """
    if job.wanted is None or job.wanted not in LEARNED:
        return
    settings = job.settings[job.wanted]
    block_size_for(settings, len(job.pool))
    if settings.folds > 1:
        job.task.fit.folds(settings.folds, settings.seed)


def output_directory(recipe: Recipe) -> Path:
    return recipe.path(recipe.output.dir)


def _run(
    recipe: Recipe,
    kind: str,
    title: str,
    names: Sequence[str],
    wanted: str | None,
    growth: bool,
    overwrite: bool,
    command: Sequence[str],
    listen: Listener,
) -> Outcome:
    path = output_directory(recipe)
    if path.resolve() == recipe.folder.resolve():
        raise RunError(
            describe(
                f"output.dir {recipe.output.dir!r}",
                expected="a directory of its own",
                found="the recipe's folder",
                fix="choose another directory, such as output.dir: runs/first",
            )
        )
    metric = recipe.data.metric if isinstance(recipe.data.metric, str) else "score"
    identity = Identity(
        kind, title, recipe.output.seed, metric, recipe.resolved(), recipe.digest(), tuple(command)
    )
    # Claimed, not begun: what is there stays until all that the run needs is known to be in order.
    with RunDirectory.claim(path, identity, overwrite=overwrite or recipe.output.overwrite) as directory:
        job = Job(
            pool=build_pool(recipe, listen),
            task=build_task(recipe, listen),
            settings={name: build_settings(recipe, name) for name in names},
            layout=layout_options(recipe),
            growth=growth,
            wanted=wanted,
            max_shard=recipe.output.max_shard_size,
            code=code_digests(recipe),
        )
        _require_sense(job)
        require_room(path, job)
        directory.begin(environment(str(job.task.device)))
        if recipe.output.tensorboard:
            from stockpot.run.scalars import Scalars

            with Scalars(directory.path / "tensorboard", listen) as both:
                return run_job(directory, job, both)
        return run_job(directory, job, listen)

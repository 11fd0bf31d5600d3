"""`stockpot evaluate`: one soup or checkpoint on the recipe's data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json, Overrides, RecipeFile, read_recipe

if TYPE_CHECKING:
    from stockpot.pool import Checkpoint
    from stockpot.recipe import Recipe
    from stockpot.task import Task

Weights = Annotated[
    Path,
    typer.Argument(
        metavar="SOUP_OR_CHECKPOINT",
        help="A saved soup, a run directory, or any checkpoint.",
        show_default=False,
    ),
]
On = Annotated[
    Literal["report", "fit"] | None,
    typer.Option("--on", help="Which data. Default: the report data, if the recipe has some."),
]


@guarded
def evaluate(
    weights: Weights,
    recipe: RecipeFile,
    on: On = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    as_json: Json = False,
) -> None:
    """Score a soup or a checkpoint on the recipe's data.

    Do not choose between checkpoints by their scores on the report data: that makes it fitting data. Choose with
    `--on fit`.

    Examples:

    ```
    stockpot evaluate run/methods/crossfit/soup recipe.yaml
    stockpot evaluate run recipe.yaml                   # the run's recommended soup
    stockpot evaluate checkpoints/model_3.pt recipe.yaml --on fit --json
    ```
    """
    from stockpot.cli.drawing import drawing
    from stockpot.cli.shell import document, say
    from stockpot.pool.finite import verify_finite
    from stockpot.recipe.build import build_task
    from stockpot.report.words import Metric
    from stockpot.run.scores import encode
    from stockpot.soups.reporting import report_weights

    wanted = read_recipe(recipe, overrides)
    checkpoint = _open(weights, wanted)
    with drawing() as listen:
        task = build_task(wanted, listen)
        verify_finite([checkpoint], listen)
        _load(task, checkpoint)
        where = on or ("report" if task.has_report else "fit")
        scores = report_weights(task, listen) if where == "report" else task.score(listen=listen)
    name = wanted.data.metric if isinstance(wanted.data.metric, str) else "score"
    if as_json:
        document({"path": str(checkpoint.path), "metric": name, "on": where, "score": encode(scores)})
        return
    metric = Metric(name)
    low, high = scores.interval()
    data = "report data" if where == "report" else "fitting data"
    say(
        f"{metric.title} {metric.value(scores.mean)} on {data}"
        f" (95 % interval {metric.bare(low)} to {metric.bare(high)}, n = {scores.n}, loss {scores.loss:.4f})"
    )


def _open(path: Path, recipe: Recipe) -> Checkpoint:
    from stockpot.cli.shell import shown
    from stockpot.errors import RunError, describe
    from stockpot.pool import open_checkpoint
    from stockpot.run.soups import SOUP, recommended_soup
    from stockpot.soup.record import RECORD

    if not path.exists():
        fix = "give a run directory for its recommended soup, RUN/methods/NAME/soup for another, or a checkpoint"
        if path.name == SOUP and (path.parent / RECORD).is_file():
            run = shlex.quote(shown(path.parent.parent.parent))
            fix = f"this soup was not written; `stockpot rebuild {run} --method {path.parent.name}` writes it"
        raise RunError(
            describe(
                str(path),
                expected="a saved soup, a run directory or a checkpoint",
                found="nothing at this path",
                fix=fix,
            )
        )
    if (path / "run.json").is_file():
        return open_checkpoint(recommended_soup(path))
    if (path / RECORD).is_file():
        return open_checkpoint(path)  # a soup has its final names already
    return open_checkpoint(path, key=recipe.pool.key, rename=recipe.pool.rename)


def _load(task: Task, checkpoint: Checkpoint) -> None:
    task.check_names(checkpoint.specs)
    # Not strict: names that the model ties to each other may be stored once.
    task.model.load_state_dict({name: checkpoint.tensor(name) for name in checkpoint.specs}, strict=False)

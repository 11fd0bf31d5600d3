"""`stockpot finetune`: makes the pool."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json, Overrides, RecipeFile, read_recipe
from stockpot.cli.progress import drawing
from stockpot.cli.terminal import document, say, shown, table
from stockpot.report import words

if TYPE_CHECKING:
    from stockpot.finetune import TrialRecord

Trials = Annotated[
    int | None, typer.Option("--trials", metavar="N", help="How many checkpoints, instead of the recipe's.")
]


@resumable
def finetune(
    recipe: RecipeFile,
    trials: Trials = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    as_json: Json = False,
) -> None:
    """Make the pool: fine-tune one model many times with different hyperparameters.

    The head is trained alone first, then every trial trains all weights its own way. Settings and score of a trial
    are kept beside its checkpoint. Called again, it continues where it was; with more trials it adds to the pool.

    Examples:

    ```
    stockpot finetune recipe.yaml
    stockpot finetune recipe.yaml --trials 24
    stockpot finetune recipe.yaml --set finetune.parallel=4 --set 'finetune.epochs=[5, 10]'
    ```
    """
    from stockpot.recipe.finetuning import pool_directory, run_finetune

    given = [*overrides, *([] if trials is None else [f"finetune.trials={trials}"])]
    wanted = read_recipe(recipe, given)
    with drawing() as listen:
        records = run_finetune(wanted, listen)
    if as_json:
        document([_json(record) for record in records])
        return
    _show(records, wanted.data.metric if isinstance(wanted.data.metric, str) else "score")
    say(f"Pool: {shown(pool_directory(wanted))}")
    say("Next:")
    say(f"  stockpot inspect {shlex.quote(str(recipe))}")
    say(f"  stockpot compare {shlex.quote(str(recipe))}")


def _show(records: list[TrialRecord], metric: str) -> None:
    def score(record: TrialRecord) -> str:
        found, shown = record.score, words.Metric(metric)
        if record.failed or found is None or found["value"] is None:
            return "failed" if record.failed else "-"
        low, high = found.get("low"), found.get("high")
        if low is None or high is None or shown.scale != 100:
            return shown.value(found["value"])
        return f"{shown.value(found['value'])} ±{100 * (high - low) / 2:.1f}"

    scored = [(r.score["value"] or 0.0, -n) for n, r in enumerate(records) if r.score is not None]
    best = -max(scored)[1] if scored else None
    headings = ("trial", "fit data", "lr", "decay", "epochs", "smoothing", "augment", "time")
    rows = [
        (
            record.name,
            score(record),
            f"{record.settings.lr:.1e}",
            f"{record.settings.weight_decay:.1e}",
            f"{record.settings.epochs:g}",
            f"{record.settings.label_smoothing:g}",
            f"{record.settings.augmentation:g}",
            words.seconds(record.seconds),
        )
        for record in records
    ]
    say()
    table(headings, rows, marked=best)
    for record in records:
        if record.failed:
            say(f"{record.name} failed: {record.failure}")
    say()


def _json(record: TrialRecord) -> dict[str, object]:
    value = dataclasses.asdict(record)
    return {**value, "path": None if record.path is None else str(record.path)}

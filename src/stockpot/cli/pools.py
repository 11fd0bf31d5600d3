"""What makes a pool: `stockpot finetune`, and `stockpot demo`, which also cooks it."""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stockpot import words
from stockpot.cli.recipes import run_recipe, show, summary
from stockpot.cli.terminal import Json, Overrides, RecipeFile, document, read_recipe, say, shown, table, together
from stockpot.events import Event
from stockpot.progress import drawing

if TYPE_CHECKING:
    from stockpot.zoo.folder import TrialRecord

Trials = Annotated[
    int | None, typer.Option("--trials", metavar="N", help="How many checkpoints, instead of the recipe's.")
]
DemoFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Another seed makes other models and other splits.")]
Again = Annotated[bool, typer.Option("--overwrite", help="Forget an earlier demo in that directory.")]


def finetune(
    recipe: RecipeFile,
    trials: Trials = None,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    as_json: Json = False,
) -> None:
    """Make the pool: fine-tune one model many times with different hyperparameters.

    The head is trained alone first, then every trial trains all weights its own way. Settings and score of a trial
    are kept beside its checkpoint. Called again, it continues where it was; with more trials it adds to the pool.
    Started several times at once, also on other machines with the same folder, each process takes trials that are
    free.

    Examples:

    ```
    stockpot finetune recipe.yaml
    stockpot finetune recipe.yaml --trials 24
    stockpot finetune recipe.yaml --set 'finetune.epochs=[5, 10]'
    stockpot finetune recipe.yaml & stockpot finetune recipe.yaml      # two at a time
    ```
    """
    from stockpot import ranks
    from stockpot.recipe.build import run_finetune

    changed = [*overrides, *([] if trials is None else [f"finetune.trials={trials}"])]
    with together(lambda: read_recipe(recipe, changed)) as (wanted, listen):
        ranks.announce(listen, None, "each trains trials that no other has")
        with ranks.apart():
            records = run_finetune(wanted, listen)
    if as_json:
        document([{**dataclasses.asdict(one), "path": one.path and str(one.path)} for one in records])
        return
    _show_trials(records, wanted.data.metric if isinstance(wanted.data.metric, str) else "score")
    assert wanted.finetune is not None
    say(f"Pool: {shown(wanted.path(wanted.finetune.dir))}")
    say("Next:")
    say(f"  stockpot inspect {shlex.quote(str(recipe))}")
    say(f"  stockpot compare {shlex.quote(str(recipe))}")


def _show_trials(records: list[TrialRecord], name: str) -> None:
    from stockpot.task import METRICS

    metric = words.Metric(name, METRICS[name].unit if name in METRICS else "")

    def score(record: TrialRecord) -> str:
        found = record.score
        if record.failed or found is None or found["value"] is None:
            return "failed" if record.failed else "-"
        low, high = found.get("low"), found.get("high")
        if low is None or high is None or metric.unit != "%":
            return metric.value(found["value"])
        return f"{metric.value(found['value'])} ±{100 * (high - low) / 2:.1f}"

    scored = [(r.score["value"] or 0.0, -n) for n, r in enumerate(records) if r.score is not None]
    form = "{0.lr:.1e} {0.weight_decay:.1e} {0.epochs:g} {0.label_smoothing:g} {0.augmentation:g}"
    rows = [(one.name, score(one), *form.format(one.settings).split(), words.seconds(one.seconds)) for one in records]
    headings = ("trial", "fit data", "lr", "decay", "epochs", "smoothing", "augment", "time")
    say()
    table(headings, rows, marked=-max(scored)[1] if scored else None)
    for record in records:
        if record.failed:
            say(f"{record.name} failed: {record.failure}")
    say()


def demo(out: DemoFolder = Path("demo"), seed: Seed = 0, overwrite: Again = False, as_json: Json = False) -> None:
    """Make real soups on this machine in about a minute.

    Pre-trains a small vision transformer on scikit-learn's handwritten digits, fine-tunes it twelve times with
    random hyperparameters, cooks soups of the twelve by every method, and writes soup and report. Needs no
    network and no GPU.

    Examples:

    ```
    stockpot demo
    stockpot demo --out /tmp/soup --seed 1
    ```
    """
    from stockpot.recipe import load_recipe
    from stockpot.report import write_report
    from stockpot.zoo.demo import demo_folder, make_demo_pool, one_thread

    began = time.perf_counter()
    path = demo_folder(out, seed, overwrite=overwrite)
    recipe = load_recipe(path)
    with drawing() as listen, one_thread():
        listen(Event("phase", {"text": "1 of 3: pre-training and fine-tuning twelve ingredients"}))
        make_demo_pool(out, seed=seed, listen=listen)
        listen(Event("phase", {"text": "2 of 3: cooking by every method"}))
        run = run_recipe(recipe, "demo", "Digits, a demo", listen, overwrite=overwrite)
        listen(Event("phase", {"text": "3 of 3: writing the report"}))
        report = write_report(run)
    if as_json:
        document(summary(run, report))
        return
    show(run, report)
    say(f"Took {words.seconds(time.perf_counter() - began)}.\n")
    quoted, pool = shlex.quote(shown(path)), shlex.quote(shown(out / "pool"))
    say("Next:")
    say(f"  open {shown(report)} in a browser")
    say(f"  stockpot inspect {pool}                 # look at the twelve ingredients")
    say(f"  stockpot cook {quoted} --out my-soup   # one method, one soup")
    say(f"  your own checkpoints: docs/tutorial.md, or write a recipe like {quoted}")

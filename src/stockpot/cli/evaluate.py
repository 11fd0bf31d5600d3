"""What looks at finished work: `stockpot evaluate`, `stockpot rebuild`, `stockpot report`."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from stockpot.cli.cooking import print_table, show
from stockpot.cli.terminal import Json, Overrides, RecipeFile, document, read_recipe, say, say_loading, shown
from stockpot.cli.together import together
from stockpot.progress import drawing

if TYPE_CHECKING:
    from stockpot.pool import Checkpoint
    from stockpot.recipe import Recipe

Weights = Annotated[
    Path,
    typer.Argument(
        metavar="SOUP_OR_CHECKPOINT", help="A saved soup, a run directory, or any checkpoint.", show_default=False
    ),
]
On = Annotated[
    Literal["report", "fit"] | None,
    typer.Option("--on", help="Which data. Default: the report data, if the recipe has some."),
]
RunOrSoup = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a saved soup.", show_default=False)]
Method = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help="Which method's soup. Default: the recommended.")
]
Target = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write it. Default: its place in the run directory."),
]
Ingredients = Annotated[
    list[Path], typer.Option("--pool", metavar="PATH", help="Where the ingredients are now; they are known by content.")
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


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
    from stockpot import ranks
    from stockpot.pool import verify_finite
    from stockpot.recipe.build import build_task
    from stockpot.run.record import encode
    from stockpot.soups.result import report_weights, weights_digest
    from stockpot.task.data import fingerprint

    with together(lambda: read_recipe(recipe, overrides)) as (wanted, listen):
        checkpoint = _open(weights, wanted)
        task = build_task(wanted, listen)
        ranks.on_first(lambda: verify_finite(checkpoint, listen))
        task.check_names(checkpoint.specs, spare=checkpoint.spare)
        task.load({name: checkpoint.tensor(name) for name in checkpoint.specs}, spare=checkpoint.spare)
        if ranks.active():
            own = {"fitting data": fingerprint(task.fit), "report data": task.report_fingerprints()}
            ranks.check_same({"weights": weights_digest(task), **own})
        ranks.announce(listen, task.device, "each scores a part of the samples")
        where = on or ("report" if task.has_report else "fit")
        sets = report_weights(task, listen) if where == "report" else {"fit": task.score(listen=listen)}
    if as_json:
        every = {name: encode(scores) for name, scores in sets.items()}
        metrics = {name: scores.metric.name for name, scores in sets.items()}
        first = next(iter(sets))
        about = {"path": str(checkpoint.path), "metric": metrics[first], "on": where}
        document({**about, "score": every[first], "sets": every, "metrics": metrics})
        return
    for name, scores in sets.items():
        metric, (low, high) = scores.metric.shown, scores.interval()
        loss = "" if math.isnan(scores.loss) else f", loss {scores.loss:.4f}"
        data = {"report": "report data", "fit": "fitting data"}.get(name, name)
        say(
            f"{metric.title} {metric.value(scores.value)} on {data}"
            f" (95 % interval {metric.bare(low)} to {metric.bare(high)}, n = {scores.n}{loss})"
        )


def _open(path: Path, recipe: Recipe) -> Checkpoint:
    from stockpot import files
    from stockpot.errors import RunError
    from stockpot.pool import open_checkpoint
    from stockpot.pool.lora import open_adapters
    from stockpot.pool.peft_folders import adapter_folder
    from stockpot.recipe.build import pool_base
    from stockpot.run.rebuild import recommended_soup
    from stockpot.run.record import RUN, SOUP
    from stockpot.soup.record import RECORD

    def opened(path: Path) -> Checkpoint:
        if (folder := adapter_folder(path)) is None:
            return open_checkpoint(path)
        (one,), *_ = open_adapters([folder], pool_base(recipe), recipe.pool.rename)
        return one

    method = path.parent if path.name == SOUP else path  # a method's folder in a run
    of_run = (method / RECORD).is_file() and (method.parent.parent / RUN).is_file()
    if of_run and (method / SOUP).is_dir():
        path = method / SOUP
    elif of_run or not path.exists():
        fix = "give a run directory for its recommended soup, RUN/methods/NAME/soup for another, or a checkpoint"
        if of_run:
            run = shlex.quote(shown(method.parent.parent))
            fix = f"this soup was not written; `stockpot rebuild {run} --method {method.name}` writes it"
        expected, found = "a saved soup, a run directory or a checkpoint", "nothing at this path"
        found = "the record of a soup without its weights" if path.exists() else found
        raise RunError.of(str(path), expected=expected, found=found, fix=fix)
    if (path / RUN).is_file():
        return opened(files.check_entries(path, recommended_soup(path)))
    if path.is_dir() and (path / RECORD).is_file():
        return opened(files.check_entries(path, path))  # a soup has its final names already
    if adapter_folder(path) is not None:
        return opened(path)
    return open_checkpoint(path, key=recipe.pool.key, rename=recipe.pool.rename)


def rebuild(
    run: RunOrSoup,
    method: Method = None,
    out: Target = None,
    pool: Ingredients = [],  # noqa: B006  (typer copies it)
    overwrite: Replace = False,
    as_json: Json = False,
) -> None:
    """Write a soup again from its record and the ingredients.

    Ingredients that have changed are refused. Where the soup is already there, its bytes are compared instead.

    Examples:

    ```
    stockpot rebuild run
    stockpot rebuild run --method hl+ --out soups/hl
    stockpot rebuild run --pool /new/place/of/the/checkpoints
    ```
    """
    from stockpot.run.rebuild import rebuild_soup

    with drawing() as listen:
        path, compared = rebuild_soup(
            run, method=method, out=out, ingredients=pool or None, overwrite=overwrite, listen=listen
        )
    if as_json:
        document({"soup": str(path), "compared": compared})
    else:
        say(f"{shown(path)}: rebuilt" + (" and compared; every byte is the same" if compared else ""))
        say_loading(path)


def report(run: Run, as_json: Json = False) -> None:
    """Write the report of a run again, and print its table, its decision and where its soup is.

    Examples:

    ```
    stockpot report run
    stockpot report run --json
    ```
    """
    from stockpot.report import summary_rows, write_report
    from stockpot.run.record import read_run

    path = write_report(run)
    if as_json:
        document({"report": str(path), "markdown": str(path.with_suffix(".md"))})
        return
    finished = bool(read_run(run).results)
    if finished:
        show(run, path)
    else:
        print_table(run)
    if (kinds := {row.kind for row in summary_rows(run)}) and "report" not in kinds:
        say("Scores on fitting data, which methods decide with: report data was not looked at.")
    if not finished:
        say(f"Report: {shown(path)}")

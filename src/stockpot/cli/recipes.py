"""A recipe's run: `stockpot cook` and `compare` make it, `report` tells of it, `evaluate` scores its soup or others."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from stockpot.cli.terminal import Json, Overrides, RecipeFile, document, read_recipe, say, shown, table, together
from stockpot.events import Listener

if TYPE_CHECKING:
    from stockpot.pool import Checkpoint
    from stockpot.recipe import Recipe


Out = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Directory for the results, instead of the recipe's.")
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Remove the run that is in that directory, with its results, and start anew."),
]
As = Annotated[
    str | None,
    typer.Option("--as", metavar="FORM", help="What a soup of LoRA adapters is written as: adapter, a rank, merged."),
]


def cook(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    form: As = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Cook one soup by the recipe's method.

    The method is `method.name`: crossfit (the default), best, uniform, greedy, learned, learned+, hl, hl+, mehl,
    mehl+. Called again after an interruption, it continues where it was.

    Examples:

    ```
    stockpot cook recipe.yaml
    stockpot cook recipe.yaml --set method.name=greedy --out runs/greedy
    stockpot cook recipe.yaml --set method.preset=paper --set method.name=mehl+
    stockpot cook recipe.yaml --as 64                    # of LoRA adapters: one of at most this rank
    ```
    """
    _cook("cook", recipe, overrides, out, form, as_json, overwrite=overwrite)


def compare(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    form: As = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Cook by every method, on one pool and one set of data, and compare.

    All methods decide before the report data is touched. Called again, it continues where it was; finished
    methods are not repeated. With another recipe or other data it refuses to, and says what differs.

    Methods: best, uniform, greedy, ensemble, learned, learned+, hl, hl+, mehl, mehl+, crossfit.

    Examples:

    ```
    stockpot compare recipe.yaml
    stockpot compare recipe.yaml --set 'method.methods=[best, greedy, crossfit]'
    stockpot compare recipe.yaml --set 'method.each={mehl+: {steps: 500}}'
    stockpot compare recipe.yaml --json > results.json
    ```
    """
    _cook("compare", recipe, overrides, out, form, as_json, overwrite=overwrite)


def _cook(
    kind: str, recipe: Path, overrides: list[str], out: Path | None, form: str | None, as_json: bool, overwrite: bool
) -> None:
    from stockpot.report import write_report

    with together(lambda: read_recipe(recipe, overrides, out, form)) as (wanted, listen):
        run = run_recipe(wanted, kind, title_of(recipe), listen, overwrite=overwrite)
    report = write_report(run)
    if as_json:
        document(summary(run, report))
    elif (soup := show(run, report)) is not None:
        same = (
            shown(run / "recipe.yaml") if overrides or form else str(recipe)
        )  # what ran, which may not be what is written
        say("Next:")
        say(f"  stockpot evaluate {shlex.quote(shown(soup))} {shlex.quote(same)}")
        say(f"  stockpot rebuild {shlex.quote(shown(run))}    # the same soup again, from its record")


def title_of(recipe: Path) -> str:
    """The recipe's name; where that says nothing, its folder's."""
    return recipe.absolute().parent.name or recipe.stem if recipe.stem == "recipe" else recipe.stem


def run_recipe(recipe: Recipe, kind: str, title: str, listen: Listener, *, overwrite: bool = False) -> Path:
    """Call `cook` or `compare` as the recipe says; the run directory. `kind`: cook, compare or demo."""
    from stockpot import cooking, ranks
    from stockpot.adapters.trackers import check_tracker
    from stockpot.recipe.build import build_pool, build_task, cook_arguments
    from stockpot.run.directory import check_recipe

    arguments = cook_arguments(recipe, kind, title, ["stockpot", *sys.argv[1:]])
    arguments["overwrite"] |= overwrite
    check_tracker(arguments["track"], arguments["run"])
    run: Path = arguments["run"]
    ranks.on_first(lambda: check_recipe(run, arguments["recipe"], overwrite=arguments["overwrite"]))
    pool, task = build_pool(recipe, listen), build_task(recipe, listen)
    function = cooking.cook if kind == "cook" else cooking.compare
    function(pool, task, listen=listen, **arguments)
    return run


def show(run: Path, report: Path) -> Path | None:
    """Table, verdict, and where things are; returns the recommended soup, if there is one."""
    from stockpot.report.page import to_keep
    from stockpot.report.reading import Run, rows_of
    from stockpot.run.verdict import advised
    from stockpot.soup.adapter import WRITTEN_AS
    from stockpot.table import short_headings

    found = Run(run)
    results, rows = found.results, rows_of(found)
    soup = None if results["recommended"] is None else found.soup
    say()
    if rows:
        marked = next((i for i, row in enumerate(rows) if row.chosen), None)
        table(short_headings(rows), [row.short_cells() for row in rows], marked=marked)
    say()
    if results["verdict"]:
        say(results["verdict"])
        for name, why in results["absent"].items():
            say(f"{name} is not in the table: {why}")
        for name, why in results["failed"].items():
            say(f"{name} failed: {why}", err=True)
        say()
    if (keep := to_keep(found)) is not None:
        say(f"Keep:   {shown(Path(keep[1]))}  ({keep[0]}, the best single model)")
    if soup is not None and found.chosen is not None:
        from stockpot.soup.card import loading

        word = "recommended: " if advised(results["verdict"]) else ""
        say(f"Soup:   {shown(soup)}  ({word}{found.chosen.name})")
        form = [note for note in found.chosen.notes if note.startswith(WRITTEN_AS)]
        for line in filter(None, [*form, *loading(soup, shown(soup))]):
            say(f"        {line}")
    elif results["verdict"] and results["recommended"] is None:
        say(f"Soup:   none was written; write one with: stockpot rebuild {shlex.quote(shown(run))} --method NAME")
    say(f"Report: {shown(report)}")
    return soup


def summary(run: Path, report: Path) -> dict[str, Any]:
    """The same for programs."""
    from stockpot.report.reading import Run, rows_of
    from stockpot.run.record import COSTS

    found = Run(run)
    methods = []
    for row, method in zip(rows_of(found), found.methods, strict=True):
        scores = method.record.scores
        sets = {name: {"score": scores.get(name), "difference": one.difference} for name, one in row.sets.items()}
        about = {"method": row.method, "data": row.kind, **next(iter(sets.values())), "sets": sets}
        methods.append({**about, **{key: method.result[key] for key in COSTS}})
    return {
        "run": str(run),
        "report": str(report),
        "soup": str(found.soup) if found.results["recommended"] and found.soup else None,
        **{key: found.results[key] for key in ("recommended", "verdict", "failed", "absent")},
        "methods": methods,
    }


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
    from stockpot.soup.soup import RECORD

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


def report(run: Run, as_json: Json = False) -> None:
    """Write the report of a run again, and print its table, its decision and where its soup is.

    Examples:

    ```
    stockpot report run
    stockpot report run --json
    ```
    """
    from stockpot.report import summary_rows, write_report

    path = write_report(run)
    if as_json:
        document({"report": str(path), "markdown": str(path.with_suffix(".md"))})
        return
    show(run, path)
    if (kinds := {row.kind for row in summary_rows(run)}) and "report" not in kinds:
        say("Scores on fitting data, which methods decide with: report data was not looked at.")

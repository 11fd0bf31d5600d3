"""`stockpot cook` and `stockpot compare`: a recipe's pool and task given to `cook` and `compare`, and how they end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot.cli.terminal import Json, Overrides, RecipeFile, document, read_recipe, say, shown, table
from stockpot.cli.together import together
from stockpot.events import Listener

if TYPE_CHECKING:
    from stockpot.recipe import Recipe
    from stockpot.run.record import MethodRecord
    from stockpot.table import Cell

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
    from stockpot.report.reading import Run
    from stockpot.run.record import read_run
    from stockpot.run.verdict import advised
    from stockpot.soup.adapter import WRITTEN_AS

    results = read_run(run).results
    soup = _recommended(run, results)
    print_table(run)
    say(results["verdict"])
    for name, why in results["absent"].items():
        say(f"{name} is not in the table: {why}")
    for name, why in results["failed"].items():
        say(f"{name} failed: {why}", err=True)
    say()
    if (keep := to_keep(Run(run))) is not None:
        say(f"Keep:   {shown(Path(keep[1]))}  ({keep[0]}, the best single model)")
    if soup is not None:
        from stockpot.soup.card import loading

        word = "recommended: " if advised(results["verdict"]) else ""
        say(f"Soup:   {shown(soup)}  ({word}{results['recommended']})")
        for note in next(one.result["notes"] for one in read_run(run).methods if one.name == results["recommended"]):
            if note.startswith(WRITTEN_AS):
                say(f"        {note}")
        for line in filter(None, loading(soup, shown(soup))):
            say(f"        {line}")
    elif results["recommended"] is None:
        say(f"Soup:   none was written; write one with: stockpot rebuild {shlex.quote(shown(run))} --method NAME")
    say(f"Report: {shown(report)}")
    return soup


def _recommended(run: Path, results: Mapping[str, Any]) -> Path | None:
    """The recommended soup, where there is one and it is written."""
    from stockpot.run.record import METHODS, SOUP, slug

    if results["recommended"] is None:
        return None
    soup = run / METHODS / slug(results["recommended"]) / SOUP
    return soup if soup.is_dir() else None


def print_table(run: Path) -> None:
    from stockpot.report import summary_rows
    from stockpot.table import short_headings

    rows = summary_rows(run)
    say()
    if rows:
        marked = next((i for i, row in enumerate(rows) if row.chosen), None)
        table(short_headings(rows), [row.short_cells() for row in rows], marked=marked)
    say()


def summary(run: Path, report: Path) -> dict[str, Any]:
    """The same for programs."""
    from stockpot.report import summary_rows
    from stockpot.run.record import read_run

    record = read_run(run)
    soup = _recommended(run, record.results)
    results = {one.name: one for one in record.methods}
    costs = ("seconds", "peak_host", "peak_device", "models_used")
    return {
        "run": str(run),
        "report": str(report),
        "soup": None if soup is None else str(soup),
        **{key: record.results[key] for key in ("recommended", "verdict", "failed", "absent")},
        "methods": [
            {
                "method": row.method,
                "data": row.kind,
                **_set(results[row.method], next(iter(row.sets)), row.first),
                "sets": {name: _set(results[row.method], name, cell) for name, cell in row.sets.items()},
                **{key: results[row.method].result[key] for key in costs},
            }
            for row in summary_rows(run)
        ],
    }


def _set(method: MethodRecord, name: str, cell: Cell) -> dict[str, Any]:
    return {"score": method.scores.get(name), "difference": cell.difference}

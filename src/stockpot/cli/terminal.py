"""What commands have in common: their arguments, and writing to the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.events import Listener, ignore
from stockpot.progress import drawing

if TYPE_CHECKING:
    from stockpot.recipe import Recipe


RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE.yaml", help="The recipe.", show_default=False)]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a value of the recipe, such as `method.lr=0.02`. `stockpot schema` lists all keys.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for programs.")]


def read_recipe(path: Path, overrides: Sequence[str], out: Path | None = None, form: str | None = None) -> Recipe:
    from stockpot.recipe import load_recipe

    where = [] if out is None else [f"output.dir={json.dumps(str(out.absolute()))}"]
    how = [] if form is None else [f"output.form={form}"]
    return load_recipe(path, [*overrides, *where, *how])


def say(text: str = "", *, err: bool = False) -> None:
    """`err`: for people only, kept out of what a program reads from stdout."""
    print(words.harmless(text), file=sys.stderr if err else sys.stdout)


def document(value: Any) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    print("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, marked: int | None = None) -> None:
    """First column to the left, the rest to the right; row `marked` stands out. Colours are for terminals alone."""
    for number, text in enumerate(words.aligned(headings, rows, marked), start=-1):
        typer.secho(text, bold=number in (-1, marked), fg="green" if number == marked else None)


def shown(path: Path) -> str:
    """Relative to here where that is shorter."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def say_loading(soup: Path) -> None:
    """The lines of Python that load what a command wrote."""
    from stockpot.soup.card import loading

    say("\n".join(["Load it:", *(f"    {line}" for line in loading(soup, shown(soup)) if line)]))


@contextlib.contextmanager
def together(read: Callable[[], Recipe]) -> Iterator[tuple[Recipe, Listener]]:
    """The recipe, the same on all ranks, and what shows progress; the first rank alone goes on after the block."""
    from stockpot import ranks

    ranks.join()
    with ranks.watched():
        recipe = read()
        if ranks.active():
            from stockpot.recipe.build import code_digests
            from stockpot.run.shapes import flat

            content = {name: value for name, value in recipe.resolved().items() if name != "base"}
            ranks.check_same({**flat(content), **{f"code {name}": one for name, one in code_digests(recipe).items()}})
        with drawing() if ranks.first() else contextlib.nullcontext(ignore) as listen:
            yield recipe, listen
    first = ranks.first()
    ranks.leave()
    if not first:
        raise typer.Exit

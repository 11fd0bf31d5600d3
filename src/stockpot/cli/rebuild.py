"""`stockpot rebuild`: the same soup again, byte for byte, from its small record and the ingredients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stockpot.cli.failures import guarded
from stockpot.cli.options import Json

Run = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or a saved soup.", show_default=False)
]
Method = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="Which method's soup. Default: the recommended."),
]
Target = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write it. Default: its place in the run directory."),
]
Ingredients = Annotated[
    list[Path],
    typer.Option("--pool", metavar="PATH", help="Where the ingredients are now; they are known by content."),
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]


@guarded
def rebuild(
    run: Run,
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
    from stockpot.cli.drawing import drawing
    from stockpot.cli.shell import document, say, shown
    from stockpot.run.soups import rebuild_soup

    with drawing() as listen:
        path, compared = rebuild_soup(
            run, method=method, out=out, ingredients=pool or None, overwrite=overwrite, listen=listen
        )
    if as_json:
        document({"soup": str(path), "compared": compared})
    elif compared:
        say(f"{shown(path)}: rebuilt and compared; every byte is the same")
    else:
        say(f"{shown(path)}: rebuilt")

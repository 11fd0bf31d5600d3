"""A command that torchrun or srun has started several times: its processes do together what one would do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from stockpot.events import Listener, ignore
from stockpot.progress import drawing

if TYPE_CHECKING:
    from stockpot.recipe import Recipe


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

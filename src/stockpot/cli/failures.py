"""What a person sees when something goes wrong: a short message, an exit code, and what to do next."""

from __future__ import annotations

import functools
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer

from stockpot.errors import StockpotError

F = TypeVar("F", bound=Callable[..., None])
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def guarded(function: F) -> F:
    """For commands that leave nothing behind when they are stopped."""
    return _guarded(function, resumable=False)


def resumable(function: F) -> F:
    """For commands that continue when they are called again."""
    return _guarded(function, resumable=True)


def _guarded(function: F, resumable: bool) -> F:
    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        try:
            function(*args, **options)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            again = f"; resume with: {_again()}" if resumable else ""
            typer.echo(f"\ninterrupted{again}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except StockpotError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
        except BrokenPipeError:
            # The reader of our output has gone; nothing may be written to it again, not even on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            typer.echo(_crash(error), err=True)
            raise typer.Exit(1) from None

    return command  # type: ignore[return-value]


def _again() -> str:
    """The same command without --overwrite, which would throw away what is to be continued."""
    return shlex.join(["stockpot", *(arg for arg in sys.argv[1:] if arg != "--overwrite")])


def _crash(error: Exception) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        first = "error: out of memory; load fewer models at a time with --set method.block_size=2"
    elif isinstance(error, OSError):
        first = f"error: {error}"
    else:
        first = f"error: unexpected {type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    with tempfile.NamedTemporaryFile(
        "w", prefix="stockpot-", suffix=".txt", delete=False, encoding="utf-8"
    ) as file:
        file.write("".join(traceback.format_exception(error)))
    return (
        f"{first}\n  Details were written to {Path(file.name)}.\n"
        "  If this looks like our mistake, please report it with that file and the output of `stockpot doctor`."
    )

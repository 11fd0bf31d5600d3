"""All commands by name. Each loads what it needs when it is called, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from stockpot._version import __version__
from stockpot.cli.compare import compare
from stockpot.cli.cook import cook
from stockpot.cli.demo import demo
from stockpot.cli.doctor import doctor
from stockpot.cli.evaluate import evaluate
from stockpot.cli.finetune import finetune
from stockpot.cli.inspect import inspect
from stockpot.cli.rebuild import rebuild
from stockpot.cli.report import report
from stockpot.cli.schema import schema

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stockpot {__version__}")
        raise typer.Exit


@app.callback()
def stockpot(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn many fine-tuned checkpoints of one model into a single better one: a model soup.

    New here? `stockpot demo` makes real soups on this machine in about a minute.
    """


for _command in (demo, inspect, cook, compare, finetune, evaluate, rebuild, report, schema, doctor):
    app.command()(_command)

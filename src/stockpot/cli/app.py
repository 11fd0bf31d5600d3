"""All commands by name, and what a person sees when one goes wrong: a short message, an exit code, what to do next.

Each command loads what it needs when it is called, so that help is quick.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Any

import typer

from stockpot import signals
from stockpot._version import __version__
from stockpot.cli.inspect import inspect
from stockpot.cli.pools import demo, finetune
from stockpot.cli.recipes import compare, cook, evaluate, report
from stockpot.cli.soups import average, export, push, rebuild
from stockpot.cli.terminal import Json, document, say, shown
from stockpot.errors import RankError, StockpotError, WriteError

SHELL = 128  # plus the number of the signal, as shells have it
# What each command that needs memory can do with less.
_LESS = {
    "finetune": "start fewer processes at once, or train with smaller batches: --set finetune.batch_size=32",
    "evaluate": "use smaller batches with --set data.batch_size=32",
}


def guarded(function: Callable[..., None], *, resumable: bool) -> Callable[..., None]:
    """The command as people call it. `resumable`: called again, it continues where it was."""

    @functools.wraps(function)
    def command(*args: Any, **options: Any) -> None:
        again = f"; resume with: {_again()}" if resumable else ""
        try:
            with signals.handled(_stop):
                function(*args, **options)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt as error:
            if _silent():
                raise typer.Exit(1) from None
            number = error.args[0] if error.args else signal.SIGINT
            word = "interrupted" if number == signal.SIGINT else "terminated"
            _tell(f"\n{word}{again}")
            if (kept := getattr(error, "kept", None)) is not None:
                said = shlex.join(["stockpot", "rebuild", shown(kept), "--out", "best-so-far"])
                _tell(f"  the best soup so far, without going on: {said}")
            raise typer.Exit(SHELL + number) from None
        except BrokenPipeError:
            # The reader of our output has gone; nothing may be written to it again, not even on exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except Exception as error:
            if _silent(error, resumable):
                raise typer.Exit(1) from None
            words = f"error: {error}" if isinstance(error, StockpotError) else _crash(error)
            _tell(words)
            if resumable and (isinstance(error, WriteError) or _no_memory(error)):
                _tell(f"  What was done is kept{again}")
            _said(words.partition("\n")[0])
            raise typer.Exit(1) from None

    return command


def _silent(error: Exception | None = None, resumable: bool = False) -> bool:
    """Whether this is one of several ranks, and another one says what there is to say."""
    if "stockpot.ranks" not in sys.modules:
        return False  # nothing that ranks do has begun, and torch need not be loaded for a message
    from stockpot import ranks

    if error is None or not ranks.active():
        return not ranks.first()
    if isinstance(error, RankError):
        if ranks.speaks():
            which = str(error).partition(": ")[0]  # it has said by itself what went wrong, if it could
            _tell(
                f"stopped, because {which}" + (f"; what was done is kept; resume with: {_again()}" if resumable else "")
            )
        return True
    if not ranks.all_here() or ranks.first():
        return False  # an accident of this rank alone, or for the first one to say
    _said("")
    return True


def _said(words: str) -> None:
    """The first of several ranks that end together takes the others with it, so they wait until this is told."""
    if "stockpot.ranks" in sys.modules:
        from stockpot import ranks

        if words:
            ranks.last_words(words)
        ranks.all_here(seconds=2)


def _again() -> str:
    """The same command without --overwrite, which would throw away what is to be continued."""
    command = ["torchrun", "...", "-m", "stockpot"] if "TORCHELASTIC_RUN_ID" in os.environ else ["stockpot"]
    return shlex.join([*command, *(arg for arg in sys.argv[1:] if arg != "--overwrite")])


def _stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (a handler's shape)
    """SIGTERM and a closed terminal end a command as Ctrl-C does, so that everything is saved and tidied up alike."""
    raise KeyboardInterrupt(number)


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        say(text, err=True)


def _no_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)  # PyTorch's allocator on the host has no error of its own
    return isinstance(error, RuntimeError) and ("allocate memory" in text or "not enough memory" in text)


def _crash(error: Exception) -> str:
    """What failed, and where the whole story is."""
    said = str(error).strip().partition("\n")[0]
    if _no_memory(error):
        less = "load fewer models at a time with --set method.block_size=2"
        first = f"out of memory; {_LESS.get(sys.argv[1] if len(sys.argv) > 1 else '', less)}"
    else:
        first = str(error) if isinstance(error, OSError) else f"unexpected {type(error).__name__}: {said}"
    text = "".join(traceback.format_exception(error))
    with contextlib.suppress(OSError):  # no room there either
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="stockpot-", suffix=".txt", delete=False
        ) as file:
            file.write(text)
        text = f"  Details were written to {file.name}.\n"
    ask = "If this looks like our mistake, please report it with that file and the output of `stockpot doctor`."
    return f"error: {first}\n{text}  {ask}"


# Extra -> the packages that make it work.
_EXTRAS = {
    "cli": ("typer", "rich", "pydantic", "PyYAML", "jinja2"),
    "demo": ("scikit-learn",),
    "transformers": ("transformers", "tokenizers"),
    "vision": ("timm", "torchvision", "pillow"),
    "clip": ("open_clip_torch",),
    "tables": ("pyarrow",),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow-skinny",),
    "wandb": ("wandb",),
    "lightning": ("lightning",),
}

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


def schema() -> None:
    """Print the JSON schema of recipes, for editors that complete and check YAML.

    Examples:

    ```
    stockpot schema > recipe.schema.json
    # then, as the first line of a recipe:
    # yaml-language-server: $schema=recipe.schema.json
    ```
    """
    from stockpot.recipe import json_schema

    document(json_schema())


def doctor(as_json: Json = False) -> None:
    """Describe the environment, for bug reports.

    Examples:

    ```
    stockpot doctor
    stockpot doctor --json > doctor.json
    ```
    """
    import torch

    from stockpot import words
    from stockpot.run.directory import environment, installed

    facts = environment("cuda" if torch.cuda.is_available() else None)
    extras = {extra: {name: installed(name) for name in names} for extra, names in _EXTRAS.items()}
    if as_json:
        document({"stockpot": __version__, **facts, "extras": extras})
        return
    lines = {
        "stockpot": __version__,
        "python": facts["python"],
        "torch": f"{facts['torch']}, {facts['threads']} threads",
        "platform": facts["platform"],
        "processor": f"{facts['cpu']}, {facts['cores']} cores",
        "memory": words.size(facts["memory"]),
        "device": facts["device"],
    }
    for extra, packages in extras.items():
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        missing = ", ".join(name for name, version in packages.items() if version is None)
        hint = f"missing {missing}: pip install 'stockpot[{extra}]'" if missing else ""
        lines[extra] = "; ".join(filter(None, (have, hint)))
    for name, text in lines.items():
        say(f"{name:<13}{text}")


for _command in (
    average,
    demo,
    inspect,
    cook,
    compare,
    finetune,
    evaluate,
    rebuild,
    export,
    push,
    report,
    schema,
    doctor,
):
    app.command()(guarded(_command, resumable=_command in (demo, cook, compare, finetune)))

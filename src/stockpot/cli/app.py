"""All commands by name. Each loads what it needs when it is called, so that help is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from stockpot._version import __version__
from stockpot.cli.average import average
from stockpot.cli.cooking import compare, cook
from stockpot.cli.evaluate import evaluate, rebuild, report
from stockpot.cli.failures import guarded
from stockpot.cli.inspect import inspect
from stockpot.cli.pools import demo, finetune
from stockpot.cli.sharing import export, push
from stockpot.cli.terminal import Json, document, say

# Extra -> the packages that make it work.
_EXTRAS = {
    "cli": ("typer", "rich", "pydantic", "PyYAML", "jinja2", "matplotlib"),
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
    from stockpot.run.environment import environment, installed

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

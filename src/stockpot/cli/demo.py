"""`stockpot demo`: real soups on embedded data, from pre-training to the report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json

Folder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Another seed makes other models and other splits.")]
Again = Annotated[bool, typer.Option("--overwrite", help="Forget an earlier demo in that directory.")]


@resumable
def demo(out: Folder = Path("demo"), seed: Seed = 0, overwrite: Again = False, as_json: Json = False) -> None:
    """Make real soups on this machine in about a minute.

    Pre-trains a small vision transformer on scikit-learn's handwritten digits, fine-tunes it twelve times with
    random hyperparameters, cooks soups of the twelve by every method, and writes soup and report. Needs no
    network and no GPU.

    Examples:

    ```
    stockpot demo
    stockpot demo --out /tmp/soup --seed 1
    ```
    """
    import os
    import sys
    import time

    from stockpot.cli.drawing import drawing
    from stockpot.cli.ending import show, summary, written_report
    from stockpot.cli.shell import document, say, shown
    from stockpot.demo import make_zoo
    from stockpot.demo.recipe import write_recipe
    from stockpot.demo.zoo import one_thread
    from stockpot.events import Event
    from stockpot.report import words
    from stockpot.run.recipe_job import run_compare

    began = time.perf_counter()
    if overwrite:
        _clear(out)
    path, recipe = write_recipe(out, seed)
    with drawing() as listen, one_thread():
        listen(Event("phase", {"text": "1 of 3: pre-training and fine-tuning twelve ingredients"}))
        make_zoo(out, seed=seed, parallel=min(2, os.cpu_count() or 1), listen=listen)
        listen(Event("phase", {"text": "2 of 3: cooking by every method"}))
        outcome = run_compare(
            recipe,
            title="Digits, a demo",
            kind="demo",
            growth=True,
            command=["stockpot", *sys.argv[1:]],
            listen=listen,
        )
        listen(Event("phase", {"text": "3 of 3: writing the report"}))
        report = written_report(outcome.path)
    if as_json:
        document(summary(outcome, report))
        return
    show(outcome, report)
    peak = f"; peak memory {words.size(_peak())}" if _peak() else ""
    say(f"Took {words.seconds(time.perf_counter() - began)}{peak}.")
    say()
    quoted = shlex.quote(shown(path))
    say("Next:")
    say(f"  open {shown(report)} in a browser")
    say(
        f"  stockpot inspect {shlex.quote(shown(out / 'pool'))}                 # look at the twelve ingredients"
    )
    say(f"  stockpot cook {quoted} --out my-soup   # one method, one soup")
    say(f"  your own checkpoints: docs/tutorial.md, or write a recipe like {quoted}")


def _clear(out: Path) -> None:
    import shutil

    for name in ("pool", "run"):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in ("pretrained.safetensors", "recipe.yaml"):
        (out / name).unlink(missing_ok=True)


def _peak() -> int:
    """Largest resident memory of this process, file-backed pages included; 0 where unknown."""
    try:
        import resource
    except ImportError:
        return 0
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    import sys

    return kilobytes if sys.platform == "darwin" else kilobytes * 1024

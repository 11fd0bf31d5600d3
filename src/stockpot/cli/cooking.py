"""`stockpot cook`, `stockpot compare` and `stockpot demo`: recipes on top of `stockpot.cooking`."""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot.cli.failures import resumable
from stockpot.cli.options import Json, Out, Overrides, Overwrite, RecipeFile, read_recipe, title_of
from stockpot.cli.outcome import end, show, summary
from stockpot.cli.progress import drawing, scalars
from stockpot.cli.terminal import document, say, shown
from stockpot.errors import RunError, describe
from stockpot.events import Event, Listener
from stockpot.report import words

if TYPE_CHECKING:
    from stockpot.recipe import Recipe

Growth = Annotated[
    bool,
    typer.Option(
        "--growth", help="Also cook with the first half, quarter and eighth of the ingredients. Takes longer."
    ),
]
DemoFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Another seed makes other models and other splits.")]
Again = Annotated[bool, typer.Option("--overwrite", help="Forget an earlier demo in that directory.")]
DEMO_MARK = "# What `stockpot demo` ran."  # how a demo's recipe begins


@resumable
def cook(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
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
    ```
    """
    from stockpot.cooking import cook as cook_soup
    from stockpot.recipe.build import cook_arguments

    wanted = read_recipe(recipe, overrides, out)
    arguments = cook_arguments(wanted, title_of(recipe), ["stockpot", *sys.argv[1:]])
    with drawing() as listen:
        _run(cook_soup, wanted, arguments, overwrite, listen)
    end(arguments["run"], recipe, as_json, changed=bool(overrides))


@resumable
def compare(
    recipe: RecipeFile,
    overrides: Overrides = [],  # noqa: B006  (typer copies it)
    out: Out = None,
    growth: Growth = False,
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
    stockpot compare recipe.yaml --growth --out runs/growth
    stockpot compare recipe.yaml --json > results.json
    ```
    """
    from stockpot.cooking import compare as compare_soups
    from stockpot.recipe.build import compare_arguments

    wanted = read_recipe(recipe, overrides, out)
    arguments = compare_arguments(wanted, title_of(recipe), ["stockpot", *sys.argv[1:]])
    with drawing() as listen:
        _run(compare_soups, wanted, {**arguments, "growth": growth}, overwrite, listen)
    end(arguments["run"], recipe, as_json, changed=bool(overrides))


def _run(function: Any, recipe: Recipe, arguments: dict[str, Any], overwrite: bool, listen: Listener) -> None:
    """Call `cook` or `compare` with the recipe's pool and task."""
    from stockpot.recipe.build import build_pool, build_task

    overwrite = overwrite or arguments["overwrite"]
    if not recipe.output.tensorboard:
        pool, task = build_pool(recipe, listen), build_task(recipe, listen)
        function(pool, task, listen=listen, **{**arguments, "overwrite": overwrite})
        return
    with scalars(arguments["run"] / "tensorboard", listen) as both:
        pool, task = build_pool(recipe, listen), build_task(recipe, listen)
        function(pool, task, listen=both, **{**arguments, "overwrite": overwrite})


@resumable
def demo(
    out: DemoFolder = Path("demo"), seed: Seed = 0, overwrite: Again = False, as_json: Json = False
) -> None:
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

    from stockpot.cooking import compare as compare_soups
    from stockpot.demo import make_zoo
    from stockpot.demo.recipe import write_recipe
    from stockpot.demo.zoo import one_thread
    from stockpot.recipe.build import compare_arguments
    from stockpot.report import write_report

    began = time.perf_counter()
    _require_demo(out)
    if overwrite:
        _clear(out)
    path, recipe = write_recipe(out, seed)
    arguments = compare_arguments(recipe, "Digits, a demo", ["stockpot", *sys.argv[1:]], "demo")
    with drawing() as listen, one_thread():
        listen(Event("phase", {"text": "1 of 3: pre-training and fine-tuning twelve ingredients"}))
        make_zoo(out, seed=seed, parallel=min(2, os.cpu_count() or 1), listen=listen)
        listen(Event("phase", {"text": "2 of 3: cooking by every method"}))
        _run(compare_soups, recipe, {**arguments, "growth": True}, False, listen)
        listen(Event("phase", {"text": "3 of 3: writing the report"}))
        report = write_report(arguments["run"])
    if as_json:
        document(summary(arguments["run"], report))
        return
    show(arguments["run"], report)
    peak = f"; peak memory {words.size(_peak())}" if _peak() else ""
    say(f"Took {words.seconds(time.perf_counter() - began)}{peak}.")
    say()
    quoted = shlex.quote(shown(path))
    pool = shlex.quote(shown(out / "pool"))
    say("Next:")
    say(f"  open {shown(report)} in a browser")
    say(f"  stockpot inspect {pool}                 # look at the twelve ingredients")
    say(f"  stockpot cook {quoted} --out my-soup   # one method, one soup")
    say(f"  your own checkpoints: docs/tutorial.md, or write a recipe like {quoted}")


def _require_demo(out: Path) -> None:
    """Refuse a directory in which somebody else's recipe, pool or run lies: it is neither run nor cleared."""
    recipe = out / "recipe.yaml"
    try:
        with recipe.open(encoding="utf-8") as file:
            ours = file.readline().startswith(DEMO_MARK)
    except (OSError, UnicodeDecodeError):
        ours = False
    theirs = [name for name in ("recipe.yaml", "pool", "run") if (out / name).exists()]
    if theirs and not ours:
        raise RunError(
            describe(
                f"demo directory {out}",
                expected="a new directory, or one of an earlier demo",
                found=f"{', '.join(theirs)} that no demo made",
                fix="choose another directory with --out; nothing was changed",
            )
        )


def _clear(out: Path) -> None:
    """Remove what a demo makes. Only called where `_require_demo` has recognised one."""
    for name in ("pool", "run"):
        if not (out / name).is_symlink():
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
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024

"""`stockpot average`: a soup without data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.cli.cooking import As
from stockpot.cli.evaluate import Replace
from stockpot.cli.inspect import Key, Mixed, Rename, prefixes_of
from stockpot.cli.terminal import Json, document, say, say_loading, shown, table
from stockpot.progress import drawing

if TYPE_CHECKING:
    import torch

    from stockpot.soup import Soup

Models = Annotated[
    list[str], typer.Argument(metavar="MODEL...", help="Checkpoints, folders, patterns.", show_default=False)
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where to write the soup.", show_default=False)]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="0.2,0.8", help="One for each model, in their order; divided by their sum."),
]
Method = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="uniform, weighted (with --weights), ema (--decay), model_stock."),
]
Decay = Annotated[float | None, typer.Option("--decay", metavar="D", help="ema: what each step keeps of the average.")]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="MODEL",
        help="What the models began as: adds their differences to it. Of LoRA adapters: their base.",
    ),
]
Type = Annotated[
    str | None, typer.Option("--dtype", metavar="TYPE", help="Such as bfloat16. Default: the models' own.")
]
Shard = Annotated[str, typer.Option("--max-shard", metavar="SIZE", help="Bytes of a file at most.")]
AllSteps = Annotated[bool, typer.Option("--all-steps", help="Of runs: every checkpoint, not the best or last alone.")]


def average(
    models: Models,
    out: Out,
    weights: Weights = None,
    method: Method = None,
    decay: Decay = None,
    base: Base = None,
    form: As = None,
    dtype: Type = None,
    all_steps: AllSteps = False,
    max_shard: Shard = "5GB",
    key: Key = None,
    rename: Rename = [],  # noqa: B006  (typer copies it)
    mixed_dtypes: Mixed = False,
    overwrite: Replace = False,
    as_json: Json = False,
) -> None:
    """Average models in weight space: no data, no recipe, in the memory of a few tensors.

    Config, tokenizer and the like come along from the first model. With `--base`, weights are taken as they are and
    differences to the base are added up (task arithmetic). Of each run that a Trainer, Lightning or timm left, the best
    checkpoint is taken, or the last; of a run that is given alone, all. `hf://name/model` is a model of the Hub.

    Examples:

    ```
    stockpot average 'runs/*/checkpoint-200' --out soup
    stockpot average model_a model_b --weights 0.2,0.8 --out soup
    stockpot average runs/ --out soup                  # one checkpoint of each run
    stockpot average runs/long --method ema --decay 0.5 --out soup
    stockpot average math code --base base --weights 0.4,0.4 --out soup
    stockpot average a b c --base base --method model_stock --out soup
    stockpot average adapters/ --out soup --as 64      # LoRA adapters: one, of at most this rank
    stockpot average mergekit.yaml --out soup          # merge_method: linear
    ```
    """
    from stockpot.recipe import plain_yaml
    from stockpot.soup.average import average
    from stockpot.soup.mergekit import soup_of

    if weights is not None and (loose := [one for one in models if _is_number(one) and not Path(one).exists()]):
        raise typer.BadParameter(
            f"give all of them as in --weights {weights},{','.join(loose)}", param_hint="--weights"
        )
    opening: dict[str, Any] = {"key": key, "rename": prefixes_of(rename), "mixed_dtypes": mixed_dtypes}
    with drawing() as listen:
        if len(models) == 1 and models[0].endswith((".yaml", ".yml")):
            own = {"--weights": weights, "--method": method, "--decay": decay, "--base": base, "--as": form}
            if given := [
                name for name, value in {**own, "--all-steps": all_steps or None}.items() if value is not None
            ]:
                raise typer.BadParameter("not with a mergekit configuration, which says it all", param_hint=given[0])
            soup, stored = soup_of(plain_yaml(Path(models[0])), listen, **opening)
            soup.save(out, dtype=_dtype(dtype) or stored, max_shard=max_shard, overwrite=overwrite, listen=listen)
        else:
            soup = average(
                models, out, weights=_numbers(weights), method=method, decay=decay, base=base, form=_form(form),
                dtype=_dtype(dtype),
                max_shard=max_shard, overwrite=overwrite, listen=listen, all_steps=all_steps, **opening,
            )  # fmt: skip
    if as_json:
        document(_summary(soup, out))
        return
    table(("model", "weight"), [(one["name"], one["weight"]) for one in _summary(soup, out)["ingredients"]])
    size = sum(file.stat().st_size for file in out.iterdir() if file.suffix == ".safetensors")
    say(f"\nSoup: {shown(out)}  ({words.size(size)}; its card is README.md)")
    say_loading(out)


def _summary(soup: Soup, out: Path) -> dict[str, Any]:
    from stockpot.soup.card import ingredients_of

    made = ingredients_of(soup.pool, soup.W)
    ingredients = [{"name": one.name, "weight": one.weight, "digest": one.digest} for one in made]
    return {"soup": str(out), **soup.about, "ingredients": ingredients}


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers as in 0.2,0.8, found {text!r}", param_hint="--weights") from None


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _form(text: str | None) -> Any:
    return "auto" if text is None else int(text) if text.isdigit() else text


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        expected = "float32, bfloat16, float16 or float64"
        raise typer.BadParameter(f"expected {expected}, found {name!r}", param_hint="--dtype")
    return dtype

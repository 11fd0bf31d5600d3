"""Soups without data and recipe: `stockpot average` makes one, `rebuild`, `export` and `push` take one elsewhere."""

from __future__ import annotations

import math
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.cli.inspect import Key, Mixed, Rename, prefixes_of
from stockpot.cli.recipes import As
from stockpot.cli.terminal import Json, document, say, say_loading, shown, table
from stockpot.errors import RunError
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
    from stockpot.soup.average import average, from_mergekit

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
            soup, stored = from_mergekit(plain_yaml(Path(models[0])), listen, **opening)
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


RunOrSoup = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, or a saved soup.", show_default=False)]
Of = Annotated[
    str | None, typer.Option("--method", metavar="NAME", help="Which method's soup. Default: the recommended.")
]
Place = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Where to write it. Default: its place in the run directory."),
]
Ingredients = Annotated[
    list[Path], typer.Option("--pool", metavar="PATH", help="Where the ingredients are now; they are known by content.")
]
Replace = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]


Target = Annotated[Path, typer.Argument(metavar="FILE", help="What to write.", show_default=False)]
Repository = Annotated[str, typer.Argument(metavar="NAME/MODEL", help="The repository.", show_default=False)]
Private = Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")]
_CONFIGURATIONS, _NESTED, _STATE_DICTS = (".yaml", ".yml"), (".pth.tar", ".ckpt"), (".pt", ".pth", ".bin")
# What Lightning wants in a file beside the weights; an ingredient of its own says more, and better.
_LIGHTNING = {"pytorch-lightning_version": "2.2.0", "epoch": 0, "global_step": 0}
_HYPERPARAMETERS = ("hparams_name", "hyper_parameters", "hparams_type")
# For rebuilding on this machine; the record holds the paths of its files.
_OURS = ("soup.json", "statistics.safetensors")


def rebuild(
    run: RunOrSoup,
    method: Of = None,
    out: Place = None,
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
    from stockpot.run.rebuild import rebuild_soup

    with drawing() as listen:
        path, compared = rebuild_soup(
            run, method=method, out=out, ingredients=pool or None, overwrite=overwrite, listen=listen
        )
    if as_json:
        document({"soup": str(path), "compared": compared})
    else:
        say(f"{shown(path)}: rebuilt" + (" and compared; every byte is the same" if compared else ""))
        say_loading(path)


def export(source: RunOrSoup, target: Target, pool: Ingredients = [], overwrite: Replace = False) -> None:  # noqa: B006
    """Write a soup in the form of another tool; the ending of the file says which.

    `.yaml`: a mergekit configuration that gives the same weights. `.pt`, `.pth`, `.bin`: a state dict. `.pth.tar`: a
    state dict under the key `state_dict`, as timm has it. `.ckpt`: the same with the hyperparameters of an ingredient
    that Lightning wrote, for `load_from_checkpoint`.

    Examples:

    ```
    stockpot export soup merge.yaml
    stockpot export run model_best.pth.tar
    ```
    """
    import torch

    from stockpot import files
    from stockpot.run.rebuild import record_of
    from stockpot.soup import Soup
    from stockpot.soup.average import to_mergekit
    from stockpot.soup.soup import saved_as

    place, name = record_of(source), target.name.lower()
    if not name.endswith((*_CONFIGURATIONS, *_STATE_DICTS, *_NESTED)):
        expected = f"expected an ending among {', '.join((*_CONFIGURATIONS, *_STATE_DICTS, *_NESTED))}"
        raise typer.BadParameter(f"{expected}, found {target.name!r}", param_hint="FILE")
    if target.exists() and not overwrite:
        raise typer.BadParameter(f"{shown(target)} exists; add --overwrite to replace it", param_hint="FILE")
    with drawing() as listen:
        soup, dtype = Soup.load(place, ingredients=pool or None, listen=listen), saved_as(place)[0]
        if name.endswith(_CONFIGURATIONS):
            files.write_bytes(target, to_mergekit(soup, dtype).encode())
        else:
            state = soup.state_dict(dtype, listen)
            with files.file(target) as beside:
                more = _of_lightning(soup) if name.endswith(".ckpt") else {}
                torch.save({**more, "state_dict": state} if name.endswith(_NESTED) else state, beside)
    say(f"{shown(target)}: written")


def _of_lightning(soup: Soup) -> dict[str, Any]:
    from stockpot.pool.torch_files import values_of

    donor = soup.pool.checkpoints[soup.layout.donor]
    known = values_of(donor.path) if donor.format == "torch" else {}
    wanted = (*_LIGHTNING, *_HYPERPARAMETERS) if "pytorch-lightning_version" in known else ()
    return {**_LIGHTNING, **{name: known[name] for name in wanted if name in known}}


def push(source: RunOrSoup, repository: Repository, private: Private = False, dry_run: DryRun = False) -> None:
    """Upload a soup to the Hugging Face Hub, as you are logged in there (`hf auth login`).

    Sends weights, config, tokenizer and the model card. The record `soup.json` stays here, because it holds the paths
    of the ingredients on this machine.

    Examples:

    ```
    stockpot push soup me/my-soup --dry-run
    stockpot push run me/my-soup --private
    ```
    """
    from stockpot import files
    from stockpot.adapters.code import need
    from stockpot.run.rebuild import recommended_soup
    from stockpot.run.record import RUN

    folder = recommended_soup(source) if (source / RUN).is_file() else source
    if lacking := [name for name in ("README.md", "soup.json") if not (folder / name).is_file()]:
        fix = "give the folder of a soup, or a run that has written one"
        raise RunError.of(str(source), expected="a saved soup with its card", found=f"no {lacking[0]}", fix=fix)
    files.check_entries(folder, folder)
    hub = need("huggingface_hub")
    try:
        need("huggingface_hub.utils").validate_repo_id(repository)
    except need("huggingface_hub.errors").HFValidationError as error:
        raise typer.BadParameter(str(error), param_hint="NAME/MODEL") from None
    sent = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in _OURS)
    if dry_run:
        data = hub.ModelCard.load(folder / "README.md").data
        table(("file", "size"), [(file.name, words.size(file.stat().st_size)) for file in sent])
        say(f"\nbase models: {', '.join(data.base_model or []) or 'none known'}; tags: {', '.join(data.tags or [])}")
        say(f"Nothing was sent. Without --dry-run, this goes to https://huggingface.co/{repository}")
        return
    try:
        hub.create_repo(repository, private=private, exist_ok=True)
        place = hub.upload_folder(
            repo_id=repository, folder_path=folder, allow_patterns=[escape(file.name) for file in sent]
        )
    except Exception as error:  # of any of the libraries below it, as those for the network
        found = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = "log in (`hf auth login`), check the name and the network"
        raise RunError.of(f"upload to {repository}", "the Hub to take it", found, fix) from error
    say(f"Sent to {place}")

"""Where soups go: `stockpot export`, to the form of another tool, and `stockpot push`, to the Hugging Face Hub."""

from __future__ import annotations

from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stockpot import words
from stockpot.cli.evaluate import Ingredients, Replace, RunOrSoup
from stockpot.cli.terminal import say, shown, table
from stockpot.errors import RunError
from stockpot.progress import drawing

if TYPE_CHECKING:
    from stockpot.soup import Soup

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
    from stockpot.soup.mergekit import configuration
    from stockpot.soup.record import saved_as

    place, name = record_of(source), target.name.lower()
    if not name.endswith((*_CONFIGURATIONS, *_STATE_DICTS, *_NESTED)):
        expected = f"expected an ending among {', '.join((*_CONFIGURATIONS, *_STATE_DICTS, *_NESTED))}"
        raise typer.BadParameter(f"{expected}, found {target.name!r}", param_hint="FILE")
    if target.exists() and not overwrite:
        raise typer.BadParameter(f"{shown(target)} exists; add --overwrite to replace it", param_hint="FILE")
    with drawing() as listen:
        soup, dtype = Soup.load(place, ingredients=pool or None, listen=listen), saved_as(place)[0]
        if name.endswith(_CONFIGURATIONS):
            files.write_bytes(target, configuration(soup, dtype).encode())
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
    from stockpot.run.rebuild import recommended_soup
    from stockpot.run.record import RUN

    folder = recommended_soup(source) if (source / RUN).is_file() else source
    if lacking := [name for name in ("README.md", "soup.json") if not (folder / name).is_file()]:
        fix = "give the folder of a soup, or a run that has written one"
        raise RunError.of(str(source), expected="a saved soup with its card", found=f"no {lacking[0]}", fix=fix)
    files.check_entries(folder, folder)
    hub = _hub()
    try:
        hub.utils.validate_repo_id(repository)
    except hub.errors.HFValidationError as error:
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
    except (hub.errors.HfHubHTTPError, OSError) as error:
        found, fix = (
            (str(error).strip() or type(error).__name__).splitlines()[0],
            "log in (`hf auth login`), check the name and the network",
        )
        raise RunError.of(f"upload to {repository}", expected="the Hub to take it", found=found, fix=fix) from error
    say(f"Sent to {place}")


def _hub() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        fix = "pip install 'stockpot[transformers]'"
        raise RunError.of("library huggingface_hub", expected="an installed one", found="none", fix=fix) from error
    return huggingface_hub

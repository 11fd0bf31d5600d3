"""Models of the Hugging Face Hub: from its cache, and downloaded where that is asked for (`hf://name/model`)."""

from __future__ import annotations

import re
from pathlib import Path

from stockpot.files import read_json
from stockpot.pool.source import HUB_NAME, reason, refusal

SCHEME = "hf://"
_REVISION = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*")
_BESIDE = ["*.json", "*.txt", "*.model", "*.jinja"]


def cached(name: str, revision: str = "main") -> Path | None:
    """The folder of a model in the cache; nothing is downloaded."""
    # The library would read whatever file a revision leads to, from the cache on.
    if not _REVISION.fullmatch(revision):
        return None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # no such library, no such model, or a text that is no name: all the same to the caller
        return None


def model_folder(address: str) -> Path:
    """The folder of `hf://name/model` or `hf://name/model@revision`: cache first, then the network.

    The folder's own name is the revision, so that what was read can be said exactly.
    """
    name, _, revision = address.removeprefix(SCHEME).partition("@")
    revision = revision or "main"
    if not HUB_NAME.fullmatch(name) or not _REVISION.fullmatch(revision):
        fix = f"write {SCHEME}name/model, or {SCHEME}name/model@revision"
        raise refusal(address, "a model of the Hub", repr(address)[:120], fix)
    found = cached(name, revision)
    if found is None or not _complete(found):
        found = _downloaded(address, name, revision)
    return found


def hub_id(path: Path) -> str | None:
    """`org/name` of a folder in the Hugging Face cache (models--org--name/snapshots/REVISION)."""
    home = path.parent.parent.name if path.parent.name == "snapshots" else ""
    return home.removeprefix("models--").replace("--", "/") if home.startswith("models--") else None


def _downloaded(address: str, name: str, revision: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        fix = "pip install 'stockpot[transformers]', or download the model and give its folder"
        raise refusal(address, "the library huggingface_hub", "none", fix) from error
    for weights in ("*.safetensors", "*.bin"):
        try:
            patterns = [*_BESIDE, weights]
            found = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        except Exception as error:  # of any of the libraries below it
            fix = "check name, revision and network; without a network, the model must be in the cache"
            raise refusal(address, "a model in the cache or on the Hub", reason(error)[:200], fix) from error
        if _complete(found):
            return found
    fix = "download it again with a network, or choose another"
    raise refusal(address, "a model with all its weights (.safetensors or .bin)", "none, or a part of them", fix)


def _complete(folder: Path) -> bool:
    """Whether weights are there, and all parts of them: the library keeps what an interrupted download left too."""
    kind = next((kind for kind in ("safetensors", "bin") if any(folder.glob(f"*.{kind}"))), None)
    if kind is None:
        return False
    try:
        indices = [read_json(index, follow=True)["weight_map"] for index in folder.glob(f"*.{kind}.index.json")]
        return all((folder / part).is_file() for index in indices for part in set(index.values()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return True  # opening it says what is wrong

"""From what the user gave (paths, patterns, folders, runs of trainers, names on the Hub) to a list of checkpoints."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from stockpot.errors import CheckpointError
from stockpot.files import at_home, read_json, read_table
from stockpot.pool.source import HUB_NAME, SUFFIXES, Checkpoint, is_directory, natural_key, reason, refusal, suffix_of
from stockpot.pool.torch_files import in_memory, values_of

# Files with the weights in a directory of the Hugging Face libraries, in the order in which the libraries themselves
# look, so that we mix the weights the user evaluates.
_KNOWN = "model.safetensors diffusion_pytorch_model.safetensors pytorch_model.bin diffusion_pytorch_model.bin"
_NAMES = tuple(f"{name}{ending}" for name in _KNOWN.split() for ending in ("", ".index.json"))
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What trainers write beside the weights, by its exact name: `optimizer_adam.pt` may well be an ingredient.
_LEFTOVER = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)(_\d+)*\.\w+")
SCHEME = "hf://"
_REVISION = re.compile(r"(?:[\w-][\w.-]*/)*[\w-][\w.-]*")
_BESIDE = ["*.json", "*.txt", "*.model", "*.jinja"]
_TRAINER = re.compile(r"checkpoint-\d+")
_TIMM = re.compile(r"(checkpoint-\d+|last|model_best)\.pth(\.tar)?")
_LAST = re.compile(r"last(-v\d+)?\.ckpt")
_LIGHTNING = re.compile(r"((.*[-_])?(epoch|step)=\d+.*|last(-v\d+)?|best(-v\d+)?)\.ckpt")
_VERSION = re.compile(r"version_\d+")
_LOGS, _INSIDE = "lightning_logs", "checkpoints"  # where Lightning's loggers put runs, and runs their files


@dataclass(frozen=True)
class Run:
    """A training run on disk. `chosen` is among the steps, or a copy of one of them."""

    folder: Path
    steps: tuple[Path, ...]  # in the order of training
    chosen: Path
    why: str


def find_checkpoints(
    sources: Iterable[object],
    held: dict[Path, Checkpoint] | None = None,
    runs: list[Run] | None = None,
    *,
    all_steps: bool = False,
) -> tuple[list[Path], list[str]]:
    """The paths, and a line for everything that is wrong with the sources. State dicts go into `held`, each under a
    path that stands for it. Of a training run its best or last checkpoint is taken, and the run goes into `runs`; all
    of its steps with `all_steps`, or where one run is the only source."""
    paths: list[Path] = []
    held = {} if held is None else held
    runs = [] if runs is None else runs
    given = list(_flatten(sources))
    problems: list[str] = []

    for source in given:
        try:
            if isinstance(source, Mapping):
                path = Path(f"state dict {len(held) + 1}")
                held[path] = in_memory(source, path)
                paths.append(path)
            else:
                paths += _expand(source, runs, all_steps, len(given) == 1)
        except CheckpointError as error:
            problems.append(str(error))
        except (OSError, ValueError, RecursionError) as error:  # `**` follows links, in a circle too
            unreadable = refusal(str(source), "a folder to look into", reason(error), "check its permissions")
            problems.append(str(unreadable))
    found, fix = "it more than once among the sources", "remove the repetition, or patterns that overlap"
    repeated = [path for path, count in Counter(map(os.path.abspath, paths)).items() if count > 1]
    return paths, problems + [str(refusal(path, "each checkpoint once", found, fix)) for path in repeated]


def _flatten(sources: Iterable[object]) -> Iterator[object]:
    for source in sources:
        if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Path, Mapping)):
            yield from _flatten(source)
        else:
            yield source


def _expand(source: object, runs: list[Run], all_steps: bool, alone: bool) -> list[Path]:
    if not isinstance(source, (str, Path)):
        fix = "give text or Path objects, or the state dicts of models"
        raise refusal("Pool.open", "paths, patterns and folders", f"{type(source).__name__} {str(source)[:60]!r}", fix)
    if isinstance(source, str) and source.startswith(SCHEME):
        return [model_folder(source)]
    path = at_home(source)
    if is_directory(path):
        checkpoint = weights_of(path) is not None
        if found := _checkpoints(path, checkpoint, runs, all_steps, alone and not checkpoint):
            return found
        entries = list(path.iterdir())
        expected = f"checkpoints in this folder ({', '.join(SUFFIXES)}, or model directories)"
        nothing = f"none among its {len(entries)} entries"
        fix = f"give the folder that holds the checkpoints themselves, or a pattern such as {path}/*/*"
    elif os.path.lexists(path) or not glob.has_magic(str(path)):
        there = os.path.lexists(path) or not HUB_NAME.fullmatch(str(source))
        return [path if there else cached(str(source)) or path]  # if it does not exist, opening it says so
    else:
        entries = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207  (absolute patterns)
        expected, fix = "a pattern that matches checkpoints", "check the pattern"
        nothing = f"{len(entries)} matches, none of them a checkpoint" if entries else "no files match"
    entries.sort(key=lambda entry: natural_key(str(entry)))
    found = [one for entry in entries for one in _checkpoints(entry, _is_checkpoint(entry), runs, all_steps)]
    if not found:
        raise refusal(source, expected, nothing, fix)
    return found


def _checkpoints(path: Path, checkpoint: bool, runs: list[Run], all_steps: bool, alone: bool = False) -> list[Path]:
    """The checkpoint at this path, if it is one, or those of the runs there; of one that is given alone, its steps."""
    look = is_directory(path) and not path.name.startswith(".") and (all_steps or not checkpoint)
    found = runs_in(path) if look else []
    if not found:
        return [path] if checkpoint else []
    if all_steps or (alone and len(found) == 1):
        return [step for run in found for step in run.steps]
    runs += found
    return [run.chosen for run in found]


def _is_checkpoint(path: Path) -> bool:
    if path.name.startswith(".") or is_leftover(path):
        return False
    if is_directory(path):
        return weights_of(path) is not None
    return suffix_of(path) in SUFFIXES


def ingredient_names(paths: list[Path]) -> tuple[str, ...]:
    """File stems, directory names or names on the Hub; steps of different runs have their run's name in front. As much
    is added as it takes to tell all of them apart."""
    absolute = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100  (links are not to be resolved)
    places = Counter(path.with_suffix("") for path in absolute)
    names = [path.name if is_directory(path) or places[path.with_suffix("")] > 1 else path.stem for path in absolute]
    hub = Counter(map(hub_id, absolute))
    for place, path in enumerate(absolute):
        if (known := hub_id(path)) is not None:
            names[place] = known if hub[known] == 1 else f"{known}@{path.name}"  # its revision
    if len({path.parent for path in absolute}) > 1:
        of = {place: run for place, path in enumerate(absolute) if (run := run_of(path)) is not None}
        runs = list(dict.fromkeys(of.values()))
        named = dict(zip(runs, _apart([run.name for run in runs], runs), strict=True))
        names = [f"{named[of[place]]}/{name}" if place in of else name for place, name in enumerate(names)]
    return tuple(_apart(names, absolute))


def _apart(names: list[str], paths: list[Path]) -> list[str]:
    """The names, with as many folders in front as it takes to tell them apart."""
    ends = list(names)
    for depth in range(1, max((len(path.parts) for path in paths), default=1)):
        counts = Counter(names)
        if len(counts) == len(names):
            break
        names = [
            "/".join((*path.parent.parts[-depth:], end)) if counts[name] > 1 else name
            for path, end, name in zip(paths, ends, names, strict=True)
        ]
    return names


def is_leftover(path: Path) -> bool:
    return _LEFTOVER.fullmatch(path.name) is not None


def weights_of(directory: Path) -> Path | None:
    """The file that holds or indexes the weights, or `None` if this directory is no checkpoint itself."""
    present = {entry.name for entry in directory.iterdir()}
    if "adapter_config.json" in present:  # a PEFT folder; opening it says what is missing
        return directory / next((name for name in ADAPTER_WEIGHTS if name in present), ADAPTER_WEIGHTS[0])
    if ".metadata" in present and any(name.endswith(".distcp") for name in present):
        return directory / ".metadata"  # torch.distributed.checkpoint
    known = [name for name in _NAMES if name in present]
    weights = [name for name in sorted(present) if name.endswith(SUFFIXES) and not name.startswith(".")]
    others = [name for name in weights if name not in _NAMES and not is_leftover(Path(name))]
    # A saved soup (soup.json) may have recalibrated statistics in a file of their own beside the weights. A folder of
    # checkpoints may have one that happens to be called so.
    told = "config.json" in present or "soup.json" in present or any(name.endswith(".index.json") for name in known)
    if known:
        return directory / known[0] if told or not others else None
    single = [name for name in others if name.endswith(".safetensors")]
    if not known and set(others) <= set(ADAPTER_WEIGHTS):  # opening it says that the configuration is missing
        single = others
    elif "config.json" not in present:
        return None
    return directory / single[0] if len(single) == 1 else None


# ---- the output folders of trainers: which checkpoint stands for a run


def runs_in(folder: Path) -> list[Run]:
    """The run whose output folder this is, or those that a logger of Lightning numbered in it; else nothing."""
    try:
        if (run := _run(folder)) is not None:
            return [run]
        for home in (folder, folder / _LOGS):
            if is_directory(home):
                below = [entry for entry in home.iterdir() if _VERSION.fullmatch(entry.name) and is_directory(entry)]
                if found := [run for entry in _ordered(below) if (run := _run(entry)) is not None]:
                    return found
    except OSError:
        pass  # whoever opens it says why it cannot be looked into
    return []


def run_of(checkpoint: Path) -> Path | None:
    """The folder of the run that a checkpoint is a step of, by its name; None where that says enough by itself."""
    if not any(kind.fullmatch(checkpoint.name) for kind in (_TRAINER, _TIMM, _LIGHTNING)):
        return None
    home = checkpoint.parent
    return home.parent if home.name == _INSIDE else home


def _run(folder: Path) -> Run | None:
    names = {entry.name: entry for entry in folder.iterdir()}
    if steps := [entry for name, entry in names.items() if _TRAINER.fullmatch(name) and is_directory(entry)]:
        return _trainer(folder, _ordered(steps))
    files = [entry for name, entry in names.items() if _TIMM.fullmatch(name)]
    if steps := [entry for entry in files if entry.name.startswith("checkpoint-")] or files:
        return _timm(folder, _ordered(steps), {entry.name.split(".")[0]: entry for entry in files})
    below = names.get(_INSIDE)
    inside = list(below.iterdir()) if below is not None and is_directory(below) else []
    if files := [entry for entry in inside if entry.suffix == ".ckpt"]:
        return _lightning(folder, _ordered(files))
    files = [entry for entry in names.values() if entry.suffix == ".ckpt"]  # ModelCheckpoint(dirpath=...)
    if files and all(_LIGHTNING.fullmatch(entry.name) for entry in files):
        return _lightning(folder, _ordered(files))
    return None


def _ordered(paths: list[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural_key(path.name))


def _in_training(files: list[Path]) -> list[Path]:
    """Lightning's files by their steps or epochs: other numbers may come first in their names."""
    for what in ("step", "epoch"):
        found = {file: re.search(rf"{what}=(\d+)", file.name) for file in files}
        known = {file: int(match[1]) for file, match in found.items() if match is not None}
        if len(known) == len(files):
            return sorted(_ordered(files), key=known.__getitem__)
    return _ordered(files)


def _trainer(folder: Path, steps: list[Path]) -> Run:
    """The last checkpoint's trainer_state.json names the best one, where the Trainer was asked to look for it."""
    named = read_table(steps[-1] / "trainer_state.json").get("best_model_checkpoint")
    best = [step for step in steps if step.name == _last_part(named)]
    return Run(folder, tuple(steps), (best or steps[-1:])[0], "its best, by trainer_state.json" if best else "its last")


def _timm(folder: Path, steps: list[Path], named: dict[str, Path]) -> Run:
    best = named.get("model_best")
    return Run(folder, tuple(steps), best or named.get("last") or steps[-1], "its best" if best else "its last")


def _lightning(folder: Path, files: list[Path]) -> Run:
    """`last.ckpt` is a copy of a step. The newest file holds what its ModelCheckpoint knew of the best."""
    copies = [file for file in files if _LAST.fullmatch(file.name)]
    steps = _in_training([file for file in files if file not in copies]) or files
    named = _best_of_lightning((copies or steps)[-1])
    if best := [step for step in steps if step.name == named]:
        return Run(folder, tuple(steps), best[0], "its best, by ModelCheckpoint")
    alone = len(steps) == 1 and steps != files
    return Run(folder, tuple(steps), steps[-1], "the one that is kept beside last.ckpt" if alone else "its last")


def _best_of_lightning(newest: Path) -> str | None:
    """The name of the file that all callbacks with a score call the best; None where they do not agree or say."""
    try:
        callbacks = values_of(newest).get("callbacks")
    except CheckpointError:  # opening it says what is wrong
        return None
    states = callbacks.values() if isinstance(callbacks, Mapping) else ()
    scored = [one for one in states if isinstance(one, Mapping) and one.get("best_model_score") is not None]
    named = {_last_part(one.get("best_model_path")) for one in scored}
    return named.pop() if len(named) == 1 else None


def _last_part(path: object) -> str | None:
    """The last part of a path that was written anywhere."""
    return re.split(r"[/\\]", path)[-1] if isinstance(path, str) else None


# ---- models of the Hugging Face Hub: from its cache, and downloaded where that is asked for


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

"""From what the user gave (paths, patterns, folders) to a list of checkpoint paths."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from stockpot.errors import CheckpointError
from stockpot.files import at_home
from stockpot.pool.hub import SCHEME, cached, hub_id, model_folder
from stockpot.pool.runs import Run, run_of, runs_in
from stockpot.pool.source import HUB_NAME, SUFFIXES, Checkpoint, is_directory, natural_key, reason, refusal, suffix_of
from stockpot.pool.torch_files import in_memory

# Files with the weights in a directory of the Hugging Face libraries, in the order in which the libraries themselves
# look, so that we mix the weights the user evaluates.
_KNOWN = "model.safetensors diffusion_pytorch_model.safetensors pytorch_model.bin diffusion_pytorch_model.bin"
_NAMES = tuple(f"{name}{ending}" for name in _KNOWN.split() for ending in ("", ".index.json"))
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# What trainers write beside the weights, by its exact name: `optimizer_adam.pt` may well be an ingredient.
_LEFTOVER = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)(_\d+)*\.\w+")


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
        given = f"{type(source).__name__} {str(source)[:60]!r}"
        raise refusal(
            "Pool.open", "paths, patterns and folders", given, "give text or Path objects, or the state dicts of models"
        )
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
    found = [
        checkpoint for entry in entries for checkpoint in _checkpoints(entry, _is_checkpoint(entry), runs, all_steps)
    ]
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
    return directory / single[0] if "config.json" in present and len(single) == 1 else None

"""From what the user gave (paths, patterns, folders) to a list of checkpoint paths."""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from stockpot.errors import describe
from stockpot.pool.source import SUFFIXES, is_directory, natural_key, reason, shown

# Files with the weights in a directory of the Hugging Face libraries, in the order in which the libraries themselves
# look, so that we mix the weights the user evaluates.
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "diffusion_pytorch_model.bin",
    "diffusion_pytorch_model.bin.index.json",
)
# What trainers write beside the weights, by its exact name: `optimizer_adam.pt` may well be an ingredient.
_LEFTOVER = re.compile(r"(optimizer|scheduler|scaler|sampler|rng_state|random_states|training_args)(_\d+)*\.\w+")


def find_checkpoints(sources: Iterable[object]) -> tuple[list[Path], list[str]]:
    """The paths, and a line for everything that is wrong with the sources."""
    paths: list[Path] = []
    problems: list[str] = []
    for source in _flatten(sources):
        if not isinstance(source, (str, Path)):
            problems.append(
                describe(
                    "Pool.open",
                    expected="paths, patterns and folders",
                    found=f"{type(source).__name__} {str(source)[:60]!r}",
                    fix="give text or Path objects",
                )
            )
            continue
        try:
            paths += _expand(source, problems)
        except (OSError, ValueError) as error:
            problems.append(
                describe(
                    shown(source), expected="a folder to look into", found=reason(error), fix="check its permissions"
                )
            )
    repeated = [path for path, count in Counter(map(os.path.abspath, paths)).items() if count > 1]
    problems += [
        describe(
            shown(path),
            expected="each checkpoint once",
            found="it more than once among the sources",
            fix="remove the repetition, or patterns that overlap",
        )
        for path in repeated
    ]
    return paths, problems


def _flatten(sources: Iterable[object]) -> Iterator[object]:
    for source in sources:
        if isinstance(source, Iterable) and not isinstance(source, (str, bytes, Path)):
            yield from _flatten(source)
        else:
            yield source


def _expand(source: str | Path, problems: list[str]) -> list[Path]:
    path = Path(source).expanduser()
    if is_directory(path):
        if weights_of(path) is not None:
            return [path]
        found = _in_order(entry for entry in path.iterdir() if _is_checkpoint(entry))
        if not found:
            problems.append(
                describe(
                    shown(path),
                    expected=f"checkpoints in this folder ({', '.join(SUFFIXES)}, or model directories)",
                    found=f"none among its {sum(1 for _ in path.iterdir())} entries",
                    fix="give the folder that holds the checkpoint files themselves",
                )
            )
        return found
    if os.path.lexists(path) or not glob.has_magic(str(path)):
        return [path]  # if it does not exist, opening it says so
    matches = [Path(match) for match in glob.glob(str(path), recursive=True)]  # noqa: PTH207  (absolute patterns)
    found = _in_order(match for match in matches if _is_checkpoint(match))
    if not found:
        what = f"{len(matches)} matches, none of them a checkpoint" if matches else "no files match"
        problems.append(
            describe(shown(source), expected="a pattern that matches checkpoints", found=what, fix="check the pattern")
        )
    return found


def _is_checkpoint(path: Path) -> bool:
    if path.name.startswith(".") or is_leftover(path):
        return False
    if is_directory(path):
        return weights_of(path) is not None
    return path.suffix.lower() in SUFFIXES


def _in_order(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural_key(str(path)))


def ingredient_names(paths: list[Path]) -> tuple[str, ...]:
    """File stems or directory names, with as much added as it takes to tell them apart."""
    absolute = [Path(os.path.abspath(path)) for path in paths]  # noqa: PTH100  (links are not to be resolved)
    places = Counter(path.with_suffix("") for path in absolute)
    names = [path.name if is_directory(path) or places[path.with_suffix("")] > 1 else path.stem for path in absolute]
    ends = list(names)
    for depth in range(1, max(len(path.parts) for path in absolute)):
        counts = Counter(names)
        if len(counts) == len(names):
            break
        names = [
            "/".join((*path.parent.parts[-depth:], end)) if counts[name] > 1 else name
            for path, end, name in zip(absolute, ends, names, strict=True)
        ]
    return tuple(names)


def is_leftover(path: Path) -> bool:
    return _LEFTOVER.fullmatch(path.name) is not None


def weights_of(directory: Path) -> Path | None:
    """The file that holds or indexes the weights, or `None` if this directory is no checkpoint itself."""
    present = {entry.name for entry in directory.iterdir()}
    known = [name for name in _NAMES if name in present]
    tensor_files = [directory / name for name in sorted(present) if name.endswith(SUFFIXES) and name[0] != "."]
    others = [path for path in tensor_files if not is_leftover(path) and path.name not in _NAMES]
    # soup.json: a saved soup, which may have recalibrated statistics in a file of their own beside the weights.
    if known and ("config.json" in present or "soup.json" in present):
        return directory / known[0]
    if any(name.endswith(".index.json") for name in known):
        return directory / known[0]
    if known and not others:  # otherwise a folder of checkpoints, one of which happens to have this name
        return directory / known[0]
    single = [path for path in others if path.suffix == ".safetensors"]
    if not known and "config.json" in present and len(single) == 1:
        return single[0]
    return None

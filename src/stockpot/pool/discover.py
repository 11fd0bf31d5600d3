"""From what the user gave (paths, patterns, folders) to a list of checkpoint paths."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from stockpot.errors import describe
from stockpot.pool.files import SUFFIXES, is_directory, reason, shown
from stockpot.pool.huggingface import is_leftover, weights_of
from stockpot.pool.order import natural_key


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
                    shown(source),
                    expected="a folder to look into",
                    found=reason(error),
                    fix="check its permissions",
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
            describe(
                shown(source),
                expected="a pattern that matches checkpoints",
                found=what,
                fix="check the pattern",
            )
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
    names = [
        path.name if is_directory(path) or places[path.with_suffix("")] > 1 else path.stem
        for path in absolute
    ]
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

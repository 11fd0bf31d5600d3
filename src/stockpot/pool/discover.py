"""From what the user gave (paths, patterns, folders) to a list of checkpoint paths."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from stockpot.errors import describe
from stockpot.pool.files import SUFFIXES, reason, shown
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
        except OSError as error:
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
    if path.is_dir():
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
    if path.is_dir():
        return weights_of(path) is not None
    return path.suffix.lower() in SUFFIXES


def _in_order(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: natural_key(str(path)))


def ingredient_names(paths: list[Path]) -> tuple[str, ...]:
    """File stems or directory names, with as many parents before them as it takes to tell them apart."""
    stems = [
        path.name if path.is_dir() or path.suffix.lower() not in SUFFIXES else path.stem for path in paths
    ]
    parents = [Path(os.path.abspath(path)).parent.parts for path in paths]  # noqa: PTH100  (no links resolved)
    names = list(stems)
    depth = 0
    while (clashing := {name for name, count in Counter(names).items() if count > 1}) and depth < max(
        map(len, parents)
    ):
        depth += 1
        names = [
            "/".join((*parts[-depth:], stem)) if stem_name in clashing else stem_name
            for parts, stem, stem_name in zip(parents, stems, names, strict=True)
        ]
    if clashing:  # a.pt beside a.safetensors
        names = [
            f"{name}{path.suffix}" if name in clashing else name
            for name, path in zip(names, paths, strict=True)
        ]
    return tuple(names)

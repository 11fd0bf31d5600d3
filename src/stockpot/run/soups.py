"""The soups of a run: where they lie, and how to make them again."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from stockpot.errors import RunError, SoupError, describe
from stockpot.events import Listener, ignore
from stockpot.run.directory import METHODS, RESULTS, RUN, RunDirectory, slug
from stockpot.soup.record import RECORD
from stockpot.soup.soup import rebuild

SOUP = "soup"


def recommended_soup(run: Path) -> Path:
    directory = RunDirectory.open(run)
    path = _folder(directory, None) / SOUP
    if not path.is_dir():
        raise RunError(
            describe(
                str(path),
                expected="the saved soup of the run",
                found="nothing at this path",
                fix=f"make it again with: stockpot rebuild {run}",
            )
        )
    return path


def rebuild_soup(
    source: Path,
    *,
    method: str | None = None,
    out: Path | None = None,
    ingredients: Iterable[Path] | None = None,
    overwrite: bool = False,
    listen: Listener = ignore,
) -> tuple[Path, bool]:
    """Where the soup is now, and whether it was there before and has been compared byte by byte."""
    record = _folder(RunDirectory.open(source), method) if (source / RUN).is_file() else source
    given = None if ingredients is None else list(ingredients)
    if out is not None:
        return rebuild(record, out, ingredients=given, overwrite=overwrite, listen=listen), False
    path = record / SOUP if record is not source else source
    if not path.exists():
        return rebuild(record, path, ingredients=given, listen=listen), False
    again = path.with_name(f".{path.name}.compared")
    try:
        rebuild(record, again, ingredients=given, overwrite=True, listen=listen)
        _compare(path, again)
    finally:
        shutil.rmtree(again, ignore_errors=True)
    return path, True


def _folder(directory: RunDirectory, method: str | None) -> Path:
    """The files of one method, which must have made a soup."""
    results = directory.read_json(RESULTS)
    name = method or (results or {}).get("recommended")
    if name is None:
        raise RunError(
            describe(
                f"run {directory.path}",
                expected="a finished run",
                found=f"one that is {directory.run['status']}",
                fix="finish it by calling the same command again, or make the soup of one of its methods:"
                " `stockpot rebuild RUN --method NAME`",
            )
        )
    known = sorted(path.parent.name for path in (directory.path / METHODS).glob(f"*/{RECORD}"))
    if slug(str(name)) not in known:  # in particular no path out of the run
        raise RunError(
            describe(
                f"method {name!r} of run {directory.path}",
                expected=f"one that made a soup: {', '.join(known).replace('-plus', '+')}",
                found="an ensemble, which is no soup" if name == "ensemble" else "none of that name",
                fix="choose one of these with --method",
            )
        )
    return directory.method(name)


def _compare(first: Path, second: Path) -> None:
    names = sorted(file.name for file in second.iterdir() if file.suffix == ".safetensors")
    differing = [name for name in names if not _equal(first / name, second / name)]
    if differing:
        raise SoupError(
            describe(
                str(first),
                expected="the bytes its record and ingredients give",
                found=f"other content in {', '.join(differing)}",
                fix="the soup was changed after it was saved; write it again with --out",
            )
        )


def _equal(first: Path, second: Path) -> bool:
    if not first.is_file() or first.stat().st_size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as two:
        while part := one.read(1 << 20):
            if part != two.read(1 << 20):
                return False
    return True

"""The soups of a run: where they lie, and how to make them again."""

from __future__ import annotations

import filecmp
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stockpot import files
from stockpot.errors import RunError, SoupError
from stockpot.events import Listener, ignore
from stockpot.run.record import METHODS, RUN, SOUP, read_run, slug
from stockpot.soup.soup import rebuild


def recommended_soup(run: Path) -> Path:
    path = files.check_inside(run, _folder(run, None) / SOUP)
    if not path.is_dir():
        fix = f"make it again with: stockpot rebuild {run}"
        raise RunError.of(str(path), expected="the saved soup of the run", found="nothing at this path", fix=fix)
    return path


def record_of(source: Path, method: str | None = None) -> Path:
    """Where the record of a run's soup is, or of a saved soup."""
    return files.check_inside(source, _folder(source, method)) if os.path.lexists(source / RUN) else source


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
    of_run, record = os.path.lexists(source / RUN), record_of(source, method)
    if method is not None and not of_run:
        fix = "give the run's directory, or leave --method out"
        raise RunError.of(str(source), expected="a run, where --method chooses", found="no run", fix=fix)
    given = None if ingredients is None else list(ingredients)
    if out is not None:
        return rebuild(record, out, ingredients=given, overwrite=overwrite, listen=listen), False
    path = files.check_inside(source, record / SOUP) if of_run else source
    if not path.exists():
        return rebuild(record, path, ingredients=given, listen=listen), False
    # Beside it, where there is room for another one; the name cannot be known before.
    with tempfile.TemporaryDirectory(".compared", f".{path.name}.", path.parent, ignore_cleanup_errors=True) as beside:
        again = rebuild(record, Path(beside) / SOUP, ingredients=given, listen=listen)
        names = sorted(file.name for file in again.iterdir() if file.suffix == ".safetensors")
        for name in names:
            files.check_inside(path, path / name)
        _, differing, lacking = filecmp.cmpfiles(path, again, names, shallow=False)
    if differing or lacking:
        found = f"other content in {', '.join((*differing, *lacking))}"
        fix = "the soup was changed after it was saved; write it again with --out"
        raise SoupError.of(str(path), expected="the bytes its record and ingredients give", found=found, fix=fix)
    return path, True


def _folder(run: Path, method: str | None) -> Path:
    """The files of one method, which must have made a soup."""
    found = read_run(run)
    name = method or found.results.get("recommended")
    if name is None:
        other = "make the soup of one of its methods: `stockpot rebuild RUN --method NAME`"
        raise RunError.of(
            f"run {run}",
            expected="a run that recommends a soup",
            found="one that recommends none" if found.results else f"one that is {found.about['status']}",
            fix=other if found.results else f"finish it by calling the same command again, or {other}",
        )
    known = sorted(one.name for one in found.methods if one.W is not None)
    if name not in known:  # in particular no path out of the run
        raise RunError.of(
            f"method {name!r} of run {run}",
            expected=f"one that made a soup: {', '.join(known)}",
            found="one that is no soup" if name in (one.name for one in found.methods) else "none of that name",
            fix="choose one of these with --method",
        )
    return run / METHODS / slug(name)

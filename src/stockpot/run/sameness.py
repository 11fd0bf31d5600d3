"""A run that is continued must be the run that was begun: the same code, settings and data, or it is refused.

What a run began with is noted in run.json the first time, and compared every time after. The recipe is compared in
run/directory.py, the ingredients in run/ingredients.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from stockpot._version import __version__
from stockpot.errors import RunError, describe
from stockpot.run.differences import differences
from stockpot.run.directory import RUN, RunDirectory, refused
from stockpot.run.reading import read_json, readable
from stockpot.run.records import RESULT, settings_json
from stockpot.soups.settings_before import Settings
from stockpot.task import Task
from stockpot.task.fingerprint import fingerprint

_T = TypeVar("_T")


def same_code(directory: RunDirectory, now: Mapping[str, str]) -> None:
    """Of the user's own files, by their digests."""
    earlier = _noted(directory, "code", dict)
    if earlier is None:
        directory.note(code=dict(now))
        return
    changed = [name for name in sorted({*earlier, *now}) if earlier.get(name) != now.get(name)]
    if changed:
        found = [f"what {name} does" for name in changed]
        raise refused(directory.path, "the code this run was started with", "other code", found)


def same_settings(directory: RunDirectory, settings: Mapping[str, Settings]) -> None:
    """A recipe says what differs from the defaults, so with another version of stockpot it can mean something else."""
    now = {name: settings_json(one) for name, one in settings.items()}
    noted = _noted(directory, "settings", dict) or {}
    earlier = {**_finished(directory, now), **noted}
    changed = differences(
        {name: earlier[name] for name in now if name in earlier},
        {name: now[name] for name in now if name in earlier},
    )
    if changed:
        begun = str(directory.run.get("stockpot"))
        versions = f" (begun by stockpot {begun}, this is {__version__})" if begun != __version__ else ""
        raise refused(
            directory.path,
            "the settings this run was started with",
            f"other defaults of stockpot{versions}",
            changed,
            "Nothing was touched: report, evaluate and rebuild still read that run.",
        )
    if not now.keys() <= noted.keys():
        directory.note(settings={**noted, **now})


def _finished(directory: RunDirectory, methods: Iterable[str]) -> dict[str, Any]:
    """What methods that are done were done with; for runs that were begun before run.json said so."""
    found = {}
    for name in methods:
        file = directory.method(name) / RESULT
        if (value := read_json(file)) is not None:
            with readable(file):
                found[name] = dict(value["settings"])
    return found


def same_fit_data(directory: RunDirectory, task: Task) -> None:
    _same_data(directory, "fit_digest", fingerprint(task.fit), "fitting data")


def same_report_data(directory: RunDirectory, task: Task) -> None:
    _same_data(directory, "report_digest", task.report_fingerprint(), "report data")


def _same_data(directory: RunDirectory, key: str, now: str | None, what: str) -> None:
    earlier = _noted(directory, key, str)
    if earlier is None:
        directory.note(**{key: now})
    elif earlier != now:
        found = [f"the content of the {what}: fingerprint {earlier[:12]} -> {str(now)[:12]}"]
        raise refused(directory.path, f"the {what} this run was started with", "other samples", found)


def _noted(directory: RunDirectory, key: str, kind: type[_T]) -> _T | None:
    """What run.json says, or None where it says nothing yet."""
    value = directory.run.get(key)
    if value is not None and not isinstance(value, kind):
        raise RunError(
            describe(
                str(directory.path / RUN),
                expected=f"{key} as this run began with",
                found=f"a value of type {type(value).__name__}",
                fix="restore the file from a copy, or start again with another output directory",
            )
        )
    return value

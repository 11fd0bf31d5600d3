"""One directory per run: made, locked, recognised again, or refused.

A directory is first claimed: locked, and found to be new, or the very run that is to be continued. What is
there stays as it is until `begin`, when everything that the run needs is known to be in order. What makes a
run this run and no other is its `Identity`: noted in run.json when it begins, and compared here, in one
place, whenever it is continued. The ingredients are compared by their digests when they have been read
(`same_pool`).
"""

from __future__ import annotations

import contextlib
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stockpot import files
from stockpot._version import __version__
from stockpot.errors import RunError, WriteError, describe
from stockpot.run.record import (
    EVENTS,
    FORMAT,
    GROWTH,
    METHODS,
    POOL,
    RECIPE,
    RESULTS,
    RUN,
    SCORES,
    TENSORBOARD,
    format_of,
    read_about,
    slug,
)
from stockpot.run.shapes import ANY, POOL_SHAPE, plain, read_json
from stockpot.run.state import Journal

# Everything a run writes; only these are ever removed, and run.json is replaced by the next one's.
_OWN = (RECIPE, POOL, RESULTS, EVENTS, METHODS, GROWTH, TENSORBOARD, SCORES, "report.html", "report.md")
_FIRST_WRITE = re.compile(rf"\.{re.escape(RUN)}\.[0-9a-f]{{16}}\.writing")
# Where files lie does not make a run another one; the seed does.
_WITHOUT = ("base", "output.dir", "output.max_shard_size", "output.tensorboard", "output.overwrite")
_SHOWN = 12


@dataclass(frozen=True)
class RecipeFacts:
    """What the command line knows about a run besides pool, task and settings."""

    title: str = ""
    kind: str = ""  # "cook", "compare" or "demo"
    command: tuple[str, ...] = ()
    digest: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)  # the recipe with all defaults
    code: Mapping[str, str] = field(default_factory=dict)  # digests of the user's own files, by name
    max_shard: int | None = None  # bytes; None: as Soup.save does


@dataclass(frozen=True)
class Identity:
    """What makes a run this run and no other."""

    kind: str
    title: str = ""
    metric: str = "accuracy"
    percent: bool = True
    seed: int = 0
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by method, in the table's order
    layout: Mapping[str, Any] = field(default_factory=dict)  # what is mixed, and how statistics are kept
    fit_digest: str = ""
    report_digest: str | None = None
    recipe: RecipeFacts = RecipeFacts()


class RunDirectory:
    """A directory that this process works in. Use `claim`, as a context manager, and then `begin`."""

    def __init__(self, path: Path, about: dict[str, Any], lock: files.Lock) -> None:
        self.path = path
        self.about = about  # run.json
        self._lock = lock
        self._journal: Journal | None = None
        self._replaces: Mapping[str, Any] | None = None  # run.json of the run that goes away
        self._recipe: Mapping[str, Any] | None = None  # to be written

    @classmethod
    def claim(cls, path: str | Path, identity: Identity, *, overwrite: bool = False) -> RunDirectory:
        """Locked and found usable: new, the same run again, or one to be replaced. Nothing is changed yet."""
        path = Path(path)
        _make(path)
        _refuse_foreign(path)  # before the lock, which would be left behind
        lock = files.Lock(path)
        lock.acquire()
        try:
            replaced = _to_be_replaced(path, overwrite)
            continued = replaced is None and (path / RUN).exists()
            about = read_about(path) if continued else _described(identity)
            if continued:
                _same(path, about, identity)
            directory = cls(path, about, lock)
            directory._replaces = replaced
            directory._recipe = None if continued else identity.recipe.resolved
            return directory
        except BaseException:
            lock.release()
            raise

    def begin(self, environment: Mapping[str, Any] | None = None) -> None:
        """An earlier run that was to be replaced goes away now, and this one is under way."""
        if self._replaces is not None:
            # run.json goes last, when the new one is renamed over it: half of a run is still known to be one.
            self._write(RUN, {**self._replaces, "status": "clearing"})
            files.clear(self.path, _OWN, self.path)
        self._sweep()
        if environment is not None:
            self.about["environment"] = plain(dict(environment))
        self.note(status="running")
        if self._recipe:
            self._write(RECIPE, plain(dict(self._recipe)))  # JSON is YAML

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.about["status"] == "running":
            with contextlib.suppress(WriteError):  # the error under way says more
                self.note(status="interrupted")
        self.release()

    def release(self) -> None:
        """Let go of the directory without a word about how the run ended."""
        if self._journal is not None:
            with contextlib.suppress(WriteError):
                self._journal.close()
        self._lock.release()

    @property
    def journal(self) -> Journal:
        """The listener that appends to events.jsonl."""
        if self._journal is None:
            self._journal = Journal(self.path / EVENTS, self.path)
        return self._journal

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.about.update(facts)
        self._write(RUN, self.about)

    def method(self, name: str) -> Path:
        return self.path / METHODS / slug(name)

    def growth(self, name: str, models: int) -> Path:
        return self.path / GROWTH / f"{slug(name)}-{models:04d}"

    def same_pool(self, names: Sequence[str], digests: Sequence[str]) -> bool:
        """Whether pool.json is there; if it is, the ingredients must be the same."""
        earlier = read_json(self.path / POOL, self.path, POOL_SHAPE)
        if earlier is None:
            return False
        before = {entry["name"]: entry["digest"] for entry in earlier["ingredients"]}
        now = dict(zip(names, digests, strict=True))
        lines = [f"{name}: gone" for name in before if name not in now]
        lines += [f"{name}: new" for name in now if name not in before]
        lines += [f"{name}: other content" for name in now if name in before and before[name] != now[name]]
        if not lines and list(before) != list(now):
            lines = ["the order of the ingredients"]
        if lines:
            raise _refused(self.path, "the ingredients this run was started with", "others", lines)
        return True

    def _write(self, name: str, value: Any) -> None:
        files.write_json(self.path / name, value, self.path)

    def _sweep(self) -> None:
        """What killed processes left half-written."""
        files.sweep(self.path, self.path)
        for group in (METHODS, GROWTH):
            folder = files.check_inside(self.path, self.path / group)
            for inner in sorted(folder.iterdir()) if folder.is_dir() else ():
                if inner.is_dir() and not inner.is_symlink():
                    files.sweep(inner, self.path)


def _described(identity: Identity) -> dict[str, Any]:
    """run.json of a new run."""
    recipe = identity.recipe
    value = {
        "format": FORMAT,
        "kind": identity.kind,
        "title": identity.title,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "stockpot": __version__,
        "command": list(recipe.command),
        "status": "claimed",  # never written: there is no file before it runs
        "metric": identity.metric,
        "percent": identity.percent,
        "seed": identity.seed,
        "recipe_digest": recipe.digest,
        "code": dict(recipe.code),
        "settings": {name: dict(one) for name, one in identity.settings.items()},
        "layout": dict(identity.layout),
        "fit_digest": identity.fit_digest,
        "report_digest": identity.report_digest,
        "environment": {},
    }
    return {key: plain(item) for key, item in value.items()}


def _make(path: Path) -> None:
    try:
        files.make_directory(path)
    except WriteError as error:
        cause = error.__cause__
        raise RunError(
            describe(
                f"output directory {path}",
                expected="a place to write to",
                found=(cause.strerror if isinstance(cause, OSError) else None) or str(cause),
                fix="choose another directory with output.dir",
            )
        ) from error


def _refuse_foreign(path: Path) -> None:
    """A directory with anything in it must be a run of ours, whatever else is asked for."""
    if format_of(path) is not None:
        return
    # Of ours there may be a lock, and the first file that a killed process was about to write.
    ours = [entry.name for entry in path.iterdir() if not _FIRST_WRITE.fullmatch(entry.name)]
    foreign = sorted(name for name in ours if name != files.LOCK)
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise RunError(
            describe(
                f"output directory {path}",
                expected="a new or empty directory, or an earlier run",
                found=f"other files: {', '.join(foreign[:5])}{more}",
                fix="choose another directory with --out (in Python: run=)",
            )
        )


def _to_be_replaced(path: Path, overwrite: bool) -> Mapping[str, Any] | None:
    """run.json of an earlier run that is in nobody's way: it was said to go, or has nothing to keep.

    That is a run that failed before its first result (a wrong name, a wrong path), or one whose clearing was killed.
    """
    earlier_format = format_of(path)
    if earlier_format is None:
        return None
    if overwrite and earlier_format <= FORMAT:
        about: Mapping[str, Any] = read_json(path / RUN, path, {"*": ANY})
        return about
    if earlier_format != FORMAT:
        return None
    about = read_about(path)
    kept = any((path / name).exists() for name in (METHODS, GROWTH, RESULTS, SCORES))
    if about["status"] == "clearing" or (about["status"] in ("running", "interrupted") and not kept):
        return about
    return None


def _same(path: Path, about: Mapping[str, Any], identity: Identity) -> None:
    """Refuse another run than the one that was begun, and show the difference."""
    now = _described(identity)
    if about["kind"] != now["kind"]:
        raise RunError(
            describe(
                f"output directory {path}",
                expected=f"a directory of its own for {identity.kind}",
                found=f"an earlier run of {about['kind']}, which stays as it is",
                fix=f"add --out {path.name}-{identity.kind}, or replace that run with --overwrite"
                " (in Python: overwrite=True)",
            )
        )
    if about["recipe_digest"] != now["recipe_digest"]:
        earlier = read_json(path / RECIPE, path, {"*": ANY}) or {}
        changed = differences(earlier, plain(dict(identity.recipe.resolved))) or ["the recipe"]
        raise _refused(path, "a new directory, or the same run to continue", "another run", changed)
    code = sorted(
        name for name in {**about["code"], **now["code"]} if about["code"].get(name) != now["code"].get(name)
    )
    if code:
        lines = [f"what {name} does" for name in code]
        raise _refused(path, "the code this run was started with", "other code", lines)
    choices = ("metric", "layout")
    if changed := differences({key: about[key] for key in choices}, {key: now[key] for key in choices}):
        raise _refused(path, "a new directory, or the same run to continue", "another run", changed)
    _same_settings(path, about, now, by_recipe=bool(identity.recipe.digest))
    for key, what in (("fit_digest", "fitting data"), ("report_digest", "report data")):
        if about[key] != now[key]:
            lines = [f"the content of the {what}: fingerprint {_short(about[key])} -> {_short(now[key])}"]
            raise _refused(path, f"the {what} this run was started with", "other samples", lines)


def _same_settings(path: Path, about: Mapping[str, Any], now: Mapping[str, Any], *, by_recipe: bool) -> None:
    """A recipe says what differs from the defaults, so with another version of stockpot it can mean something else."""
    changed = differences(about["settings"], now["settings"])
    if not changed:
        return
    begun = about["stockpot"]
    versions = f" (begun by stockpot {begun}, this is {__version__})" if begun != __version__ else ""
    raise _refused(
        path,
        "the settings this run was started with",
        f"other {'defaults of stockpot' if by_recipe else 'ones'}{versions}",
        changed,
        "Nothing was touched: report, evaluate and rebuild still read that run.",
    )


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def _refused(
    path: Path, expected: str, found: str, differing: Sequence[str], last: str | None = None
) -> RunError:
    """A run directory that cannot be continued, with the difference shown, and a last word."""
    message = describe(
        f"output directory {path}",
        expected=expected,
        found=found,
        fix="choose another directory with --out, or replace that run with --overwrite"
        " (in Python: run=, overwrite=True)",
    )
    more = [f"and {len(differing) - _SHOWN} more"] if len(differing) > _SHOWN else []
    lines = [message, "  What differs:", *(f"    {line}" for line in (*differing[:_SHOWN], *more))]
    return RunError("\n".join([*lines, *([] if last is None else [f"  {last}"])]))


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed, as lines that a person can read."""
    old, new = _flat(before), _flat(after)
    keys = [key for key in {**old, **new} if key not in _WITHOUT and old.get(key) != new.get(key)]
    return [f"{key}: {_text(old, key)} -> {_text(new, key)}" for key in keys]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat.update(_flat(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = inner
    return flat


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not there"
    text = str(values[key])
    return text if len(text) <= 60 else f"{text[:57]}..."

"""One directory per run: made, locked, recognised again, or refused.

A directory is first claimed: locked, and found to be new, or the very run that is to be continued. What is there stays
as it is until `begin`, when everything that the run needs is known to be in order. What makes a run this run and no
other is noted in run.json when it begins, and compared here, in one place, whenever it is continued; the ingredients,
by their digests, when they have been read (`same_pool`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from stockpot import files, words
from stockpot._version import __version__
from stockpot.adapters.trackers import TENSORBOARD
from stockpot.errors import RunError, WriteError, describe
from stockpot.pool.source import listed
from stockpot.run import record
from stockpot.run.record import FORMAT, METHODS, POOL, RECIPE, RESULTS, RUN, SCORES, slug
from stockpot.run.shapes import ANY, POOL_SHAPE, flat, plain, read_json
from stockpot.run.state import Journal
from stockpot.task.checks import REPORT

# Everything a run writes; only these are ever removed, and run.json is replaced by the next one's.
_OWN = (RECIPE, POOL, RESULTS, record.EVENTS, METHODS, TENSORBOARD, SCORES, "report.html", "report.md")
_FIRST_WRITE = re.compile(rf"\.{re.escape(RUN)}\.[0-9a-f]{{16}}\.writing")
# Where files lie does not make a run another one; the seed does.
_WITHOUT = ("base", "output.dir", "output.max_shard_size", "output.track", "output.overwrite")
_ANOTHER = ("a new directory, or the same run to continue", "another run")


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


class RunDirectory:
    """A directory that this process works in: `claim` it, as a context manager, and then `begin`.

    `facts` are what cooking knows of the run: kind, title, seed, metric, unit, settings by method, layout (what is
    mixed), fit_digest and report_digests.
    """

    def __init__(
        self, path: str | Path, facts: Mapping[str, Any], recipe: RecipeFacts, *, overwrite: bool = False
    ) -> None:
        self.path = Path(path)
        self._journal: Journal | None = None
        try:
            files.make_directory(self.path)
        except WriteError as error:
            found, what = getattr(error.__cause__, "strerror", None) or str(error.__cause__), f"output directory {path}"
            raise RunError.of(what, "a place to write to", found, "choose another directory with output.dir") from error
        _refuse_foreign(self.path)  # before the lock, which would be left behind
        self._lock = files.Lock(self.path)
        self._lock.acquire()
        try:
            self._replaces = _to_be_replaced(self.path, overwrite)  # run.json of the run that goes away
            self._continues = self._replaces is None and (self.path / RUN).exists()
            self._recipe = plain(dict(recipe.resolved))
            self.about = _about(facts, recipe)  # run.json
            if self._continues:
                earlier = record.read_about(self.path)
                _same_recipe(self.path, earlier, self.about, self._recipe)
                _same_facts(self.path, earlier, self.about)
                self.about = earlier
        except BaseException:
            self._lock.release()
            raise

    def begin(self, environment: Mapping[str, Any]) -> None:
        """An earlier run that was to be replaced goes away now, and this one is under way."""
        if self._replaces is not None:
            # run.json goes last, when the new one is renamed over it: half of a run is still known to be one.
            self.write(RUN, {**self._replaces, "status": "clearing"})
            files.clear(self.path, _OWN, self.path)
        files.sweep(self.path, self.path)  # what killed processes left half-written
        folder = files.check_inside(self.path, self.path / METHODS)
        for inner in folder.iterdir() if folder.is_dir() else ():
            if inner.is_dir() and not inner.is_symlink():
                files.sweep(inner, self.path)
        self.note(status="running", environment=plain(dict(environment)))
        if self._recipe and not self._continues:
            self.write(RECIPE, self._recipe)  # JSON is YAML

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with contextlib.suppress(WriteError):  # the error under way says more
            if kind is not None and self.about["status"] == "running":
                self.note(status="interrupted")
        with contextlib.suppress(WriteError):
            if self._journal is not None:
                self._journal.close()
        self._lock.release()

    @property
    def journal(self) -> Journal:
        """The listener that appends to events.jsonl."""
        if self._journal is None:
            self._journal = Journal(self.path / record.EVENTS, self.path)
        return self._journal

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.about.update(facts)
        self.write(RUN, self.about)

    def write(self, name: str, value: Any) -> None:
        files.write_json(self.path / name, value, self.path)

    def method(self, name: str) -> Path:
        return self.path / METHODS / slug(name)

    def same_pool(self, names: Sequence[str], digests: Sequence[str]) -> bool:
        """Whether pool.json is there; if it is, the ingredients must be the same."""
        earlier = read_json(self.path / POOL, self.path, POOL_SHAPE)
        if earlier is None:
            return False
        before = {entry["name"]: entry["digest"] for entry in earlier["ingredients"]}
        now = dict(zip(names, digests, strict=True))
        lines = [f"{name}: gone" for name in before if name not in now]
        lines += [f"{name}: new" for name in now if name not in before]
        lines += [f"{name}: other content" for name in now if before.get(name, now[name]) != now[name]]
        if not lines and list(before) != list(now):
            lines = ["the order of the ingredients"]
        if lines:
            raise _refused(self.path, "the ingredients this run was started with", "others", lines)
        return True


def _about(facts: Mapping[str, Any], recipe: RecipeFacts) -> dict[str, Any]:
    """run.json of a new run, as it will be read again."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    own = {"format": FORMAT, "created": now, "stockpot": __version__, "status": "claimed", "environment": {}}
    said = {"command": recipe.command, "recipe_digest": recipe.digest, "code": dict(recipe.code)}
    value: dict[str, Any] = plain({**own, **said, **facts})
    return value


def _refuse_foreign(path: Path) -> None:
    """A directory with anything in it must be a run of ours, whatever else is asked for."""
    if record.format_of(path) is not None:
        return
    # Of ours there may be a lock, and the first file that a killed process was about to write.
    names = (entry.name for entry in path.iterdir())
    foreign = sorted(name for name in names if name != files.LOCK and not _FIRST_WRITE.fullmatch(name))
    if foreign:
        found, fix = f"other files: {listed(foreign)}", "choose another directory with --out (in Python: run=)"
        raise RunError.of(f"output directory {path}", "a new or empty directory, or an earlier run", found, fix)


def _to_be_replaced(path: Path, overwrite: bool) -> Mapping[str, Any] | None:
    """run.json of an earlier run that is in nobody's way: it was said to go, or has nothing to keep.

    The latter failed before its first result (a wrong name, a wrong path), or was being cleared when it was killed.
    """
    number = record.format_of(path)
    if number is not None and overwrite and number <= FORMAT:
        earlier: Mapping[str, Any] = read_json(path / RUN, path, {"*": ANY})
        return earlier
    if number != FORMAT:
        return None
    about = record.read_about(path)
    empty = not any((path / name).exists() for name in (METHODS, RESULTS, SCORES))
    failed = about["status"] in ("running", "interrupted") and empty
    return about if failed or about["status"] == "clearing" else None


def check_recipe(path: Path, recipe: RecipeFacts, *, overwrite: bool = False) -> None:
    """Refuse, before pool and data are read for nothing, a directory that another recipe has written."""
    if path.is_dir():
        _refuse_foreign(path)
        if record.format_of(path) is not None and _to_be_replaced(path, overwrite) is None:
            now = _about({"kind": recipe.kind}, recipe)
            _same_recipe(path, record.read_about(path), now, plain(dict(recipe.resolved)))


def _same_recipe(path: Path, before: Mapping[str, Any], now: Mapping[str, Any], recipe: Mapping[str, Any]) -> None:
    """Refuse another recipe or other code than those that the run was begun with, and show the difference."""
    if before["kind"] != now["kind"]:
        found = f"an earlier run of {before['kind']}, which stays as it is"
        fix = f"add --out {path.name}-{now['kind']}, or replace that run with --overwrite"
        raise RunError.of(f"output directory {path}", f"a directory of its own for {now['kind']}", found, fix)
    if before["recipe_digest"] != now["recipe_digest"]:
        earlier = read_json(path / RECIPE, path, {"*": ANY}) or {}
        raise _refused(path, *_ANOTHER, differences(earlier, recipe) or ["the recipe"])
    old, new = before["code"], now["code"]
    if lines := [f"what {name} does" for name in sorted({**old, **new}) if old.get(name) != new.get(name)]:
        raise _refused(path, "the code this run was started with", "other code", lines)


def _same_facts(path: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """The same for metric, what is mixed, settings and data."""
    choices = ("metric", "layout")
    if changed := differences({key: before[key] for key in choices}, {key: now[key] for key in choices}):
        raise _refused(path, *_ANOTHER, changed)
    if changed := differences(before["settings"], now["settings"]):
        # A recipe says what differs from the defaults, so with another version it can mean something else.
        begun, found = before["stockpot"], "other defaults of stockpot" if now["recipe_digest"] else "other ones"
        versions = f" (begun by stockpot {begun}, this is {__version__})" if begun != __version__ else ""
        last = "\n  Nothing was touched: report, evaluate and rebuild still read that run."
        raise _refused(path, "the settings this run was started with", f"{found}{versions}", changed, last)
    digests = [
        {"fitting data": about["fit_digest"]}
        | {
            "report data" if name == REPORT else f"report data {name!r}": digest
            for name, digest in about["report_digests"].items()
        }
        for about in (before, now)
    ]
    for what in {**digests[0], **digests[1]}:
        first, second = (str(one.get(what))[:12] for one in digests)
        if first != second:
            lines = [f"the content of the {what}: fingerprint {first} -> {second}"]
            raise _refused(path, f"the {what} this run was started with", "other samples", lines)
    old, new = (", ".join(about["report_digests"]) for about in (before, now))
    if old != new:  # the first counts
        raise _refused(path, "the sets of report data in the same order", "another order", [f"{old} -> {new}"])


def _refused(path: Path, expected: str, found: str, differing: Sequence[str], last: str = "") -> RunError:
    """A run directory that cannot be continued, with the difference shown."""
    fix = "choose another directory with --out, or replace that run with --overwrite (in Python: run=, overwrite=True)"
    message = describe(f"output directory {path}", expected=expected, found=found, fix=fix)
    return RunError(f"{message}\n  What differs:\n    {words.first_of(differing, 12)}{last}")


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What changed, as lines that a person can read."""
    old, new = flat(before), flat(after)
    keys = [key for key in {**old, **new} if key not in _WITHOUT and old.get(key) != new.get(key)]
    both = {key: [words.middle(one.get(key, "not there").strip('"'), 60) for one in (old, new)] for key in keys}
    return [f"{key}: {' -> '.join(pair)}" for key, pair in both.items()]


# ---- what a result depends on besides the recipe

# Libraries that may change a result; those that are not installed are not listed.
_LIBRARIES = ("safetensors", "numpy", "transformers", "tokenizers", "timm", "torchvision", "open_clip_torch")


def environment(device: str | None = None) -> dict[str, Any]:
    """Plain JSON values. `device` is what the work runs on, as torch names it."""
    import torch

    from stockpot.engine.memory import host_memory

    cuda = device is not None and device.startswith("cuda") and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _processor(),
        # What this process may use, which in a container is less than the machine has.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": host_memory(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if cuda else device or "cpu",
        "threads": torch.get_num_threads(),
        "libraries": {name: version for name in _LIBRARIES if (version := installed(name)) is not None},
    }


def installed(distribution: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()

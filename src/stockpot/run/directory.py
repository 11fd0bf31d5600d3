"""One directory per run: made, locked, recognised again, or refused. Its files are listed in docs/architecture.md."""

from __future__ import annotations

import contextlib
import datetime
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stockpot import atomic
from stockpot._version import __version__
from stockpot.disk import LOCK, Lock
from stockpot.errors import RunError, WriteError, describe
from stockpot.recipe.load import parse
from stockpot.run.differences import differences
from stockpot.run.journal import Journal
from stockpot.run.reading import read_json

FORMAT = 1
RUN, RECIPE, POOL, RESULTS, EVENTS = "run.json", "recipe.yaml", "pool.json", "results.json", "events.jsonl"
METHODS, GROWTH, TENSORBOARD = "methods", "growth", "tensorboard"
_CLEARING = ".clearing"  # there while an earlier run is being removed
# Everything a run writes; only these are ever removed.
_OWN = (
    RUN, RECIPE, POOL, RESULTS, EVENTS, METHODS, GROWTH, TENSORBOARD,
    "ingredients.safetensors", "report.html", "report.md",
)  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """What makes a run this run and no other."""

    kind: str  # "compare", "cook" or "demo"
    title: str
    seed: int = 0
    metric: str = "accuracy"
    recipe: Mapping[str, Any] = field(default_factory=dict)  # as resolved
    recipe_digest: str = ""
    command: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecipeFacts:
    """What a record says about the recipe that a run comes from."""

    title: str
    kind: str
    command: tuple[str, ...] = ()
    digest: str = ""
    resolved: Mapping[str, Any] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)
    max_shard: int = 5 * 10**9


class RunDirectory:
    """Use `create` to work in one (as a context manager), `open` to read one."""

    def __init__(self, path: Path, run: dict[str, Any], lock: Lock | None) -> None:
        self.path = path
        self.run = run
        self._lock = lock
        self._journal: Journal | None = None
        self._replace = False
        self._recipe: dict[str, Any] | None = None  # to be written

    @classmethod
    def create(
        cls,
        path: str | Path,
        identity: Identity,
        *,
        overwrite: bool = False,
        environment: Mapping[str, Any] | None = None,
    ) -> RunDirectory:
        """A new run, or the same one again to be continued; anything else in the way is refused."""
        directory = cls.claim(path, identity, overwrite=overwrite)
        try:
            directory.begin(environment)
        except BaseException:
            directory.release()
            raise
        return directory

    @classmethod
    def claim(cls, path: str | Path, identity: Identity, *, overwrite: bool = False) -> RunDirectory:
        """The first half of `create`: locked and found usable, but what is there is still untouched."""
        path = Path(path)
        _make(path)
        lock = Lock(path)
        lock.acquire()
        try:
            if (path / _CLEARING).exists():
                _clear(path)  # a process was killed in the middle of it
            replace = overwrite or _nothing_cooked(path)
            run = None
            if not replace and (path / RUN).exists():
                run = _read(path)
                _same(path, run, identity)
            elif not replace:
                _refuse_foreign(path)
            directory = cls(path, run if run is not None else _described(identity), lock)
            directory._replace = replace
            directory._recipe = dict(identity.recipe) if run is None else None
            return directory
        except BaseException:
            lock.release()
            raise

    def begin(self, environment: Mapping[str, Any] | None = None) -> None:
        """The second half: an earlier run that was to be replaced is gone now, and this one is under way."""
        if self._replace:
            _clear(self.path)
        _sweep(self.path)
        if environment is not None:
            self.run["environment"] = dict(environment)
        # Before the recipe: a directory in which only this was written can be recognised as ours.
        self.set_status("running")
        if self._recipe is not None:
            atomic.write_json(self.path / RECIPE, self._recipe)

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        return cls(Path(path), _read(Path(path)), None)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.run["status"] == "running":
            with contextlib.suppress(WriteError):  # the error under way says more
                self.set_status("interrupted")
        self.release()

    def release(self) -> None:
        """Let go of the directory without a word about how the run ended."""
        if self._journal is not None:
            with contextlib.suppress(WriteError):
                self._journal.close()
        if self._lock is not None:
            self._lock.release()

    @property
    def journal(self) -> Journal:
        """The listener that appends to events.jsonl."""
        if self._journal is None:
            self._journal = Journal(self.path / EVENTS)
        return self._journal

    def set_status(self, status: str) -> None:
        self.note(status=status)

    def note(self, **facts: Any) -> None:
        """Add facts to run.json."""
        self.run.update(facts)
        atomic.write_json(self.path / RUN, self.run)

    def method(self, name: str) -> Path:
        return self.path / METHODS / slug(name)

    def growth(self, name: str, models: int) -> Path:
        return self.path / GROWTH / f"{slug(name)}-{models:04d}"

    def read_json(self, name: str) -> Any:
        """One of the record's files, or None where there is none yet."""
        return read_json(self.path / name)

    def write_json(self, name: str, value: Any) -> None:
        atomic.write_json(self.path / name, value)


def slug(method: str) -> str:
    return method.replace("+", "-plus")


def _described(identity: Identity) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": identity.kind,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "stockpot": __version__,
        "command": list(identity.command),
        "seed": identity.seed,
        "recipe_digest": identity.recipe_digest,
        "status": "claimed",  # never written: there is no file before it runs
        "title": identity.title,
        "metric": identity.metric,
        "environment": {},
    }


def _make(path: Path) -> None:
    try:
        atomic.make_directory(path)
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


def _read(path: Path) -> dict[str, Any]:
    run = read_json(path / RUN)
    if run is None:
        raise RunError(
            describe(
                str(path),
                expected=f"a run directory with a {RUN}",
                found="none" if path.exists() else "nothing at this path",
                fix="give the directory that cook, compare or demo wrote",
            )
        )
    if not isinstance(run, dict) or run.get("format") != FORMAT:
        found = run.get("format") if isinstance(run, dict) else type(run).__name__
        raise RunError(
            describe(
                str(path / RUN),
                expected=f"a run of format {FORMAT}",
                found=repr(found),
                fix="update stockpot, or choose another output directory",
            )
        )
    return run


def _same(path: Path, run: Mapping[str, Any], identity: Identity) -> None:
    if run.get("kind") != identity.kind:
        raise RunError(
            describe(
                f"output directory {path}",
                expected=f"a directory of its own for {identity.kind}",
                found=f"an earlier run of {run.get('kind')}, which stays as it is",
                fix=f"add --out {path.name}-{identity.kind}, or replace that run with --overwrite",
            )
        )
    changed = []
    if run.get("recipe_digest") != identity.recipe_digest:
        file = path / RECIPE
        earlier = parse(file.read_text(encoding="utf-8"), str(file)) if file.exists() else {}
        changed += differences(earlier or {}, identity.recipe) or ["the recipe"]
    if changed:
        raise refused(path, "a new directory, or the same run to continue", "another run", changed)


def _nothing_cooked(path: Path) -> bool:
    """A run that failed before its first result (a wrong name, a wrong path): it keeps nobody from starting again."""
    if not (path / RUN).exists() or _read(path).get("status") not in ("running", "interrupted"):
        return False
    kept = (METHODS, GROWTH, RESULTS, "ingredients.safetensors")
    return not any((path / name).exists() for name in kept)


def refused(
    path: Path, expected: str, found: str, differing: Sequence[str], last: str | None = None
) -> RunError:
    """A run directory that cannot be continued, with the difference shown, and a last word."""
    message = describe(
        f"output directory {path}",
        expected=expected,
        found=found,
        fix="choose another directory with --out, or replace that run with --overwrite",
    )
    lines = [message, "  What differs:", *(f"    {line}" for line in differing)]
    return RunError("\n".join([*lines, *([] if last is None else [f"  {last}"])]))


def _refuse_foreign(path: Path) -> None:
    # Of ours there may be a lock, and the first file that a killed process was about to write.
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in (LOCK, f".{RUN}.writing"))
    if foreign:
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        (path / LOCK).unlink(missing_ok=True)
        raise RunError(
            describe(
                f"output directory {path}",
                expected="a new or empty directory, or an earlier run",
                found=f"other files: {', '.join(foreign[:5])}{more}",
                fix="choose another directory with --out, or write beside them with --overwrite",
            )
        )


def _clear(path: Path) -> None:
    """Remove a run's own files; whatever else is there stays. Begun, it is finished, also by another process."""
    atomic.write_bytes(path / _CLEARING, b"")
    for name in _OWN:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
    atomic.sync_directory(path)
    (path / _CLEARING).unlink()


def _sweep(path: Path) -> None:
    """What killed processes left half-written."""
    for folder in (path, *path.glob(f"{METHODS}/*/"), *path.glob(f"{GROWTH}/*/")):
        atomic.sweep(folder)

"""One directory per run: made, locked, recognised again, or refused. Its files are listed in docs/architecture.md."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from stockpot import atomic
from stockpot._version import __version__
from stockpot.errors import RunError, describe
from stockpot.recipe.yaml_text import dump, parse
from stockpot.run.differences import differences
from stockpot.run.journal import Journal
from stockpot.run.lock import LOCK, Lock

FORMAT = 1
RUN, RECIPE, POOL, RESULTS, EVENTS = "run.json", "recipe.yaml", "pool.json", "results.json", "events.jsonl"
METHODS, GROWTH, TENSORBOARD = "methods", "growth", "tensorboard"
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


class RunDirectory:
    """Use `create` to work in one (as a context manager), `open` to read one."""

    def __init__(self, path: Path, run: dict[str, Any], lock: Lock | None) -> None:
        self.path = path
        self.run = run
        self._lock = lock
        self._journal: Journal | None = None

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
        path = Path(path)
        _make(path)
        lock = Lock(path)
        lock.acquire()
        try:
            ours = overwrite or _nothing_cooked(path)
            if ours:
                _clear(path)
            if (path / RUN).exists():
                run = _read(path)
                _same(path, run, identity)
            else:
                if not ours:
                    _refuse_foreign(path)
                run = {
                    "format": FORMAT,
                    "kind": identity.kind,
                    "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                    "stockpot": __version__,
                    "command": list(identity.command),
                    "seed": identity.seed,
                    "recipe_digest": identity.recipe_digest,
                    "status": "running",
                    "title": identity.title,
                    "metric": identity.metric,
                    "environment": dict(environment or {}),
                }
                atomic.write_bytes(path / RECIPE, dump(dict(identity.recipe)).encode())
            directory = cls(path, run, lock)
            directory.set_status("running")
            return directory
        except BaseException:
            lock.release()
            raise

    @classmethod
    def open(cls, path: str | Path) -> RunDirectory:
        return cls(Path(path), _read(Path(path)), None)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.run["status"] == "running":
            self.set_status("interrupted")
        if self._journal is not None:
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
        self.run["status"] = status
        atomic.write_json(self.path / RUN, self.run)

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


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, OSError) as error:
        raise RunError(
            describe(
                str(path),
                expected="a file of a run record",
                found=str(error),
                fix="restore it from a copy, or start again with another output directory",
            )
        ) from error


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            describe(
                f"output directory {path}",
                expected="a place to write to",
                found=error.strerror or str(error),
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
    changed = []
    if run["kind"] != identity.kind:
        changed.append(f"kind: {run['kind']} -> {identity.kind}")
    if run["recipe_digest"] != identity.recipe_digest:
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


def refused(path: Path, expected: str, found: str, differing: Sequence[str]) -> RunError:
    """A run directory that cannot be continued, with the difference shown."""
    message = describe(
        f"output directory {path}",
        expected=expected,
        found=found,
        fix="choose another directory with --out, or replace that run with --overwrite",
    )
    return RunError("\n".join([message, "  What differs:", *(f"    {line}" for line in differing)]))


def _refuse_foreign(path: Path) -> None:
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
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
    """Remove a run's own files; whatever else is there stays."""
    for name in _OWN:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)

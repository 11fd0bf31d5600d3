"""Fill the disk at every write of a command: clear words, nothing damaged, and the same result once there is room.

    python -m torture.full_disk

On a real small file system (tmpfs) that is one page larger each time, until the command gets through; and, at calls
that change the disk, an injected "no space left" that lasts, or "permission denied" once. Needs a mount namespace for
the first half (`unshare -rm`) and says so where there is none.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from torture.cases import Case, prepare
from torture.evidence import damaged, differences, facts
from torture.process import Command, warm_up

PAGE = os.sysconf("SC_PAGE_SIZE")
CASES = ("cook mehl+ in shards", "cook greedy with BatchNorm", "compare two", "finetune")
POINTS = 40  # calls of a command at which errors are injected, at most
_INSIDE = "STOCKPOT_TORTURE_INSIDE"  # set where mounting is allowed
# Rewritten in place, whole each time, as a run goes on; `damaged` looks at them.
_MOVING = ("run.json", "pool.json", "results.json", "result.json", "weights.safetensors", "state.safetensors")


class Disk:
    """Commands on a disk that may be full, and everything that was wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.small = folder / "small"
        self.small.mkdir()
        self.failures: list[str] = []
        self.refusals: Counter[str] = Counter()
        self._wholes: dict[str, dict[str, Any]] = {}

    def start(self, case: Case, out: Path, **fault: Any) -> Command:
        log = self.folder / "log"
        options = {"roomy": True, "charts": False, **fault}
        command = Command(case.arguments(out), self.folder, log, **options)
        if not command.wait():
            command.kill()
        return command

    def whole(self, case: Case, out: Path) -> dict[str, Any]:
        """What the case ends with when there is room; always in the same place."""
        if case.name not in self._wholes:
            command = self.start(case, out)
            if command.code != 0:
                raise SystemExit(f"{case.name} does not run at all:\n{command.text()}")
            self._wholes[case.name] = facts(out)
            shutil.rmtree(out)
        return self._wholes[case.name]

    def refused(self, case: Case, out: Path, where: str, before: dict[str, str], command: Command) -> None:
        """After a command that had no room."""
        said = command.text()
        self.refusals[case.name] += 1
        wrong = list(damaged(out))
        ours = "expected room and permission to write" in said and "What was done is kept; resume with:" in said
        nowhere = "expected a place to write to" in said  # not even the directory could be made
        if command.code != 1 or "Traceback" in said or not (ours or nowhere):
            wrong.append(f"code {command.code}, and it said: {said.strip()[-600:]}")
        now = _kept(out)
        wrong += [f"{name} was there before" for name in before if now.get(name) != before[name]]
        self.failures += [f"{case.name}, {where}: {line}" for line in wrong]

    def finished(self, case: Case, out: Path, where: str) -> None:
        """With room again."""
        command = self.start(case, out)
        if command.code != 0:
            self.failures.append(f"{case.name}, {where}: cannot be continued: {command.text()[-600:]}")
        else:
            lines = differences(self._wholes[case.name], facts(out))
            self.failures += [f"{case.name}, {where}: {line}" for line in lines]
        shutil.rmtree(out, ignore_errors=True)


def on_small_disks(disk: Disk, case: Case, stride: int) -> None:
    """One page more at a time; a second attempt without more room must be refused just the same."""
    out = disk.small / "out"
    _mount(disk.small, None)
    disk.whole(case, out)
    _umount(disk.small)
    pages = 1
    while True:
        _mount(disk.small, pages)
        command = disk.start(case, out)
        if command.code == 0:
            _umount(disk.small)
            return
        where = f"{pages} pages"
        disk.refused(case, out, where, {}, command)
        before = _kept(out)
        disk.refused(case, out, f"{where}, again", before, disk.start(case, out))
        _remount(disk.small)
        disk.finished(case, out, where)
        _umount(disk.small)
        pages += stride
        if len(disk.failures) > 20 or pages > 4000:
            return


def at_every_call(disk: Disk, case: Case, stride: int) -> None:
    out = disk.folder / "out"
    disk.whole(case, out)
    calls = disk.start(case, out, save_every=0.1).board.calls
    shutil.rmtree(out)
    stride = max(stride, calls // POINTS)
    at = 1
    while len(disk.failures) <= 20:
        for error, lasting in ((errno.ENOSPC, True), (errno.EACCES, False)):
            command = disk.start(case, out, at=at, error=error, lasting=lasting, save_every=0.1)
            where = f"{errno.errorcode[error]} at call {at}"
            if command.board.calls < at:
                shutil.rmtree(out)
                return
            if command.code != 0:
                disk.refused(case, out, where, {}, command)
            disk.finished(case, out, where)
        at += stride


def _kept(folder: Path) -> dict[str, str]:
    """Files that no attempt may touch again, with their content."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and file.suffix in (".json", ".safetensors", ".yaml")
        and file.name not in _MOVING
        and "search" not in file.parts
        and not any(part.endswith(".writing") for part in file.parts)
    }


def _mount(place: Path, pages: int | None) -> None:
    size = "64m" if pages is None else str(pages * PAGE)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", place], check=True)


def _remount(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)


def _umount(place: Path) -> None:
    subprocess.run(["umount", place], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--pages", type=int, default=1, help="pages by which the disk grows")
    parser.add_argument("--calls", type=int, default=5, help="every how many calls an error is injected; 0: never")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    mounts = _INSIDE in os.environ
    if not mounts and _may_mount():
        again = ["unshare", "-rm", sys.executable, "-m", "torture.full_disk", *sys.argv[1:]]
        os.execvpe("unshare", again, {**os.environ, _INSIDE: "1"})
    began = time.monotonic()
    warm_up()
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="stockpot-full-", dir=place))
    disk = Disk(folder)
    try:
        cases = {case.name: case for case in prepare(folder, given.seed)}
        for name in CASES:
            if given.only not in name:
                continue
            if mounts:
                on_small_disks(disk, cases[name], given.pages)
            if given.calls:
                at_every_call(disk, cases[name], given.calls)
            print(f"{name}: {disk.refusals[name]} refusals, {len(disk.failures)} failures in all", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for failure in disk.failures:
        print(f"FAILED {failure}")
    kind = (
        "on small file systems and by injected errors" if mounts else "by injected errors only: mounting is not allowed"
    )
    print(f"{sum(disk.refusals.values())} full disks, {kind}, in {time.monotonic() - began:.0f} s")
    print(f"{len(disk.failures)} failures")
    sys.exit(1 if disk.failures else 0)


def _may_mount() -> bool:
    if shutil.which("unshare") is None or not sys.platform.startswith("linux"):
        return False
    probe = 'd=$(mktemp -d) && mount -t tmpfs none "$d" && umount "$d" && rmdir "$d"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", probe], capture_output=True, check=False)
    return done.returncode == 0


if __name__ == "__main__":
    main()

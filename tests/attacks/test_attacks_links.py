"""Links, FIFOs and devices planted in the directories that commands work in.

Nothing that a directory contains may make a command read, write, create or delete outside of it, or wait for ever.
Victims lie outside, under a watch of the file system (every open, read, write, creation and removal is told), and are
compared byte for byte afterwards. "moved" is the strongest plant: the real file or folder lies outside, in perfect
order, and a link stands in its place.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cli.conftest import TOY
from stockpot import Pool, Soup
from stockpot.cli.app import app
from stockpot.errors import StockpotError
from stockpot.soup import rebuild
from zoo import fine_tunes, mlp, write

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches by inotify")

LONGEST = 5.0  # seconds that a command may take
RECIPE = """
pool: {path: pool}
model: {python: "toy:model"}
data: {python: "toy:data"}
method: {name: greedy, methods: [best, uniform, greedy]}
finetune: {dir: made, trials: 2, epochs: 1, lr: 0.01, batch_size: 40, probe_epochs: 1}
output: {dir: run}
"""


class Watch:
    """Everything that happens in a folder and below it, as the kernel tells it."""

    _WORDS = {
        0x1: "read", 0x2: "written", 0x4: "changed", 0x20: "opened", 0x40: "moved away", 0x80: "moved in",
        0x100: "created", 0x200: "deleted",
    }  # fmt: skip

    def __init__(self, folder: Path) -> None:
        libc: Any = ctypes.CDLL(None, use_errno=True)
        self._handle = libc.inotify_init1(os.O_NONBLOCK)
        assert self._handle >= 0
        mask = sum(self._WORDS)
        self._places = {
            libc.inotify_add_watch(self._handle, os.fsencode(place), mask): place
            for place in (folder, *(path for path in folder.rglob("*") if path.is_dir()))
        }

    def events(self) -> list[str]:
        found = []
        while True:
            try:
                content = os.read(self._handle, 2**16)
            except BlockingIOError:
                return found
            while content:
                place, mask, _, length = struct.unpack_from("iIII", content)
                name = content[16 : 16 + length].rstrip(b"\0").decode()
                words = [word for bit, word in self._WORDS.items() if mask & bit]
                if words:
                    found.append(f"{self._places[place] / name} {', '.join(words)}")
                content = content[16 + length :]

    def close(self) -> None:
        os.close(self._handle)


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


class Scene:
    """A copy of an honest folder, and victims beside it."""

    def __init__(self, honest: Path, place: Path) -> None:
        self.work = place / "work"
        shutil.copytree(honest, self.work, symlinks=True)
        self.outside = place / "outside"
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "file").write_text('{"theirs": 1}\nno newline at the end')
        (self.outside / "folder" / "theirs.safetensors").write_bytes(b"theirs")

    def plant(self, name: str, kind: str) -> None:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "moved" and path.exists():
            path.rename(self.outside / "moved")
            path.symlink_to(self.outside / "moved")
            return
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        else:
            targets = {"moved": "file", "file": "file", "folder": "folder", "nothing": "nothing"}
            path.symlink_to("/dev/zero" if kind == "device" else self.outside / targets[kind])

    def run(self, *commands: tuple[object, ...]) -> list[str]:
        """What is wrong: what happened outside, what hung, what ended without our words."""
        wrong = []
        before = contents(self.outside)
        watch = Watch(self.outside)
        try:
            for command in commands:
                arguments = [str(argument) for argument in command]
                hung: list[bool] = []
                timer = threading.Timer(LONGEST, self._free, (hung,))
                timer.start()
                result = CliRunner().invoke(app, arguments)
                timer.cancel()
                wrong += [f"{arguments}: {event}" for event in watch.events()]
                wrong += [f"{arguments}: hung"] if hung else []
                if result.exit_code not in (0, 1) or not isinstance(
                    result.exception, (SystemExit, type(None))
                ):
                    wrong.append(f"{arguments}: {result.exit_code} {result.exception!r} {result.stderr}")
                if "unexpected" in result.stderr or (
                    result.exit_code == 1 and "error: " not in result.stderr
                ):
                    wrong.append(f"{arguments}: {result.stderr}")
        finally:
            watch.close()
        after = contents(self.outside)
        return wrong if after == before else [*wrong, f"{before.keys() ^ after.keys()} or their content"]

    def _free(self, hung: list[bool]) -> None:
        hung.append(True)
        for path in self.work.rglob("*"):
            if path.is_fifo():
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # whoever waits for it goes on


@pytest.fixture(scope="module", autouse=True)
def _plain_pages() -> Iterator[None]:
    """Reports without charts, which take seconds to draw and touch no file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stockpot.report.write.html", lambda page: "<html></html>\n")
        patch.setattr("stockpot.report.write.markdown", lambda page: "page\n")
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "honest"
    write(folder / "pool", fine_tunes(mlp, 3))
    (folder / "toy.py").write_text(TOY.replace('if which == "train":\n        return None\n', ""))
    (folder / "recipe.yaml").write_text(RECIPE)
    Soup.uniform(Pool.open(folder / "pool")).save(folder / "soup")
    for command in ("compare", "finetune"):
        result = CliRunner().invoke(app, [command, str(folder / "recipe.yaml")])
        assert result.exit_code == 0, result.stderr
    return folder


RUN_FILES = (
    ".lock", "run.json", "recipe.yaml", "pool.json", "results.json", "events.jsonl", "ingredients.safetensors",
    "report.md", "report.html", "methods/greedy/result.json", "methods/greedy/weights.safetensors",
    "methods/greedy/soup.json", "methods/greedy/state.safetensors", "methods/greedy/statistics.safetensors",
    "methods/greedy/soup/model.safetensors", "methods/greedy/soup/soup.json",
    # Temporary names: of earlier versions, of this one, and of what steps aside.
    ".report.md.writing", ".report.html.writing", ".run.json.writing", "..clearing.writing", ".clearing",
    ".report.md.0123456789abcdef.writing", ".run.json.0123456789abcdef.writing",
    "methods/greedy/.soup.0123456789abcdef.writing", "methods/greedy/.soup.0123456789abcdef.replaced",
)  # fmt: skip
RUN_FOLDERS = ("methods", "methods/greedy", "methods/uniform", "methods/greedy/soup", "growth", "tensorboard")


def run_commands(work: Path) -> list[tuple[object, ...]]:
    run, recipe = work / "run", work / "recipe.yaml"
    return [
        ("report", run),
        ("rebuild", run, "--method", "greedy"),
        ("rebuild", run, "--method", "greedy", "--out", work / "again", "--overwrite"),
        ("evaluate", run, recipe),
        ("evaluate", run / "methods" / "greedy" / "soup", recipe),
        ("cook", recipe, "--out", run),
        ("compare", recipe),
        ("compare", recipe, "--overwrite"),
    ]


@pytest.mark.parametrize("kind", ["moved", "nothing", "fifo"])
@pytest.mark.parametrize("name", RUN_FILES)
def test_files_of_a_run(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"run/{name}", kind)
    assert scene.run(*run_commands(scene.work)) == []


@pytest.mark.parametrize("kind", ["moved", "folder", "nothing", "fifo"])
@pytest.mark.parametrize("name", RUN_FOLDERS)
def test_folders_of_a_run(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"run/{name}", kind)
    assert scene.run(*run_commands(scene.work)) == []

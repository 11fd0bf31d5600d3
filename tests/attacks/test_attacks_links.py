"""Links, FIFOs and devices planted in the directories that commands work in.

Nothing that a directory contains may make a command read, write, create or delete outside of it, or wait for ever.
Victims lie outside, under a watch of the file system (every open, read, write, creation and removal is told), and are
compared byte for byte afterwards. "moved" is the strongest plant: the real file or folder lies outside, in perfect
order, and a link stands in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from stockpot import Pool, Soup
from stockpot.cli.app import app
from stockpot.errors import StockpotError
from stockpot.layout import Layout
from stockpot.soup import rebuild, weights
from zoo import fine_tunes, normed, write

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="watches by inotify")

LONGEST = 5.0  # seconds that a command may wait
TOY = """
import torch
from zoo import normed, samples

def model():
    return normed()

def data(which):
    return samples(40, seed=len(which))
"""
RECIPE = """
pool: {path: pool}
model: {python: "toy:model", statistics: average}
data: {python: "toy:data"}
method: {name: greedy, methods: [best, greedy]}
finetune: {dir: made, trials: 2, epochs: 1, lr: 0.01, batch_size: 40, probe_epochs: 1}
output: {dir: run}
"""


class Watch:
    """Everything that happens in a folder and below it, as the kernel tells it."""

    _WORDS: ClassVar = {
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
        found: list[str] = []
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
                ended = threading.Event()
                guard = threading.Thread(target=self._free, args=(ended, hung))
                guard.start()
                result = CliRunner().invoke(app, arguments)
                ended.set()
                guard.join()
                wrong += [f"{arguments}: {event}" for event in watch.events()]
                wrong += [f"{arguments}: hung"] if hung else []
                if result.exit_code not in (0, 1) or not isinstance(result.exception, (SystemExit, type(None))):
                    wrong.append(f"{arguments}: {result.exit_code} {result.exception!r} {result.stderr}")
                if "unexpected" in result.stderr or (result.exit_code == 1 and "error: " not in result.stderr):
                    wrong.append(f"{arguments}: {result.stderr}")
        finally:
            watch.close()
        after = contents(self.outside)
        return wrong if after == before else [*wrong, f"{before.keys() ^ after.keys()} or their content"]

    def _free(self, ended: threading.Event, hung: list[bool]) -> None:
        """Whoever waits and computes nothing for five seconds waits for a FIFO: note it, and let it go on."""
        busy = time.process_time()
        while not ended.wait(LONGEST):
            if time.process_time() - busy < 0.05:
                hung.append(True)
                for path in self.work.rglob("*"):
                    if path.is_fifo():
                        os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            busy = time.process_time()


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """Reports without their pages, and a demo of a few steps."""
    from stockpot.zoo import demo

    whole, make = demo.demo_recipe, demo.make_demo_pool

    def recipe(seed: int) -> str:
        begin = whole(seed).partition("method:")[0]
        return f"{begin}method: {{methods: [best, greedy]}}\noutput: {{dir: run}}\n"

    def pool(out: Path, **options: Any) -> Any:
        return make(out, trials=2, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stockpot.report.page.page_of", lambda record: {"soup": None, "rows": []})
        patch.setattr("stockpot.report.page.html", lambda page: "<html></html>\n")
        patch.setattr("stockpot.report.page.markdown", lambda page: "page\n")
        patch.setattr("stockpot.zoo.demo.demo_recipe", recipe)
        patch.setattr("stockpot.zoo.demo.make_demo_pool", pool)
        patch.setattr(demo, "EPOCHS", 0.2)
        patch.setattr(demo, "SPACES", {**demo.SPACES, "epochs": 1})
        for split in demo.SIZES:
            patch.setitem(demo.SIZES, split, 40)
        yield


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("links") / "honest"
    write(folder / "pool", fine_tunes(normed, 3))
    (folder / "toy.py").write_text(TOY)
    (folder / "recipe.yaml").write_text(RECIPE)
    pool = Pool.open(folder / "pool")
    statistics = {"1.running_mean": pool.tensor(0, "1.running_mean")}
    layout = Layout.of(pool, "model")
    Soup(pool, layout, weights.uniform(3, 1), statistics).save(folder / "soup")
    recipe = str(folder / "recipe.yaml")
    compare = ["compare", recipe, "--out", str(folder / "compared")]
    for command in (["cook", recipe], compare, ["finetune", recipe], ["demo", "--out", str(folder / "demo")]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.stderr
    return folder


RUN_FILES = (
    ".lock", "run.json", "recipe.yaml", "pool.json", "results.json", "events.jsonl", "ingredients.safetensors",
    "report.md", "report.html", "methods/greedy/result.json", "methods/greedy/weights.safetensors",
    "methods/greedy/soup.json", "methods/greedy/state.safetensors", "methods/greedy/statistics.safetensors",
    "methods/greedy/soup/model.safetensors", "methods/greedy/soup/soup.json", "methods/greedy/soup/README.md",
)  # fmt: skip
# Temporary names: of earlier versions, of this one, and of what steps aside.
TEMPORARY = (
    ".report.md.writing", "..clearing.writing", ".clearing", ".report.md.0123456789abcdef.writing",
    ".run.json.0123456789abcdef.writing", "methods/.greedy.0123456789abcdef.writing",
    "methods/greedy/.soup.0123456789abcdef.writing", "methods/greedy/.soup.0123456789abcdef.replaced",
)  # fmt: skip
RUN_FOLDERS = ("methods", "methods/greedy", "methods/best", "methods/greedy/soup", "tensorboard")
RUN = [
    *((name, kind) for name in RUN_FILES for kind in ("moved", "nothing", "fifo")),
    *((name, kind) for name in ("run.json", "results.json", "events.jsonl") for kind in ("device", "folder")),
    *((name, kind) for name in TEMPORARY for kind in ("file", "folder")),
    *((name, kind) for name in RUN_FOLDERS for kind in ("moved", "folder", "nothing", "fifo")),
]


@pytest.mark.parametrize(("name", "kind"), RUN)
def test_a_run_directory_leads_nowhere(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"run/{name}", kind)
    run, recipe = scene.work / "run", scene.work / "recipe.yaml"
    soup = [("evaluate", run / "methods" / "greedy" / "soup", recipe)]
    wrong = scene.run(
        ("report", run),
        ("rebuild", run, "--method", "greedy"),
        ("rebuild", run, "--out", scene.work / "again"),
        ("evaluate", run, recipe),
        *(soup if name.startswith("methods/greedy/soup/") else []),
        ("compare", recipe),  # another kind of run, which is refused
        ("cook", recipe),
        ("cook", recipe, "--overwrite"),
    )
    assert wrong == []


COMPARED = (
    "methods",
    "methods/best",
    "methods/greedy",
    "methods/greedy/result.json",
    "results.json",
    "run.json",
    ".lock",
)


@pytest.mark.parametrize("kind", ["moved", "folder", "nothing", "fifo"])
@pytest.mark.parametrize("name", COMPARED)
def test_a_comparison_leads_nowhere(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"compared/{name}", kind)
    place = scene.work / "compared"
    compare = ("compare", scene.work / "recipe.yaml", "--out", place)
    assert scene.run(("report", place), ("rebuild", place), compare, (*compare, "--overwrite")) == []


@pytest.mark.parametrize("command", ["cook", "compare"])
def test_a_folder_that_is_exchanged_for_a_link_meanwhile_leads_nowhere(
    honest: Path, tmp_path: Path, command: str
) -> None:
    """Between a check and the use of what was checked there is a moment; here there are thousands of them."""
    scene = Scene(honest, tmp_path)
    run, away = scene.work / "again", scene.work / "away"
    before, ended = contents(scene.outside), threading.Event()

    def exchange() -> None:
        while not ended.is_set():
            for name in ("methods", "methods/greedy"):
                with contextlib.suppress(OSError):
                    (run / name).rename(away)
                    (run / name).symlink_to(scene.outside / "folder")
                    time.sleep(0.0003)
                    (run / name).unlink()
                    away.rename(run / name)

    other = threading.Thread(target=exchange)
    other.start()
    try:
        for _ in range(6):
            arguments = [command, str(scene.work / "recipe.yaml"), "--out", str(run), "--overwrite"]
            CliRunner().invoke(app, arguments)
    finally:
        ended.set()
        other.join()
    assert contents(scene.outside) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in ("soup.json", "model.safetensors", "statistics.safetensors")
        for kind in ("moved", "file", "nothing", "fifo", "device")
    ],
)
def test_a_soup_leads_nowhere(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"soup/{name}", kind)
    soup = scene.work / "soup"
    wrong = scene.run(
        ("rebuild", soup),
        ("rebuild", soup, "--out", scene.work / "again"),
        ("evaluate", soup, scene.work / "recipe.yaml"),
        *([("inspect", soup, scene.work / "pool")] if kind in ("fifo", "device") else []),  # a pool may have links
    )
    assert wrong == []
    if name != "model.safetensors":  # which is made, and not read
        with pytest.raises(StockpotError):
            Soup.load(soup)
        with pytest.raises(StockpotError):
            rebuild(soup, scene.work / "again", overwrite=True)


@pytest.mark.parametrize("kind", ["folder", "nothing", "fifo"])
@pytest.mark.parametrize("name", ["tensorboard", "tensorboard/events.out.tfevents.1"])
def test_what_tensorboard_writes_leads_nowhere(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    class SummaryWriter:
        """Opens what it is told to, as the library does."""

        def __init__(self, folder: str) -> None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.file = (Path(folder) / "events.out.tfevents.1").open("ab")

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.file.write(f"{tag} {value} {step}\n".encode())

        def close(self) -> None:
            self.file.close()

    fake = types.ModuleType("torch.utils.tensorboard")
    fake.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", fake)
    scene = Scene(honest, tmp_path)
    shutil.rmtree(scene.work / "run" / "methods")  # so that there is something to do
    scene.plant(f"run/{name}", kind)
    assert scene.run(("cook", scene.work / "recipe.yaml", "--set", "output.track=tensorboard")) == []


SEARCH = (
    ".lock", "search", "search/plan.json", "search/start.safetensors", "search/trial_000.safetensors",
    "search/trial_000.lock", "trial_000.json", "trial_000.safetensors", ".trial_000.json.writing",
    ".trial_000.safetensors.0123456789abcdef.writing", "search/.plan.json.0123456789abcdef.writing",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["moved", "nothing", "folder", "fifo"])
@pytest.mark.parametrize("name", SEARCH)
def test_a_search_leads_nowhere(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"made/{name}", kind)
    recipe = scene.work / "recipe.yaml"
    assert scene.run(("finetune", recipe), ("finetune", recipe, "--trials", 3)) == []


DEMO = [
    *((name, kind) for name in ("pool", "run", "pool/search") for kind in ("moved", "folder", "nothing", "fifo")),
    *((name, "moved") for name in (".stockpot-demo", "recipe.yaml", "pretrained.safetensors", "pool/.lock")),
    *((name, "nothing") for name in ("recipe.yaml", "pretrained.safetensors", "run/.lock", "run/run.json")),
    *((name, "fifo") for name in (".stockpot-demo", "recipe.yaml", "pretrained.safetensors", "run/methods")),
    *((name, "file") for name in ("pool/trial_000.json", ".recipe.yaml.writing")),
]


@pytest.mark.parametrize(("name", "kind"), DEMO)
def test_a_demo_leads_nowhere(honest: Path, tmp_path: Path, name: str, kind: str) -> None:
    scene = Scene(honest, tmp_path)
    scene.plant(f"demo/{name}", kind)
    demo = ("demo", "--out", scene.work / "demo")
    assert scene.run(demo, (*demo, "--overwrite")) == []


def test_there_are_enough_of_them() -> None:
    assert len(RUN) + 15 + 4 * len(SEARCH) + len(DEMO) >= 150


def test_the_watch_sees(honest: Path, tmp_path: Path) -> None:
    """A watch that tells nothing would let everything pass."""
    scene = Scene(honest, tmp_path)
    watch = Watch(scene.outside)
    (scene.outside / "file").read_bytes()
    (scene.outside / "folder" / "new").touch()
    told = " ".join(watch.events())
    watch.close()
    assert "outside/file opened" in told
    assert "folder/new created" in told


# ---- what --overwrite may remove


@pytest.mark.parametrize("command", ["cook", "compare"])
@pytest.mark.parametrize("setting", ["--overwrite", "output.overwrite=true"])
def test_a_folder_that_was_never_a_run_is_not_overwritten(
    honest: Path, tmp_path: Path, command: str, setting: str
) -> None:
    scene = Scene(honest, tmp_path)
    mine = scene.work / "mine"
    for name in ("methods/notes.txt", "tensorboard/events", "growth/curve.csv", "recipe.yaml", "report.html"):
        (mine / name).parent.mkdir(parents=True, exist_ok=True)
        (mine / name).write_text("mine")
    before = contents(mine)
    options = [setting] if setting.startswith("--") else ["--set", setting]
    arguments = [command, str(scene.work / "recipe.yaml"), "--out", str(mine), *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "expected a new or empty directory, or an earlier run, found other files: growth" in result.stderr
    assert "--overwrite" not in result.stderr.split("Fix:")[1]
    assert contents(mine) == before


@pytest.mark.parametrize("name", ["pool/theirs.safetensors", "run/notes.txt", "recipe.yaml"])
def test_a_demo_removes_nothing_that_it_did_not_make(honest: Path, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine"
    (mine / name).parent.mkdir(parents=True)
    (mine / name).write_text("mine")
    before = contents(mine)
    for options in ([], ["--overwrite"]):
        result = CliRunner().invoke(app, ["demo", "--out", str(mine), *options])
        assert result.exit_code == 1
        assert "that no demo made" in result.stderr
        assert contents(mine) == before
    # In a folder of the demo, too.
    scene = Scene(honest, tmp_path / "scene")
    place = scene.work / "demo" / name
    place.write_text("mine")
    result = CliRunner().invoke(app, ["demo", "--out", str(scene.work / "demo"), "--overwrite"])
    assert name == "recipe.yaml" or place.read_text() == "mine"

"""Ingredients are only read; and when somebody else writes to them, that is noticed before a soup is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from stockpot import compare, cook
from stockpot.errors import ChangedError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.soup import Soup
from zoo import samples, zoo


def other_content(file: Path) -> None:
    changed = load_file(file)
    changed["0.bias"] += 1
    save_file(changed, file)


def touched(file: Path) -> None:
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def removed(file: Path) -> None:
    file.unlink()


def replaced(file: Path) -> None:
    """The same size at the same time, but another file."""
    status = file.stat()
    twin = file.with_name("twin")
    shutil.copy2(file, twin)
    twin.replace(file)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "found"),
    [(other_content, "written to"), (touched, "written to"), (removed, "gone"), (replaced, "written to")],
)
@pytest.mark.parametrize("moment", ["block", "cooked", "report"])
def test_a_change_during_a_run_stops_it_before_a_soup_is_written(
    tmp_path: Path, moment: str, change: Callable[[Path], None], found: str
) -> None:
    pool, task = zoo(tmp_path / "pool", 4, report=samples(60, seed=5))
    file = tmp_path / "pool" / "model_2.safetensors"
    heard: list[str] = []

    def meddle(event: Event) -> None:
        if event.kind == moment and moment not in heard:
            change(file)
        heard.append(event.kind)

    with pytest.raises(ChangedError, match=rf"model_2\.safetensors: {found}[\s\S]*no soup was written"):
        compare(
            pool, task, ["uniform", "mehl+", "crossfit"],
            run=tmp_path / "run", listen=meddle, steps=4, block_size=2,
            each={"crossfit": {"steps": 4, "block_size": 2}},
        )  # fmt: skip
    assert heard.count(moment) == 1  # at once, not at the end
    assert not list((tmp_path / "run").rglob("soup"))
    assert not (tmp_path / "run" / "results.json").exists()


def test_a_change_while_the_soup_is_written_leaves_none(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path / "pool", 3)

    def meddle(event: Event) -> None:
        if event.data.get("what") == "building the soup":
            touched(tmp_path / "pool" / "model_0.safetensors")

    for act in (Soup.uniform(pool).save, Soup.uniform(pool).export):
        with pytest.raises(ChangedError, match="model_0"):
            act(tmp_path / "soup", listen=meddle)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["pool"]


def test_part_of_a_pool_remembers_when_it_was_opened(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path / "pool", 3)
    touched(tmp_path / "pool" / "model_1.safetensors")
    pool.subset([0, 2]).verify_unchanged()
    with pytest.raises(ChangedError, match="model_1"):
        pool.subset([1, 2]).verify_unchanged()


READ_ONLY = """
import sys
from pathlib import Path
from stockpot import Pool, Task, cook
from zoo import mlp, samples

pool = Pool.open(Path(sys.argv[1]))
try:
    (Path(sys.argv[1]) / "new").touch()
except OSError:
    print("read-only")
result = cook(pool, Task(mlp(), samples()), "mehl+", steps=4, block_size=2)
result.soup.save(sys.argv[2])
"""


def test_ingredients_on_a_read_only_file_system_are_enough(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", 4)
    direct = cook(pool, task, "mehl+", steps=4, block_size=2)
    assert direct.soup is not None
    direct.soup.save(tmp_path / "direct")
    script = tmp_path / "script.py"
    script.write_text(READ_ONLY)
    if shutil.which("unshare") is None:
        pytest.skip("no mount namespaces here")
    place = str(tmp_path / "pool")
    inside = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", place, sys.executable, script, place, tmp_path / "soup"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )
    if "read-only" not in done.stdout:
        pytest.skip(f"no read-only mounts here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("soup", "direct")]
    assert weights[0] == weights[1]


def test_ingredients_without_write_permission_are_enough(tmp_path: Path) -> None:
    zoo(tmp_path / "pool", 3)
    for file in (tmp_path / "pool").iterdir():
        file.chmod(0o444)
    (tmp_path / "pool").chmod(0o555)
    try:
        pool = Pool.open(tmp_path / "pool")
        Soup.uniform(pool).save(tmp_path / "soup")
    finally:
        (tmp_path / "pool").chmod(0o755)
    assert (tmp_path / "soup" / "model.safetensors").stat().st_mode & 0o200  # the soup is the user's to change

"""Claims about the demo's data and pool; a small one, for time."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
import torch
import yaml

from stockpot import files
from stockpot.errors import DataError, LinkError, RunError, TaskError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.task import Task
from stockpot.zoo import demo
from stockpot.zoo.demo import SIZES, DigitViT, clear_demo, demo_recipe, digits, make_demo_pool
from stockpot.zoo.folder import read_file

pytest.importorskip("sklearn")


def test_the_splits_share_no_image_and_cover_the_data() -> None:
    parts = {name: digits(name) for name in SIZES}
    assert {name: len(labels) for name, (_, labels) in parts.items()} == SIZES
    rows = torch.cat([images.flatten(1) for images, _ in parts.values()])
    assert len(rows) == 1797
    # The data holds no image twice, so any sharing would show here.
    assert len({tuple(row) for row in rows.tolist()}) == 1797
    for images, labels in parts.values():
        assert images.shape[1:] == (1, 8, 8)
        assert (images.dtype, int(images.max())) == (torch.uint8, 255)
        assert set(labels.tolist()) == set(range(10))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(DataError, match="split 'test' of the digits: expected one of train, fit, report"):
        digits("test")  # type: ignore[arg-type]


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(TaskError, match=r"library sklearn: [\s\S]*pip install 'stockpot\[demo\]'"):
        digits("fit")


def test_the_transformer_is_small_and_takes_bytes_and_floats() -> None:
    model = DigitViT()
    assert 100_000 < sum(parameter.numel() for parameter in model.parameters()) < 200_000
    images, _ = digits("fit")
    assert torch.allclose(model(images[:4]), model(images[:4].float() / 255))


def test_clusters_hold_like_images_together() -> None:
    images, labels = digits("train")
    found = demo.cluster(images, 30, seed=0)
    assert torch.equal(found, demo.cluster(images, 30, seed=0))
    pure = sum(int(labels[found == c].bincount().max()) for c in range(30) if (found == c).any())
    assert pure > 0.8 * len(labels)


def test_a_small_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "EPOCHS", 2.0)
    monkeypatch.setattr(demo, "SPACES", {**demo.SPACES, "epochs": 1})
    events: list[Event] = []
    made = make_demo_pool(tmp_path, trials=2, listen=events.append)
    pool = Pool.open(tmp_path / "pool")
    assert pool.names == ("trial_000", "trial_001")
    assert all(0.1 < float(record.score["value"] or 0) <= 1 for record in made if record.score)
    assert [event.kind for event in events if event.kind in ("pretraining", "probe")] == ["pretraining", "probe"]
    start, _ = read_file(tmp_path / "pool" / "search" / "start.safetensors", tmp_path)
    before, _ = read_file(tmp_path / "pretrained.safetensors", tmp_path)
    assert {name for name in start if not torch.equal(start[name], before[name])} == {"head.weight", "head.bias"}
    Task(DigitViT(), digits("fit"), digits("report")).check_names(pool.specs)

    def listen(event: Event) -> None:
        assert event.kind != "trial"

    assert make_demo_pool(tmp_path, trials=2, listen=listen) == made


# What `stockpot demo --overwrite` removes ---------------------------------------------------------------


def made(folder: Path) -> None:
    (folder / "pool" / "search").mkdir(parents=True)
    names = ("recipe.yaml", "pretrained.safetensors", "pool/trial_011.json", "pool/trial_000.safetensors")
    for name in (*names, "pool/.lock", "pool/search/plan.json", f"pool/.trial_000.json.{16 * 'a'}.writing"):
        (folder / name).touch()


def test_clearing_removes_what_a_demo_made_and_nothing_else(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "notes.txt").touch()
    (tmp_path / "run").mkdir()
    clear_demo(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "run"}
    clear_demo(tmp_path)


@pytest.mark.parametrize("name", ["mine.safetensors", "trial_012.safetensors", "trial_000.pt", "folder"])
def test_a_pool_with_something_else_in_it_is_left_alone(tmp_path: Path, name: str) -> None:
    made(tmp_path)
    if name == "folder":
        (tmp_path / "pool" / name).mkdir()
    (tmp_path / "pool" / name).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=rf"found also {name}, which no demo made.*\n.*nothing was removed"):
        clear_demo(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["pool", "pool/search", "recipe.yaml"])
def test_clearing_follows_no_link(tmp_path: Path, name: str) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "demo"
    outside.mkdir()
    (outside / "trial_000.safetensors").touch()
    made(folder)
    files.clear((folder / name).parent, [Path(name).name])
    (folder / name).symlink_to(outside if name != "recipe.yaml" else outside / "trial_000.safetensors")
    with contextlib.suppress(LinkError):
        clear_demo(folder)
    assert [path.name for path in outside.iterdir()] == ["trial_000.safetensors"]


def test_the_recipe_names_what_is_there() -> None:
    recipe = yaml.safe_load(demo_recipe(7))
    assert recipe["output"] == {"dir": "run", "seed": 7}
    for part in ("model", "data"):
        module, _, name = recipe[part]["python"].partition(":")
        assert callable(getattr(sys.modules[module], name))

"""What trainers leave, and models of the Hub: which checkpoint is taken, and that it is said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import state, write, write_shards

from stockpot.errors import PoolError
from stockpot.events import Event
from stockpot.pool import Pool


def opened(*sources: object, **how: Any) -> tuple[tuple[str, ...], list[str]]:
    """Names of the ingredients, and what was said of runs."""
    said: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "run":
            said.append(f"{Path(event.data['run']).name}: {event.data['checkpoint']}, {event.data['why']}")

    return Pool.open(*sources, listen=listen, **how).names, said  # type: ignore[arg-type]


def trainer(folder: Path, steps: tuple[int, ...] = (50, 100, 200), best: int | None = None) -> Path:
    for step in steps:
        place = write_shards(folder / f"checkpoint-{step}", state(step))
        (place / "config.json").write_text("{}")
        named = None if best is None else f"/elsewhere/out/checkpoint-{best}"
        (place / "trainer_state.json").write_text(json.dumps({"best_model_checkpoint": named}))
    (folder / "runs").mkdir()
    return folder


def test_a_folder_of_trainer_runs_gives_the_best_or_last_of_each(tmp_path: Path) -> None:
    trainer(tmp_path / "runs" / "a")
    trainer(tmp_path / "runs" / "b", best=100)
    trainer(tmp_path / "runs" / "c", (7,), best=999)  # removed since
    names = ("a/checkpoint-200", "b/checkpoint-100", "c/checkpoint-7")
    said = [
        "a: checkpoint-200, its last",
        "b: checkpoint-100, its best, by trainer_state.json",
        "c: checkpoint-7, its last",
    ]
    for sources in ([tmp_path / "runs"], [f"{tmp_path}/runs/*"], [tmp_path / "runs" / one for one in "abc"]):
        assert opened(*sources) == (names, said)
    every = ("a/checkpoint-50", "a/checkpoint-100", "a/checkpoint-200", "b/checkpoint-50", "b/checkpoint-100")
    assert opened(tmp_path / "runs", all_steps=True) == ((*every, "b/checkpoint-200", "c/checkpoint-7"), [])


def test_one_run_alone_gives_its_steps(tmp_path: Path) -> None:
    run = trainer(tmp_path / "run", best=100)
    assert opened(run) == (("checkpoint-50", "checkpoint-100", "checkpoint-200"), [])
    write(run / "model.safetensors", state())  # the Trainer's own last save makes the folder a checkpoint
    (run / "config.json").write_text("{}")
    assert opened(run, all_steps=True)[0] == ("checkpoint-50", "checkpoint-100", "checkpoint-200")
    assert opened(run, run / "checkpoint-50") == (("run", "run/checkpoint-50"), [])


def test_lightning_folders(tmp_path: Path) -> None:
    for version, names in enumerate(
        (["epoch=2-step=9"], ["epoch=2-step=9", "last"], ["epoch=9-step=9", "epoch=10-step=10"])
    ):
        for seed, name in enumerate(names):
            place = tmp_path / f"version_{version}" / "checkpoints" / f"{name}.ckpt"
            place.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"state_dict": state(seed), "epoch": 2}, place)
    found, said = opened(tmp_path)
    last = "version_2/epoch=10-step=10"
    assert found == ("version_0/epoch=2-step=9", "version_1/epoch=2-step=9", last)
    assert said == [
        "version_0: epoch=2-step=9.ckpt, its last",
        "version_1: epoch=2-step=9.ckpt, the one that is kept beside last.ckpt",
        "version_2: epoch=10-step=10.ckpt, its last",
    ]


def test_lightnings_names_are_ordered_by_step_or_epoch(tmp_path: Path) -> None:
    """Whatever ModelCheckpoint was told to write in front of them: a moving average goes by the order."""
    for seed, name in enumerate(("acc=0.9-epoch=2", "acc=0.5-epoch=10", "acc=0.7-epoch=1")):
        torch.save({"state_dict": state(seed)}, tmp_path / f"{name}.ckpt")
    assert opened(tmp_path)[0] == ("acc=0.7-epoch=1", "acc=0.9-epoch=2", "acc=0.5-epoch=10")


def test_timm_folders(tmp_path: Path) -> None:
    for run, names in {
        "a": ["checkpoint-8", "checkpoint-9", "last", "model_best"],
        "b": ["checkpoint-1", "last"],
    }.items():
        for seed, name in enumerate(names):
            (tmp_path / run).mkdir(exist_ok=True)
            torch.save({"state_dict": state(seed), "arch": "x"}, tmp_path / run / f"{name}.pth.tar")
    found, said = opened(tmp_path)
    assert found == ("a/model_best.pth", "b/last.pth")
    assert said == ["a: model_best.pth.tar, its best", "b: last.pth.tar, its last"]
    assert opened(tmp_path / "a") == (("checkpoint-8.pth", "checkpoint-9.pth"), [])
    assert len(opened(tmp_path / "b", tmp_path / "a", all_steps=True)[0]) == 3


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with the model org/one, and no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, revision in (("one", "a" * 40), ("two", "b" * 40)):
        home = cache / f"models--org--{name}"
        write(home / "snapshots" / revision / "model.safetensors", state())
        (home / "snapshots" / revision / "config.json").write_text("{}")
        (home / "refs").mkdir()
        (home / "refs" / "main").write_text(revision)
    return cache


def test_models_of_the_hub_come_from_the_cache_with_their_revision(hub: Path) -> None:
    for sources in (("hf://org/one", "hf://org/two"), ("org/one", "org/two"), ("hf://org/one@" + "a" * 40, "org/two")):
        pool = Pool.open(*sources)
        assert [checkpoint.path.name for checkpoint in pool.checkpoints] == ["a" * 40, "b" * 40]
        assert pool.names == ("org/one", "org/two")
    home = hub / "models--org--one" / "snapshots"
    write(home / ("c" * 40) / "model.safetensors", state(3))
    assert Pool.open("org/one", f"hf://org/one@{'c' * 40}").names == (f"org/one@{'a' * 40}", f"org/one@{'c' * 40}")


def test_what_the_hub_does_not_have(hub: Path) -> None:
    def refused(source: str, text: str) -> None:
        with pytest.raises(PoolError, match=text) as caught:
            Pool.open(source, "org/one")
        assert "Traceback" not in str(caught.value)

    refused("hf://org/three", "hf://org/three: expected a model in the cache or on the Hub, found")
    refused("hf://../three", "expected a model of the Hub, found 'hf://../three'")
    refused("hf://org/one@../x", "expected a model of the Hub")
    home = hub / "models--org--two" / "snapshots" / ("b" * 40)
    index = {"weight_map": {"0.weight": "model-1-of-2.safetensors", "0.bias": "model-2-of-2.safetensors"}}
    (home / "model.safetensors").rename(home / "model-1-of-2.safetensors")
    (home / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("hf://org/two", "hf://org/two: expected a model with all its weights .*, found none, or a part of them")
    refused("org/three", "org/three: expected .*, found nothing at this path")
    shutil.rmtree(hub / "models--org--one" / "snapshots")

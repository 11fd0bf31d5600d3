"""Claims about the demo's data and pool; a small one, for time."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot.errors import DataError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.zoo import demo, make_demo_pool
from stockpot.zoo.demo import SIZES, DigitViT, digits
from stockpot.zoo.weights import read_file

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
    real = builtins.__import__

    def fail(name: str, *args: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(DataError, match=r"pip install 'stockpot\[demo\]'"):
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
    made = make_demo_pool(tmp_path, trials=2, processes=1, listen=events.append)
    assert Pool.open(made.pool).names == ("trial_000", "trial_001")
    assert all(0.1 < float(record.score["value"] or 0) <= 1 for record in made.records if record.score)
    assert [event.kind for event in events if event.kind in ("pretraining", "probe")] == [
        "pretraining",
        "probe",
    ]
    start, _ = read_file(made.pool / "search" / "start.safetensors", tmp_path)
    before, _ = read_file(made.pretrained, tmp_path)
    assert {name for name in start if not torch.equal(start[name], before[name])} == {
        "head.weight",
        "head.bias",
    }
    task = made.task()
    task.check_names(Pool.open(made.pool).specs)
    assert task.has_report
    again = make_demo_pool(
        tmp_path,
        trials=2,
        processes=1,
        listen=lambda event: pytest.fail(event.kind) if event.kind == "trial" else None,
    )
    assert again == made

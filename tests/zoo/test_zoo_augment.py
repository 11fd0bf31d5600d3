"""Laws of augmentation: nothing at strength 0, repeatable, in the model's own type, and only where it belongs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot.errors import TaskError
from stockpot.task import Task
from stockpot.zoo.augment import augment, check_mixup, mixed_loss
from stockpot.zoo.plan import Augmentation

USUAL = Augmentation()
NOTHING = Augmentation(shift=False, erase=False, jitter=False)
BATCHES = {
    "uint8 images": lambda: torch.randint(0, 256, (6, 3, 16, 12), dtype=torch.uint8, generator=_source()),
    "float images": lambda: torch.randn(6, 1, 8, 8, generator=_source()),
    "half images": lambda: torch.randn(6, 1, 8, 8, generator=_source()).half(),
    "tokens": lambda: torch.randint(5, 90, (6, 20), generator=_source()),
    "features": lambda: torch.randn(6, 10, generator=_source()),
}
LABELS = torch.arange(6)


def _source() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def changed(x: Tensor, strength: float = 1.0, options: Augmentation = USUAL, **at: int) -> Tensor:
    (out, y), mixed = augment((x, LABELS), strength, options, **{"seed": 1, "step": 2, **at})
    assert mixed is None
    assert y is LABELS
    result: Tensor = out
    return result


@pytest.mark.parametrize("kind", BATCHES)
def test_strength_decides_whether_and_the_step_decides_how(kind: str) -> None:
    x = BATCHES[kind]()
    before = x.clone()
    assert torch.equal(changed(x, 0.0), x)
    once = changed(x)
    assert not torch.equal(once, x)
    assert (once.shape, once.dtype) == (x.shape, x.dtype)
    assert torch.equal(once, changed(x))
    assert not torch.equal(once, changed(x, step=3))
    assert not torch.equal(once, changed(x, seed=2))
    assert torch.equal(x, before)  # the data in memory is not written to


@pytest.mark.parametrize("kind", ["uint8 images", "float images", "features", "tokens"])
def test_more_strength_changes_more(kind: str) -> None:
    x = BATCHES[kind]().repeat(20, *[1] * (BATCHES[kind]().ndim - 1))
    pairs = [(augment((x, None), s, Augmentation(), seed=0, step=0)[0][0], s) for s in (0.1, 0.5, 1.0)]
    moved = [float((out.double() - x.double()).abs().mean()) for out, _ in pairs]
    assert moved[0] < moved[1] < moved[2]


def test_a_shift_moves_images_and_fills_with_zero() -> None:
    x = torch.randint(1, 256, (64, 2, 8, 8), dtype=torch.uint8, generator=_source())
    out = changed(x, options=Augmentation(erase=False, jitter=False))
    seen = set()
    for before, after in zip(x, out, strict=True):
        padded = nn.functional.pad(before, (1, 1, 1, 1))
        places = [(r, c) for r in range(3) for c in range(3) if torch.equal(padded[:, r : r + 8, c : c + 8], after)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 9


def test_a_flip_mirrors_about_half_of_the_images_and_is_off_unless_asked() -> None:
    x = torch.randn(200, 1, 4, 4, generator=_source())
    out = changed(x, options=Augmentation(flip=True, shift=False, erase=False, jitter=False))
    mirrored = [torch.equal(after, before.flip(-1)) for before, after in zip(x, out, strict=True)]
    same = [torch.equal(after, before) for before, after in zip(x, out, strict=True)]
    assert all(a != b for a, b in zip(mirrored, same, strict=True))
    assert 70 < sum(mirrored) < 130
    assert torch.equal(changed(x, options=NOTHING), x)


def test_erasing_puts_one_rectangle_of_the_mean_into_half_of_the_images() -> None:
    x = torch.randn(200, 1, 16, 16, generator=_source())
    out = changed(x, options=Augmentation(shift=False, jitter=False))
    erased = 0
    for before, after in zip(x, out, strict=True):
        rows, columns = (before != after)[0].any(1), (before != after)[0].any(0)
        inside = rows.unsqueeze(1) & columns.unsqueeze(0)
        assert torch.equal((before != after)[0], inside)
        if inside.any():
            erased += 1
            assert torch.allclose(after[0][inside], before.mean().expand(int(inside.sum())))
            assert 4 <= int(rows.sum()) <= 8
            assert 4 <= int(columns.sum()) <= 8
    assert 70 < erased < 130


def test_jitter_keeps_the_picture_and_changes_its_scale() -> None:
    x = torch.randn(50, 1, 8, 8, generator=_source())
    out = changed(x, options=Augmentation(shift=False, erase=False))
    for before, after in zip(x.flatten(1), out.flatten(1), strict=True):
        assert float(torch.corrcoef(torch.stack([before, after]))[0, 1]) > 0.9999
        assert 0.49 < float(after.std() / before.std()) < 1.51


def test_dropped_tokens_spare_padding_and_the_first_position() -> None:
    ids = torch.randint(5, 90, (40, 30), generator=_source())
    attention = torch.ones_like(ids)
    attention[:, 20:] = 0
    batch = {"input_ids": ids, "attention_mask": attention, "token_type_ids": torch.zeros_like(ids), "labels": ids}
    out, _ = augment(batch, 1.0, Augmentation(), seed=0, step=0)
    dropped = out["input_ids"] != ids
    assert not dropped[:, 0].any()
    assert not dropped[:, 20:].any()
    assert 0.25 < float(dropped[:, 1:20].double().mean()) < 0.35
    for name in ("attention_mask", "token_type_ids", "labels"):
        assert out[name] is batch[name]


def test_the_replacement_of_a_token_is_a_token_of_the_batch_at_that_place() -> None:
    ids = torch.arange(20).repeat(8, 1) + 100 * torch.arange(8).unsqueeze(1)
    out = augment((ids, None), 1.0, Augmentation(), seed=0, step=0)[0][0]
    assert (out != ids).any()
    assert torch.equal(out % 100, ids % 100)


def test_noise_follows_each_features_own_spread() -> None:
    x = torch.randn(4000, 2, generator=_source()) * torch.tensor([1.0, 100.0])
    noise = augment((x, None), 0.5, Augmentation(), seed=0, step=0)[0][0] - x
    assert torch.allclose(noise.std(0) / x.std(0), torch.tensor(0.25).expand(2), rtol=0.1)
    x[:, 0] = 3.0
    assert torch.equal(augment((x, None), 0.5, Augmentation(), seed=0, step=0)[0][0][:, 0], x[:, 0])


def test_mixup_is_the_loss_of_soft_labels() -> None:
    x, y = torch.randn(8, 5, generator=_source()).double(), torch.randint(0, 3, (8,), generator=_source())
    model = nn.Linear(5, 3).double()
    task = Task(model, (x, y))
    batch, mixed = augment((x, y), 0.7, Augmentation(mixup=0.8), seed=0, step=4)
    assert mixed is not None
    partner, share = mixed
    assert sorted(partner.tolist()) == list(range(8))
    soft = share * nn.functional.one_hot(y, 3) + (1 - share) * nn.functional.one_hot(y[partner], 3)
    expected = nn.functional.cross_entropy(model(batch[0]), soft.double(), label_smoothing=0.1)
    assert torch.allclose(mixed_loss(task, batch, partner, share, 0.1), expected)


def test_mixup_averages_images_and_stays_uint8() -> None:
    x = BATCHES["uint8 images"]()
    options = Augmentation(mixup=1.0, shift=False, erase=False, jitter=False)
    (out, _), mixed = augment((x, LABELS), 1.0, options, seed=0, step=0)
    assert mixed is not None
    partner, share = mixed
    exact = share * x.double() + (1 - share) * x[partner].double()
    assert out.dtype == torch.uint8
    assert float((out.double() - exact).abs().max()) <= 0.5 + 1e-3


@pytest.mark.parametrize(
    ("batch", "own_loss", "said"),
    [
        (({"input_ids": torch.ones(2, 3).long()}, LABELS[:2]), False, "found inputs input_ids of type int64"),
        ((torch.ones(2, 3), LABELS[:2]), True, "found a loss of your own"),
    ],
)
def test_mixup_is_refused_where_nothing_can_be_averaged(batch: Any, own_loss: bool, said: str) -> None:
    with pytest.raises(TaskError) as caught:
        check_mixup(batch, own_loss)
    assert said in str(caught.value)
    check_mixup((torch.ones(2, 3), LABELS[:2]), False)

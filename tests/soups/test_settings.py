"""What settings mean, alone and in presets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stockpot.soups.track import steps_for
from torch import Tensor

from stockpot import METHODS, PRESETS, Result, Settings, Soup, Task, compare, cook
from stockpot.errors import MethodError
from stockpot.soups.settings import block_size_for, settings_for
from zoo import fine_tunes, learning, mlp, samples, write, zoo

BRIEF: dict[str, Any] = {"steps": 6, "batch_size": 16, "lr": 0.05}


def W_of(result: Result) -> Tensor:  # noqa: N802
    assert result.soup is not None
    return result.soup.W


def test_a_method_name_sets_the_switches_and_the_paper_sets_the_rest() -> None:
    assert settings_for("mehl+") == Settings()
    assert settings_for("mehl+", "paper") == Settings()
    plain = Settings()
    assert (plain.optimizer, plain.lr, plain.weight_decay, plain.schedule) == ("adamw", 0.01, 0.1, "cosine")
    assert (plain.steps, plain.batch_size, plain.passes) == (1000, 128, 1)
    assert block_size_for(plain, 72) == 18
    assert block_size_for(plain, 5) == 5
    assert block_size_for(settings_for("hl"), 72) == 72
    learned = settings_for("learned")
    assert (learned.parametrisation, learned.granularity, learned.lr, learned.weight_decay) == (
        "simplex",
        "model",
        0.05,
        0,
    )
    default = settings_for("crossfit")
    assert (default.granularity, default.folds, default.guard) == ("tensor", 4, True)


def test_the_authors_preset_is_what_their_code_does() -> None:
    s = settings_for("mehl+", "authors")
    assert (s.unit_norm, s.centre, s.reset, s.warmup, s.clip, s.weight_decay) == (
        True,
        "soup",
        True,
        0.2,
        1.0,
        0.0,
    )
    assert settings_for("mehl+", "authors", clip=None).clip is None  # the caller has the last word


def test_epochs_replace_the_default_number_of_steps() -> None:
    settings = settings_for("mehl", epochs=2.5, batch_size=16)
    assert settings.steps is None
    assert steps_for(settings, 48) == 8  # 2.5 * 48 / 16 = 7.5
    assert steps_for(settings, 5) == 2  # a batch is never larger than the data
    assert steps_for(settings_for("mehl", epochs=0.001), 48) == 1
    with pytest.raises(MethodError, match="exactly one of steps and epochs"):
        settings_for("mehl", epochs=2.0, steps=10)


def test_steps_and_blocks_are_as_many_as_asked_for(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path, 5)

    def visits(**settings: Any) -> list[tuple[int, int]]:
        history = cook(pool, task, "mehl", **{**BRIEF, **settings}).history
        return [(h["block"], h["step"]) for h in history if h["kind"] == "step"]

    assert visits(block_size=2, steps=3) == [(t, j) for t in range(3) for j in range(3)]
    assert visits(block_size=2, steps=1, passes=2) == [(t, 0) for t in range(6)]
    assert visits(block_size=2, steps=1, blocks=4, passes=9) == [(t, 0) for t in range(4)]
    assert len(visits(block_size=5, steps=None, epochs=2)) == 6


def rates(tmp_path: Path, **settings: Any) -> list[float]:
    pool, task = zoo(tmp_path)
    return [h["lr"] for h in cook(pool, task, "hl", **{**BRIEF, **settings}).history]


def test_schedules(tmp_path: Path) -> None:
    assert rates(tmp_path, schedule="constant") == [0.05] * 6
    cosine = [0.05 * (1 + torch.cos(torch.tensor(torch.pi * j / 6)).item()) / 2 for j in range(6)]
    assert rates(tmp_path) == pytest.approx(cosine)
    warm = rates(tmp_path, warmup=0.5, schedule="constant")
    assert warm == pytest.approx([0.0125, 0.025, 0.0375, 0.05, 0.05, 0.05])
    both = rates(tmp_path, warmup=0.5)
    assert both[:3] == pytest.approx(warm[:3])
    assert both[3] == pytest.approx(0.05)
    assert both[3] > both[4] > both[5] > 0


def test_the_first_step_of_sgd_is_the_clipped_gradient(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    sgd: dict[str, Any] = {"optimizer": "sgd", "schedule": "constant", "weight_decay": 0.0, "lr": 1.0}

    def moved(**settings: Any) -> Tensor:
        with learning(pool, task, "hl+", **{**BRIEF, **sgd, "steps": 1, "lr": 1e-3, **settings}) as learner:
            learner.run()
            return learner.tracks[0].raw / 1e-3

    gradient = moved()
    assert gradient.norm() > 1e-2
    clipped = moved(clip=1e-3)
    assert float(clipped.norm()) == pytest.approx(1e-3, rel=1e-3)
    assert torch.allclose(clipped / clipped.norm(), gradient / gradient.norm(), atol=1e-4)


def test_weight_decay_pulls_the_offsets_to_the_mean_and_leaves_the_temperature_alone(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    sgd: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": 0.5,
        "schedule": "constant",
        "steps": 40,
        "temperature": True,
    }
    loose = cook(pool, task, "hl", **{**BRIEF, **sgd, "weight_decay": 0.0})
    tight = cook(pool, task, "hl", **{**BRIEF, **sgd, "weight_decay": 1.5})
    assert (W_of(tight) - 0.25).norm() < 0.5 * (W_of(loose) - 0.25).norm()
    assert tight.soup is not None
    assert tight.soup.temperature is not None
    assert tight.soup.temperature > 0.5  # decay would have taken it to zero


def test_a_learned_temperature_sharpens_or_softens_and_is_kept(tmp_path: Path) -> None:
    states = [{n: 0.2 * v for n, v in s.items()} for s in fine_tunes(mlp, 3, steps=150)]  # timid models
    pool, task = write(tmp_path / "pool", states), Task(mlp(), samples())
    result = cook(pool, task, "learned", temperature=True, **{**BRIEF, "steps": 60})
    assert result.soup is not None
    assert result.soup.temperature is not None
    assert result.soup.temperature > 1.2
    assert Soup.load(result.soup.save(tmp_path / "soup")).temperature == result.soup.temperature
    assert cook(pool, task, "learned", **BRIEF).soup.temperature is None  # type: ignore[union-attr]


def test_label_smoothing_is_in_the_loss_that_is_learned(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    plain = cook(pool, task, "hl", **BRIEF).history[0]["loss"]
    smooth = cook(pool, task, "hl", label_smoothing=0.3, **BRIEF).history[0]["loss"]
    Soup.uniform(pool).load_into(task.model)
    batch = task.fit.batch(task.fit.order(0, 0, 16))
    with task.evaluating():
        assert plain == pytest.approx(float(task.loss(batch)))
        assert smooth == pytest.approx(float(task.loss(batch, label_smoothing=0.3)))
    assert smooth != plain


def test_accumulation_changes_rounding_only(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    sgd: dict[str, Any] = {**BRIEF, "optimizer": "sgd", "lr": 0.5}
    whole, parts = (cook(pool, task, "mehl+", accumulate=n, block_size=2, **sgd) for n in (1, 5))
    assert (W_of(whole) - W_of(parts)).abs().max() <= 1e-5
    assert (W_of(whole) - 0.25).abs().max() > 1e-3


def test_free_weights_start_at_the_mean_and_need_not_sum_to_one(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool")
    result = cook(pool, task, "mehl+", decentralise=False, block_size=2, **BRIEF)
    assert result.soup is not None
    assert result.soup.free
    assert (W_of(result).sum(dim=0) - 1).abs().max() > 1e-3
    again = Soup.load(result.soup.save(tmp_path / "soup"))
    assert again.free
    assert torch.equal(again.W, W_of(result))


def test_a_granularity_of_your_own_and_a_kept_head(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool")
    result = cook(
        pool,
        task,
        "mehl+",
        granularity=lambda name: name.rpartition(".")[2],
        exclude=["2.*"],
        donor="model_2",
        block_size=2,
        **BRIEF,
    )
    assert result.soup is not None
    assert result.soup.layout.groups == ("bias", "weight")
    assert torch.equal(result.soup.state_dict()["2.weight"], pool.tensor(2, "2.weight"))
    assert torch.equal(task.model.state_dict()["2.bias"], pool.tensor(2, "2.bias"))
    saved = Soup.load(result.soup.save(tmp_path / "soup"))
    assert saved.about["settings"]["granularity"] == "custom"
    assert saved.layout == result.soup.layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("same_model", [True, False])
def test_pools_of_any_float_dtype(tmp_path: Path, dtype: torch.dtype, same_model: bool) -> None:
    """Learning mixes in fp32 or better whatever the model computes in; a small lr is not rounded away."""
    pool = write(tmp_path, [{n: v.to(dtype) for n, v in s.items()} for s in fine_tunes(mlp, 4)])
    kind = dtype if same_model else torch.float32
    task = Task(mlp().to(kind), samples(dtype=kind))
    result = cook(pool, task, "mehl+", block_size=2, **{**BRIEF, "lr": 1e-3})
    assert result.soup is not None
    assert {value.dtype for value in result.soup.state_dict().values()} == {dtype}
    assert {value.dtype for value in task.model.state_dict().values()} == {kind}
    moved = (W_of(result) - 0.25).abs()
    assert 1e-4 < moved.max() < 1e-1


def test_compare_runs_every_method_on_the_same_data_and_reports_last(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    task = Task(mlp(), samples(), samples(40, seed=5))
    seen: list[str] = []
    results = compare(
        pool, task, preset="authors", block_size=2, listen=lambda e: seen.append(e.kind), **BRIEF
    )
    assert list(results) == list(METHODS)
    assert all(result.report is not None and result.report.n == 40 for result in results.values())
    assert results["mehl"].settings.unit_norm
    assert not results["learned"].settings.unit_norm
    assert results["mehl"].settings.block_size == 2
    assert results["hl"].settings.block_size is None
    assert results["ensemble"].soup is None
    decided = len(seen) - 1 - seen[::-1].index("cooked")
    assert seen.index("report") > decided
    alone = cook(pool, task, "mehl+", preset="authors", block_size=2, **BRIEF)
    assert torch.equal(W_of(alone), W_of(results["mehl+"]))
    for result in results.values():
        assert result.seconds > 0
        assert str(result).startswith(f"{result.method}: ")
        assert "n = 40) on report data" in str(result)
        assert result.score is result.report


def test_the_ensemble_averages_outputs(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    found = cook(pool, task, "ensemble")
    model, (x, y) = mlp(), samples()
    total = torch.zeros(len(x), 3)
    with torch.no_grad():
        for k in range(4):
            model.load_state_dict({name: pool.tensor(k, name) for name in pool.specs})
            total += model(x)
    assert found.fit is not None
    assert found.fit.mean == float((total.argmax(dim=1) == y).double().mean())


def test_best_is_the_first_of_the_highest(tmp_path: Path) -> None:
    poor, good = fine_tunes(mlp, 1, steps=0)[0], fine_tunes(mlp, 1, steps=100)[0]
    pool, task = write(tmp_path, [poor, good, good]), Task(mlp(), samples())
    result = cook(pool, task, "best")
    assert W_of(result)[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert result.notes == ("the best ingredient on the fitting data is model_1",)
    task.model.load_state_dict(good)
    assert result.fit is not None
    assert result.fit.mean == task.score().mean


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"block_size": 0},
            "setting block_size: expected at least 1 model, 'auto', 'fit', or None for all, found 0",
        ),
        ({"steps": 0}, "setting steps: expected at least 1, found 0"),
        ({"lr": float("nan")}, "setting lr: expected 0 or more, found nan"),
        ({"warmup": 1.0}, "setting warmup: expected a share in [0, 1), found 1.0"),
        ({"accumulate": 200}, "setting accumulate: expected between 1 and batch_size (128), found 200"),
        ({"guard": True}, "setting guard: expected False, or folds of at least 2 to have held-out data"),
        (
            {"optimizer": "adam"},
            "optimizer 'adam': expected one of adamw, sgd, found an unknown optimizer.\n  Fix: did you mean 'adamw'?",
        ),
        (
            {"decentralise": False, "reset": True},
            "setting decentralise: expected True, when centre, unit_norm or reset",
        ),
        ({"leraning_rate": 1}, "setting 'leraning_rate': expected one of "),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(MethodError) as caught:
        settings_for("mehl", **given)
    assert text in str(caught.value)


def test_switches_that_do_not_go_together() -> None:
    with pytest.raises(
        MethodError, match="preset 'authors' with method 'learned': expected a hyperplane method"
    ):
        settings_for("learned", "authors")
    with pytest.raises(MethodError, match="expected None: the softmax couples all models, found 4"):
        settings_for("learned", block_size=4)
    assert set(PRESETS) == {"paper", "authors"}


def test_a_folder_is_no_pool(tmp_path: Path) -> None:
    _, task = zoo(tmp_path, 2)
    folder: Any = str(tmp_path)
    for call in (cook, compare):
        with pytest.raises(
            MethodError, match=r"pool: expected a Pool, found str .*\n  Fix: open the checkpoints first"
        ):
            call(folder, task)


def test_reporting_on_the_fitting_data_is_said(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path, 2)
    x, y = samples()
    note = "the report data is the fitting data"
    same, other = Task(mlp(), (x, y), (x.clone(), y)), Task(mlp(), (x, y), samples(seed=1))
    assert any(one.startswith(note) for one in cook(pool, same, "uniform").notes)
    assert not any(one.startswith(note) for one in cook(pool, other, "uniform").notes)

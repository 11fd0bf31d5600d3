"""What settings mean, alone and in presets."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stockpot import METHODS, PRESETS, Result, Settings, Soup, Task, compare, cook
from stockpot.errors import MethodError
from stockpot.soups import LEARNED, settings_for
from stockpot.soups.registry import _OF_AUTHORS, DEFAULT, repetitions, settings_in_comparison
from stockpot.soups.settings import as_json, block_size_for, declared, steps_for
from zoo import fine_tunes, mlp, samples, write, zoo

BRIEF: dict[str, Any] = {"steps": 6, "batch_size": 16, "lr": 0.05}


def W_of(result: Result) -> Tensor:  # noqa: N802
    assert result.soup is not None
    return result.soup.W


def test_every_setting_is_declared_once_with_its_type_bounds_and_description() -> None:
    assert len(declared()) == 22
    for name, (_, setting) in declared().items():
        assert setting.help.endswith("."), name
    assert as_json(Settings(granularity=str.upper))["granularity"] == "custom"


def test_a_method_has_settings_of_its_own_and_the_paper_sets_the_rest() -> None:
    assert settings_for("mehl+") == Settings()
    assert settings_for("mehl+", "paper") == Settings()
    plain = Settings()
    assert (plain.lr, plain.weight_decay, plain.steps, plain.batch_size, plain.passes) == (0.01, 0.1, 1000, 128, 1)
    assert block_size_for(plain, 72) == 18
    assert block_size_for(plain, 5) == 5
    assert block_size_for(settings_for("hl"), 72) == 72
    learned = settings_for("learned")
    assert (learned.granularity, learned.lr, learned.weight_decay, learned.beta) == ("model", 0.05, 0, True)
    default = settings_for(DEFAULT)
    assert (default.granularity, default.folds, default.block_size) == ("tensor", 4, "fit")
    assert (default.steps, default.lr) == (1000, 0.02)
    assert not LEARNED & {"best", "uniform", "greedy", "ensemble"}


def test_beside_others_the_default_takes_its_schedule_from_its_own_settings_alone() -> None:
    """Numbers that are meant for the paper's methods would make it another method."""
    common = {"steps": 7, "epochs": None, "block_size": 2, "passes": 3, "lr": 0.5, "weight_decay": 0.0, "seed": 4}
    found = settings_in_comparison("crossfit", None, {**common, "batch_size": 9}, {})
    assert found == settings_for("crossfit", seed=4, batch_size=9)
    own = settings_in_comparison("crossfit", None, common, {"crossfit": {"steps": 11}})
    assert own.steps == 11
    mehl = settings_in_comparison("mehl+", None, common, {})
    assert (mehl.steps, mehl.block_size, mehl.passes, mehl.lr) == (7, 2, 3, 0.5)
    assert settings_in_comparison("hl", None, common, {}).block_size is None
    assert settings_in_comparison("mehl", None, {"granularity": "tensor"}, {}).granularity == "model"
    assert settings_in_comparison("greedy", None, {"folds": 3}, {}).folds == 1


def test_steps_of_one_method_replace_epochs_of_all_and_the_other_way_round() -> None:
    some = settings_in_comparison("mehl+", None, {"steps": 500}, {"mehl+": {"epochs": 2.0}})
    assert (some.steps, some.epochs) == (None, 2.0)
    other = settings_in_comparison("mehl+", None, {"epochs": 2.0}, {"mehl+": {"steps": 500}})
    assert (other.steps, other.epochs) == (500, None)


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


def test_the_rate_falls_by_a_cosine(tmp_path: Path) -> None:
    cosine = [0.05 * (1 + torch.cos(torch.tensor(torch.pi * j / 6)).item()) / 2 for j in range(6)]
    assert rates(tmp_path) == pytest.approx(cosine)


def test_weight_decay_pulls_the_offsets_to_the_mean_and_leaves_beta_alone(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    given: dict[str, Any] = {**BRIEF, "steps": 40, "beta": True}
    loose = cook(pool, task, "hl", **given, weight_decay=0.0)
    tight = cook(pool, task, "hl", **given, weight_decay=10.0)
    assert (W_of(tight) - 0.25).norm() < 0.5 * (W_of(loose) - 0.25).norm()
    assert tight.soup is not None
    assert tight.soup.about["beta"] > 0.5  # decay would have taken it to zero


def test_a_learned_beta_sharpens_or_softens_and_is_recorded(tmp_path: Path) -> None:
    states = [{n: 0.2 * v for n, v in s.items()} for s in fine_tunes(mlp, 3, steps=150)]  # timid models
    pool, task = write(tmp_path / "pool", states), Task(mlp(), samples())
    result = cook(pool, task, "learned", **{**BRIEF, "steps": 60})
    assert result.soup is not None
    beta = result.soup.about["beta"]
    assert beta > 1.2
    assert Soup.load(result.soup.save(tmp_path / "soup")).about["beta"] == beta
    assert "beta" not in cook(pool, task, "learned", beta=False, **BRIEF).soup.about  # type: ignore[union-attr]


def test_beta_cannot_be_learned_through_a_loss_of_the_users_own(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    task = Task(
        mlp(), samples(), loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    )
    result = cook(pool, task, "learned", **BRIEF)
    assert result.soup is not None
    assert "beta" not in result.soup.about
    assert result.notes == ("beta was not learned: the task's loss is its own, so there are no logits to scale",)


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
        pool, task, preset="authors", block_size=2, listen=lambda e: seen.append(e.kind),
        each={"crossfit": BRIEF}, **BRIEF,
    )  # fmt: skip
    assert list(results) == list(METHODS)
    assert all(result.report is not None and result.report.n == 40 for result in results.values())
    assert results["mehl"].soup is not None
    assert results["mehl"].soup.about["preset"] == "authors"
    assert "preset" not in results["learned"].soup.about  # type: ignore[union-attr]
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
    assert found.fit.value == float((total.argmax(dim=1) == y).double().mean())


def test_best_is_the_first_of_the_highest(tmp_path: Path) -> None:
    poor, good = fine_tunes(mlp, 1, steps=0)[0], fine_tunes(mlp, 1, steps=100)[0]
    pool, task = write(tmp_path, [poor, good, good]), Task(mlp(), samples())
    result = cook(pool, task, "best")
    assert W_of(result)[:, 0].tolist() == [0.0, 1.0, 0.0]
    assert result.notes == ("the best ingredient on the fitting data is model_1",)
    task.model.load_state_dict(good)
    assert result.fit is not None
    assert result.fit.value == task.score().value


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"block_size": 0}, "setting block_size: expected at least 1, found 0"),
        ({"block_size": "all"}, "block_size 'all': expected one of auto, fit, found an unknown block_size"),
        ({"steps": 0}, "setting steps: expected at least 1 and at most 1e+09, found 0"),
        ({"steps": 2.5}, "setting steps: expected a whole number or None, found 2.5"),
        ({"lr": float("nan")}, "setting lr: expected at least 0 and at most 1e+30, found nan"),
        ({"lr": "0.1"}, "setting lr: expected a number, found '0.1'"),
        ({"beta": 1}, "setting beta: expected True or False, found 1"),
        ({"seed": None}, "setting seed: expected a whole number, found None"),
        ({"granularity": "layer"}, "granularity 'layer': expected one of block, model, module, tensor"),
        ({"granularity": 3}, "setting granularity: expected 'model', 'block', 'module', 'tensor' or a function"),
        ({"accumulate": 200}, "setting accumulate: expected between 1 and batch_size (128), found 200"),
        ({"directions": "fp8"}, "directions 'fp8': expected one of auto, bf16, fp32, fp64, int8"),
        ({"directions": str.upper}, "setting directions: expected 'auto', 'fp64', 'fp32', 'bf16', 'int8', found"),
        ({"leraning_rate": 1}, "setting 'leraning_rate': expected one of "),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(MethodError) as caught:
        settings_for("mehl", **given)
    assert text in str(caught.value)


def test_switches_that_do_not_go_together() -> None:
    with pytest.raises(MethodError, match="expected None: the softmax couples all models, found 4"):
        settings_for("learned", block_size=4)
    assert set(PRESETS) == {"paper", "authors"}


def test_preset_authors_refuses_what_its_code_does_not_read() -> None:
    """A setting that is new is refused until it is allowed, instead of having no effect."""
    code = (Path(__file__).parents[2] / "src" / "stockpot" / "soups" / "authors.py").read_text()
    others = [field for field in fields(Settings) if field.name not in _OF_AUTHORS]
    assert {field.name for field in others} >= {"beta", "folds", "directions", "low_memory", "parallel"}
    for field in others:
        assert f"settings.{field.name}" not in code
        with pytest.raises(MethodError, match="preset 'authors': expected a setting that the released code has"):
            settings_for("mehl+", "authors", **{field.name: field.default})


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


def test_a_comparison_leaves_out_what_would_do_the_same(tmp_path: Path) -> None:
    """Before, `mehl` with all models in one block was learned beside `hl`, and gave the same rows twice."""
    pool, task = zoo(tmp_path, 3)
    short: dict[str, Any] = {"steps": 2, "batch_size": 16}
    found = compare(pool, task, each={"crossfit": short}, **short)
    assert list(found) == [name for name in METHODS if name not in ("mehl", "mehl+")]
    assert found.absent["mehl+"] == "it is the same as hl+ where all 3 models are loaded at once"
    named = compare(pool, task, ["hl", "mehl"], **short)  # whoever asks for both gets both
    assert torch.equal(W_of(named["hl"]), W_of(named["mehl"]))


def test_what_differs_is_no_repetition() -> None:
    def left_out(preset: str | None = None, models: int = 18, **each: Any) -> set[str]:
        return set(
            repetitions({name: settings_in_comparison(name, preset, {}, each) for name in METHODS}, preset, models)
        )

    assert left_out() == left_out("authors") == {"mehl", "mehl+"}
    assert left_out(models=19) == set()
    assert left_out(mehl={"steps": 500}, hl={"steps": 400}) == {"mehl+"}

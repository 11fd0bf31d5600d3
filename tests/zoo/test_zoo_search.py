"""Claims about a whole search: a pool comes out, nothing is done twice, and only the same search continues."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from stockpot.errors import DataError, LearningError, MethodError, RunError, TaskError
from stockpot.events import Event
from stockpot.pool import Pool
from stockpot.task import Task
from stockpot.zoo.folder import read_file, read_records, weights_of
from stockpot.zoo.plan import Augmentation, Plan, Probe, Space, Trial, draw_trials
from stockpot.zoo.search import finetune
from zoo import Tied, mlp, normed, same, samples

SPACES: dict[str, Space] = {"lr": {"min": 1e-3, "max": 3e-2, "scale": "log"}, "epochs": {"min": 1, "max": 3}}
PLAN = Plan(draw_trials(4, spaces=SPACES), batch_size=16, probe=Probe(epochs=3, lr=0.01))
BROKEN = Trial(lr=1e20, weight_decay=1e5, epochs=4)


class StopError(Exception):
    """Stands for a kill."""


def start(build: Any = mlp) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = build()
    return model


def search(out: Path, plan: Plan = PLAN, model: nn.Module | None = None, **options: Any) -> Any:
    fit = options.pop("fit", samples(30, seed=1))
    train = options.pop("train", samples(40))
    return finetune(start() if model is None else model, train, fit, out, plan, **options)


def contents(out: Path) -> dict[str, dict[str, Tensor]]:
    return {path.name: read_file(path, out)[0] for path in sorted(out.glob("*.safetensors"))}


def same_pools(first: Path, second: Path) -> bool:
    a, b = contents(first), contents(second)
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_a_search_makes_a_pool_with_a_record_beside_each_checkpoint(tmp_path: Path) -> None:
    records = search(tmp_path / "pool")
    pool = Pool.open(tmp_path / "pool")
    assert pool.names == ("trial_000", "trial_001", "trial_002", "trial_003")
    assert len(set(pool.digests())) == 4
    assert [record.settings for record in records] == list(PLAN.trials)
    task = Task(start(), samples(30, seed=1))
    for record in records:
        task.model.load_state_dict(read_file(record.path, tmp_path)[0])
        scores = task.score()
        low, high = scores.interval()
        assert record.score == {
            "value": scores.value,
            "low": low,
            "high": high,
            "n": 30,
            "loss": pytest.approx(scores.loss),
        }
        written = json.loads((tmp_path / "pool" / f"{record.name}.json").read_text())
        assert written["settings"] == dataclasses.asdict(record.settings)
        assert written["losses"] == list(record.losses)
    assert read_records(tmp_path / "pool") == records


def test_every_trial_starts_from_the_probed_head(tmp_path: Path) -> None:
    model = start()
    before = weights_of(model)
    search(tmp_path, model=model)
    probed = read_file(tmp_path / "search" / "start.safetensors", tmp_path)[0]
    assert {name for name in before if not torch.equal(before[name], probed[name])} == {"2.weight", "2.bias"}
    assert same(weights_of(model), before)  # the caller's model is as it was
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_trials_learn_batch_statistics_and_the_probe_does_not(tmp_path: Path) -> None:
    model = start(normed)
    search(tmp_path, model=model)
    probed = read_file(tmp_path / "search" / "start.safetensors", tmp_path)[0]
    assert torch.equal(probed["1.running_mean"], weights_of(model)["1.running_mean"])
    for state in contents(tmp_path).values():
        assert not torch.equal(state["1.running_mean"], probed["1.running_mean"])


def test_without_a_probe_the_head_is_as_given(tmp_path: Path) -> None:
    model = start()
    search(tmp_path, dataclasses.replace(PLAN, probe=None), model)
    assert same(read_file(tmp_path / "search" / "start.safetensors", tmp_path)[0], weights_of(model))


def test_a_given_start_replaces_the_models_own_weights(tmp_path: Path) -> None:
    other = {name: value + 1 for name, value in weights_of(start()).items()}
    search(tmp_path, dataclasses.replace(PLAN, probe=None), start=other)
    assert same(read_file(tmp_path / "search" / "start.safetensors", tmp_path)[0], other)
    with pytest.raises(TaskError, match=r"starting weights: expected the 4 tensors of Sequential.*0.weight"):
        search(tmp_path / "x", start={name: value for name, value in other.items() if name != "0.weight"})


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    model = start()
    model[0].requires_grad_(False)  # type: ignore[index]
    search(tmp_path, model=model)
    assert Pool.open(tmp_path).facts().frozen >= {"0.weight", "0.bias"}


def test_finished_trials_are_not_repeated_and_more_may_be_added(tmp_path: Path) -> None:
    search(tmp_path / "a", PLAN)
    stamp = (tmp_path / "a" / "trial_002.safetensors").stat().st_mtime_ns
    events: list[Event] = []
    longer = dataclasses.replace(PLAN, trials=draw_trials(6, spaces=SPACES))
    assert len(search(tmp_path / "a", longer, listen=events.append)) == 6
    assert (tmp_path / "a" / "trial_002.safetensors").stat().st_mtime_ns == stamp
    assert [e.data["trial"] for e in events if e.kind == "trial"] == ["trial_004", "trial_005"]
    assert next(e.data for e in events if e.kind == "finetune") == {"trials": 6, "done": 4}
    search(tmp_path / "b", longer)
    assert same_pools(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("build", [mlp, normed])
def test_a_killed_search_continues_to_the_same_bits(tmp_path: Path, build: Any) -> None:
    search(tmp_path / "whole", model=start(build))
    kill_at = [("probe", 2), ("trial_000", 1), ("trial_002", 1)]

    def listen(event: Event) -> None:
        if event.kind == "epoch" and kill_at and (event.data["trial"], event.data["epoch"]) == kill_at[0]:
            kill_at.pop(0)
            raise StopError

    for _ in range(3):
        with pytest.raises(StopError):
            search(tmp_path / "killed", model=start(build), listen=listen, save_every=0.0)
    search(tmp_path / "killed", model=start(build), listen=listen)
    assert same_pools(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed" / "search").glob("trial_*"))


def test_a_checkpoint_that_is_gone_is_made_again(tmp_path: Path) -> None:
    search(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "trial_001.safetensors").unlink()
    search(tmp_path)
    assert all(same(before[name], after) for name, after in contents(tmp_path).items())
    assert len(contents(tmp_path)) == 4


def test_a_changed_plan_is_refused_with_the_difference(tmp_path: Path) -> None:
    search(tmp_path)
    changed = dataclasses.replace(
        PLAN, batch_size=8, trials=(dataclasses.replace(PLAN.trials[0], lr=0.5), *PLAN.trials[1:])
    )
    with pytest.raises(RunError) as caught:
        search(tmp_path, changed)
    text = str(caught.value)
    assert "expected the search that was begun here, found another" in text
    assert "plan.batch_size: 16 there, 8 now" in text
    assert f"plan.trials.0.lr: {PLAN.trials[0].lr} there, 0.5 now" in text
    with pytest.raises(RunError, match=r"plan.trials.3.lr: .* there, nothing now"):
        search(tmp_path, dataclasses.replace(PLAN, trials=PLAN.trials[:3]))


def test_other_data_or_other_weights_are_another_search(tmp_path: Path) -> None:
    search(tmp_path)
    with pytest.raises(RunError, match=r"train.content"):
        search(tmp_path, train=samples(40, seed=9))
    with pytest.raises(RunError, match=r"fit.samples: 30 there, nothing now"):
        search(tmp_path, fit=None)
    model = start()
    with torch.no_grad():
        model[2].weight += 1  # type: ignore[index]
    search(tmp_path, model=model)  # a new head is what the probe is for
    with torch.no_grad():
        model[0].weight += 1  # type: ignore[index]
    with pytest.raises(RunError, match=r"1 of 4 tensors differ, such as 0.weight"):
        search(tmp_path, model=model)


def test_a_folder_of_other_trials_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "trial_000.safetensors").write_bytes(b"")
    with pytest.raises(RunError, match=r"found trials without search/plan.json"):
        search(tmp_path)


def test_a_trial_that_diverges_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, trials=(PLAN.trials[0], BROKEN, PLAN.trials[2]))
    events: list[Event] = []
    records = search(tmp_path, plan, listen=events.append)
    assert [record.failed for record in records] == [False, True, False]
    assert records[1].path is None
    assert records[1].score is None
    assert "the loss became" in str(records[1].failure)
    assert next(e for e in events if e.data.get("failure")).data["trial"] == "trial_001"
    assert Pool.open(tmp_path).names == ("trial_000", "trial_002")
    search(tmp_path / "without", PLAN)
    assert same(contents(tmp_path)["trial_002.safetensors"], contents(tmp_path / "without")["trial_002.safetensors"])
    search(tmp_path, plan, listen=lambda event: pytest.fail("repeated") if event.kind == "trial" else None)


def test_a_search_in_which_all_trials_fail_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LearningError) as caught:
        search(tmp_path, dataclasses.replace(PLAN, trials=(BROKEN, BROKEN)))
    assert "all 2 trials: expected at least one that trains to the end, found trial_000 (lr 1e+20)" in str(caught.value)


def test_a_probe_that_diverges_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LearningError, match="linear probe: expected a finite loss, found the loss became"):
        search(tmp_path, dataclasses.replace(PLAN, probe=Probe(epochs=4, lr=1e20, weight_decay=1e5)))


@pytest.mark.parametrize(
    ("plan", "options", "error", "said"),
    [
        (dataclasses.replace(PLAN, head="classifier"), {}, TaskError, "head 'classifier'"),
        (PLAN, {"train": (torch.randn(8, 6), torch.full((8,), 3))}, DataError, "labels of training data"),
        (PLAN, {"fit": (torch.randn(8, 6), torch.full((8,), 3))}, DataError, "labels of validation data"),
        (
            PLAN,
            {"loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])},
            MethodError,
            "label_smoothing: expected 0 with a loss of your own",
        ),
        (
            dataclasses.replace(PLAN, augmentation=Augmentation(mixup=0.2), trials=(Trial(1e-3, augmentation=1.0),)),
            {"loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])},
            TaskError,
            "mixup: expected images or features",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tmp_path: Path, plan: Plan, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error) as caught:
        search(tmp_path / "pool", plan, **options)
    assert said in str(caught.value)
    assert not (tmp_path / "pool").exists()


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected parameters to train, found all of them frozen"):
        search(tmp_path, model=start().requires_grad_(False))


def test_a_loss_and_metric_of_ones_own(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 1))
    x, _ = samples(40)
    records = search(
        tmp_path,
        Plan((Trial(lr=0.01, epochs=2), Trial(lr=0.02, epochs=2)), batch_size=8, probe=None),
        model,
        train=(x, x.sum(1)),
        fit=(x, x.sum(1)),
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square(),
        metric="loss",
    )
    assert all(record.score["value"] < 0 for record in records)
    assert records[0].losses[-1] < records[0].losses[0]


def test_probabilities_may_be_mixed_and_other_float_labels_are_refused(tmp_path: Path) -> None:
    x, y = samples(40)
    soft = 0.8 * nn.functional.one_hot(y, 3).float() + 0.2 / 3
    plan = Plan((Trial(0.01, epochs=20, augmentation=0.5, label_smoothing=0.1),), batch_size=16, probe=None)
    plan = dataclasses.replace(plan, augmentation=Augmentation(mixup=0.4))
    records = search(tmp_path / "soft", plan, train=(x, soft), fit=(x, y))
    assert records[0].losses[-1] < records[0].losses[0]
    for wrong in (soft * 2, soft - 0.5, nn.functional.one_hot(y, 3).float() + soft.round()):
        with pytest.raises(TaskError, match="labels of training data"):
            search(tmp_path / "wrong", plan, train=(x, wrong), fit=(x, y))
    assert not (tmp_path / "wrong").exists()


def test_tied_weights_are_saved_under_both_names(tmp_path: Path) -> None:
    search(tmp_path, model=start(Tied))
    assert Pool.open(tmp_path).facts().tied == (("inner.weight", "outer.weight"),)


def test_without_validation_data_there_is_no_score(tmp_path: Path) -> None:
    records = search(tmp_path, fit=None)
    assert [record.score for record in records] == [None] * 4


def test_a_record_that_is_none_is_named(tmp_path: Path) -> None:
    search(tmp_path)
    (tmp_path / "trial_001.json").write_text("{}")
    with pytest.raises(RunError, match=r"trial_001.json: expected the record of a trial, found it has no 'format'"):
        search(tmp_path)

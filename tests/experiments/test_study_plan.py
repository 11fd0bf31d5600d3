"""Which runs a study has, that they are recipes, and how many steps they take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import study
from studies import plans
from studies.gather import counted_steps
from studies.zoo import Zoo
from study_zoo import make

from stockpot.errors import RunError
from stockpot.soups.registry import LEARNED

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("experiments"))


@pytest.mark.parametrize(("name", "models"), [("cifar10-efficientnet", 32), ("fashion-vit", 72), ("imdb-minilm", 32)])
def test_every_run_of_every_real_zoo_is_a_valid_recipe(name: str, models: int) -> None:
    zoo = Zoo(name, EXPERIMENTS, (), (), models, None)  # whether or not its pool is on this machine
    search = zoo.recipe().finetune
    assert search is not None
    assert search.trials == models
    runs = plans.plan(zoo)
    assert {run.study for run in runs} >= {"main", "rates", "steps", "removed", "cost", "blocks", "visits", "inner"}
    assert len({run.name for run in runs}) == len(runs)
    for run in runs:
        recipe = zoo.recipe(run.stated)
        assert recipe.method.compared == (run.methods or recipe.method.compared)


def test_main_has_every_method_on_three_seeds(home: Path) -> None:
    zoo = Zoo.open(home, "tiny")
    found = plans.plan(zoo, ["main"])
    assert [run.name for run in found] == ["main-0", "main-1", "main-2"]
    assert [zoo.recipe(run.stated).output.seed for run in found] == [0, 1, 2]
    first, *others = (zoo.recipe(run.stated).method.compared for run in found)
    assert {"best", "greedy", "crossfit"} < set(first)
    assert all(set(methods) == set(first) & LEARNED for methods in others)  # what no seed changes is run once


def test_the_default_alone_has_more_seeds(home: Path) -> None:
    zoo = Zoo.open(home, "tiny")
    found = [zoo.recipe(run.stated) for run in plans.plan(zoo, ["seeds"])]
    assert [recipe.output.seed for recipe in found] == [3, 4, 5, 6, 7, 8, 9]
    assert {recipe.method.compared for recipe in found} == {("crossfit",)}


def test_what_main_has_is_not_run_again(home: Path) -> None:
    zoo = Zoo.open(home, "tiny")  # lr 0.05 and 8 steps are its own
    names = {run.name for run in plans.plan(zoo)}
    assert "rates-crossfit-0.02" in names
    assert "rates-crossfit-0.05" not in names
    assert {name for name in names if name.startswith("steps-crossfit")} == {
        f"steps-crossfit-{count}{seed}" for count in (4, 16) for seed in ("", "-seed-1", "-seed-2")
    }
    assert {name for name in names if name.startswith("steps-mehl")} == {"steps-mehl-plus-4", "steps-mehl-plus-16"}
    assert "visits-1" not in names  # one block holds all five models


@pytest.mark.parametrize(("models", "counts"), [(72, [2, 22, 42]), (32, [1, 10, 19]), (3, [1])])
def test_as_many_of_the_best_are_left_out_as_in_table_3(models: int, counts: list[int]) -> None:
    zoo = Zoo("zoo", Path("home"), (), (), models, False)
    assert [run.without_best for run in plans.removed(zoo)] == counts


def test_the_best_by_their_own_score_are_left_out(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home, tmp_path / "experiments")
    zoo = Zoo.open(tmp_path / "experiments", "tiny")
    run = next(run for run in plans.removed(zoo) if run.without_best == 2)
    with pytest.raises(RunError, match="run main-0 first"):
        run.overrides(zoo)
    scores = [0.5, 0.9, 0.7, 0.9, 0.6]
    ingredients = [
        {"path": f"/elsewhere/pool/model_{k}.safetensors", "fit": {"value": value}} for k, value in enumerate(scores)
    ]
    (zoo.runs / "main-0").mkdir(parents=True)
    (zoo.runs / "main-0" / "pool.json").write_text(json.dumps({"ingredients": ingredients}))
    assert zoo.recipe(run.overrides(zoo)).pool.path == tuple(f"pool/model_{k}.safetensors" for k in (0, 2, 4))


def test_the_first_ingredients_are_taken_in_search_order(home: Path) -> None:
    zoo = Zoo.open(home, "tiny")
    run = plans.plan(zoo, ["cost"])[0]
    assert run.first == 2
    assert zoo.recipe(run.overrides(zoo)).pool.path == ("pool/model_0.safetensors", "pool/model_1.safetensors")


def test_models_are_also_kept_exactly_and_with_eight_bits(home: Path) -> None:
    found = plans.plan(Zoo.open(home, "tiny"), ["directions"])
    names = [f"directions-{kind}-{seed}" for seed in (0, 1, 2) for kind in ("fp32", "int8")]
    assert [run.name for run in found] == names
    assert [dict(run.values)["method.directions"] for run in found] == ["fp32", "int8"] * 3
    assert {plans.DEFAULT, plans.PAPER} <= set(found[0].methods)


def test_networks_without_batch_norm_have_no_study_of_its_statistics(home: Path) -> None:
    assert plans.plan(Zoo.open(home, "tiny"), ["statistics"]) == []
    assert len(plans.statistics(Zoo("zoo", home, (), (), 8, True))) == 2


def test_zoos_take_turns_study_by_study(tmp_path: Path) -> None:
    home = make(make(tmp_path / "experiments"), "other")
    zoos = [Zoo.open(home, "tiny"), Zoo.open(home, "other")]
    every = [(zoo.name, run.study) for zoo, run in plans.plan_all(zoos)]
    studies = list(dict.fromkeys(study for _, study in every))
    assert studies[:3] == ["main", "seeds", "rates"]
    assert every == sorted(every, key=lambda one: (studies.index(one[1]), one[0] != "tiny"))
    only = ["rates-mehl-plus-0.01", "main-1", "other/main", "rates-mehl-plus-0.01"]
    found = [(zoo.name, run.name) for zoo, run in plans.plan_all(zoos, only)]
    twice = [(name, run) for run in (only[0], "main-1") for name in ("tiny", "other")]
    assert found == [*twice, ("other", "main-0"), ("other", "main-2")]


def test_unknown_names_are_refused(home: Path) -> None:
    with pytest.raises(RunError, match="rates"):
        plans.plan(Zoo.open(home, "tiny"), ["rate"])
    with pytest.raises(RunError, match="before a slash one of tiny"):
        plans.plan(Zoo.open(home, "tiny"), ["huge/main"])
    with pytest.raises(RunError, match="--only tiny/cost-54"):  # of another zoo, perhaps
        plans.plan(Zoo.open(home, "tiny"), ["tiny/cost-54"])
    with pytest.raises(RunError, match="expected one of tiny"):
        Zoo.open(home, "huge")


def test_a_dry_run_tells_the_steps_and_runs_nothing(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(["tiny", "--home", str(home), "--dry-run", "--only", "main-0", "steps-crossfit-16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # learned+ and mehl+ take 8 steps each, crossfit 8 on each of its 4 folds; then 16 on each.
    assert "48 steps" in lines[0]
    assert "64 steps" in lines[1]
    assert lines[2] == "2 runs, 112 steps in all, 112 to do"
    assert not (home / "runs").exists()


def test_steps_are_counted_once(tmp_path: Path) -> None:
    def step(number: int, fold: int = 0) -> dict[str, object]:
        return {"kind": "step", "fold": fold, "block": 0, "step": number, "loss": 1.0}

    events = [
        {"kind": "method", "method": "mehl+"},
        *(step(n) for n in (0, 1, 2)),
        step(2),  # again, after an interruption
        {"kind": "method", "method": "crossfit"},
        *(step(0, fold) for fold in range(4)),
    ]
    file = tmp_path / "events.jsonl"
    file.write_text("\n".join(map(json.dumps, events)) + '\n{"kind": "st')
    assert counted_steps(file) == {"mehl+": 3, "crossfit": 4}
    assert counted_steps(tmp_path / "none.jsonl") == {}

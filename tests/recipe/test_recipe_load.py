"""A recipe is checked whole, and every problem is said once, with its path."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_page import EXAMPLE, PAGE, recipe_reference
from torch import Tensor

from stockpot.errors import RecipeError, StockpotError
from stockpot.recipe import Recipe, data_section, json_schema, load, load_recipe, make_recipe
from stockpot.recipe.schema import Method
from stockpot.soups.registry import METHODS
from stockpot.soups.settings import declared
from stockpot.task import Metric

GOOD: dict[str, Any] = {
    "pool": {"path": "pool"},
    "model": {"python": "net:build"},
    "data": {"arrays": "digits.npz", "features": "x", "label": "y"},
}


def made(*overrides: str, **sections: Any) -> Recipe:
    return make_recipe({**GOOD, **sections}, ".", overrides)


def refusal(*overrides: str, **sections: Any) -> str:
    with pytest.raises(RecipeError) as caught:
        made(*overrides, **sections)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        ({"method": {"bloc_size": 3}}, "method.bloc_size: unknown key; did you mean block_size?"),
        ({"metod": {}}, "metod: unknown key; did you mean method?"),
        ({"data": {"table": "x", "lable": "y"}}, "data.lable: unknown key; did you mean label?"),
        ({"lr": 0.1}, "lr: unknown key; did you mean method.lr?"),
        ({"seed": 0}, "seed: unknown key; did you mean output.seed?"),
        ({"method": {"learning_rate": 1}}, "method.learning_rate: unknown key; did you mean lr?"),
        ({"zzz": 1}, "zzz: unknown key; known here: base, pool, model, data, method, finetune, output"),
        ({"method": {"name": "crossfitt"}}, "found 'crossfitt'; did you mean 'crossfit'?"),
        ({"method": {"methods": ["hl", "gredy"]}}, "method.methods.1: expected one of best, uniform"),
        ({"method": {"lr": "fast"}}, "method.lr: expected a number, found 'fast'"),
        ({"method": {"passes": 1.5}}, "method.passes: expected a whole number, found 1.5"),
        ({"method": {"compile": "maybe"}}, "method.compile: expected true or false, found 'maybe'"),
        ({"method": {"compile": 1}}, "method.compile: expected true or false, found 1"),
        ({"method": {"passes": True}}, "method.passes: expected a whole number, found True"),
        ({"method": {"lr": "0.5"}}, "method.lr: expected a number, found '0.5'"),
        ({"method": {"lr": float("nan")}}, "lr: expected a"),
        (
            {"method": {"directions": "fp16"}},
            "method.directions: expected one of auto, fp64, fp32, bf16, int8, found 'fp16'; did you mean 'fp64'?",
        ),
        ({"method": {"each": {"mehl+": {"stepps": 3}}}}, "method.each.mehl+.stepps: unknown key; did you mean steps?"),
        ({"method": {"each": {"mehl+": {"steps": 0}}}}, "method.each.mehl+.steps: expected a value >= 1, found 0"),
        ({"method": {"each": {"mehl-": {}}}}, "expected one of best, uniform"),
        (
            {"method": {"granularity": "tensr"}},
            "method.granularity: expected one of model, block, module, tensor or {python: module:function}, "
            "found 'tensr'; did you mean 'tensor'?",
        ),
        ({"method": {"block_size": "half"}}, "method.block_size: expected a whole number or one of auto, fit, found"),
        ({"method": {"block_size": 0}}, "method.block_size: expected a value >= 1 or one of auto, fit, found 0"),
        (
            {"method": {"granularity": ["tensor"]}},
            "method.granularity: expected one of model, block, module, tensor or {python: module:function}, found",
        ),
        ({"method": {"steps": 3, "epochs": 2}}, "exactly one of steps and epochs"),
        ({"method": {"donor": -1}}, "method.donor: expected a value >= 0 or text, found -1"),
        ({"data": {"split_seed": 2**32}}, "data.split_seed: expected a value < 4.29497e+09, found 4294967296"),
        ({"output": {"seed": -1}}, "output.seed: expected a value >= 0, found -1"),
        ({"output": {"max_shard_size": "big"}}, "output.max_shard_size: expected a size such as 5GB"),
        ({"pool": {"path": 3}}, "pool.path: expected a name or a list of names, found 3"),
        ({"pool": {}}, "pool.path: required, unless there is a finetune section"),
        ({"pool": 3}, "pool: expected a mapping, found 3"),
        ({"model": {}}, "model: expected exactly one of transformers, timm, torchvision, open_clip, python"),
        ({"model": {"timm": "a", "open_clip": "b"}}, "found timm and open_clip"),
        ({"model": {"python": "net.build"}}, "model.python: expected module:function, found 'net.build'"),
        ({"model": {"transformers": {"layers": 2}}}, "a mapping with model_type"),
        ({"model": {"timm": "a", "tokenizer": "t"}}, "model.tokenizer: only for transformers"),
        ({"data": {"fit": 0.5}}, "data: expected exactly one of images, table, dataset, arrays, python"),
        ({"data": {"arrays": "x", "fit": 0}}, "data.fit: expected a value > 0, found 0"),
        ({"data": {"arrays": "x", "fit": {"off": "a"}}}, "data.fit.off: unknown key; did you mean of?"),
        (
            {"data": {"arrays": "x", "fit": 0.8, "report": 0.5}},
            "data: the fractions of fit and report add up to 1.3, more than the data has",
        ),
        (
            {"data": {"arrays": "x", "fit": 0.5, "report": {"off": "a"}}},
            "data.report.off: unknown key; did you mean of?",
        ),
        (
            {"data": {"arrays": "x", "fit": 0.5, "report": {"test": 0.5, "shifted": {"path": "y", "fractoin": 1}}}},
            "data.report.shifted.fractoin: unknown key; did you mean fraction?",
        ),
        ({"data": {"arrays": "x", "fit": 0.5, "report": {"test": 0.3, "a/b": 0.2}}}, "data.report.a/b: "),
        (
            {"data": {"arrays": "x", "fit": 0.5, "report": {"test": "val", "shifted": "val"}}},
            "report.test and report.shifted would share samples: report.test takes all of part 'val'",
        ),
        (
            {"data": {"arrays": "x", "fit": "val", "report": "val"}},
            "fit and report would share samples: fit takes all of part 'val'",
        ),
        ({"data": {"arrays": "x", "report": 0.5}}, "data.fit: required when train or report is given"),
        ({"data": {"python": "a:b", "fit": 0.5}}, "data.fit: the python function makes the splits itself"),
        (
            {"data": {"table": "x", "text": "a", "image": "b"}},
            "at most one of text, messages, prompt, image, features, tokens",
        ),
        (
            {"data": {"images": "x", "preprocessing": {"sise": 2}}},
            "data.preprocessing.sise: unknown key; did you mean size?",
        ),
        (
            {"data": {"images": "x", "preprocessing": {"size": [1]}}},
            "data.preprocessing.size: expected a size in pixels",
        ),
        ({"data": {"images": "x", "preprocessing": {"interpolation": "cubic"}}}, "did you mean 'bicubic'?"),
        ({"data": {"arrays": "x", "metric": "acuracy"}}, "found 'acuracy'; did you mean 'accuracy'?"),
        (
            {"data": {"arrays": "x", "metric": {"python": "no colon"}}},
            "data.metric.python: expected module:function, found 'no colon'",
        ),
        (
            {"data": {"arrays": "x", "target": "numbers"}},
            "data.target: expected one of class, number, multi, found 'numbers'; did you mean 'number'?",
        ),
        ({"data": {"images": "x", "target": "number"}}, "data.target: expected class"),
        ({"data": {"arrays": "x", "limits": {"rows": 0}}}, "data.limits.rows: expected a value >= 1, found 0"),
        ({"finetune": {}}, "data.train: required by finetune"),
        ({"finetune": {"lr": {"min": 0, "max": 1, "scale": "log"}}}, "finetune.lr: expected min > 0 for a log range"),
        ({"finetune": {"lr": {"min": 2, "max": 1}}}, "finetune.lr: expected min <= max, found 2 > 1"),
        ({"finetune": {"epochs": [1, "x"]}}, "finetune.epochs: expected a number of at least 0, found 'x'"),
        ({"finetune": {"lr": -1}}, "finetune.lr: expected a number of at least 0, found -1"),
        ({"finetune": {"listed": [{"lr": 1}, {"lrr": 2}]}}, "finetune.listed.1.lrr: unknown key; did you mean lr?"),
    ],
)
def test_each_problem_is_named_with_its_path(sections: dict[str, Any], line: str) -> None:
    assert line in refusal(**sections)


def test_all_problems_come_in_one_error() -> None:
    text = refusal(pool={"kee": 1}, method={"lr": "x", "name": "hll"}, output={"seeed": 1})
    assert text.splitlines()[0] == "recipe: 4 problems"
    for path in ("pool.kee", "method.lr", "method.name", "output.seeed"):
        assert f"\n  {path}: " in text


def test_a_list_of_wrong_words_is_not_also_too_short() -> None:
    text = refusal(method={"methods": ["crosfit"]})
    assert "did you mean 'crossfit'?" in text
    assert "at least" not in text
    assert "at least 1 item" in refusal(method={"methods": []})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pool:\n  path: [a\nmodel: b\n", "line 3, column"),
        ("pool:\n\tpath: a\n", "line 2, column 1"),
        ("pool:\n  path: a\npool:\n  path: b\n", "line 3, column 1: key 'pool' appears twice"),
        ("pool: !!python/object/apply:os.system [echo]\n", "could not determine a constructor for the tag"),
        ("- a\n", "expected sections such as pool, model and data, found list"),
        ("", "expected sections such as pool, model and data, found nothing"),
        ("3: x\n", "key 3 is not a word"),
    ],
)
def test_wrong_yaml_says_where(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert str(file) in str(caught.value)
    assert said in str(caught.value)


def test_a_missing_recipe_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="there is no such recipe"):
        load_recipe(tmp_path / "none.yaml")


def test_what_is_no_text_file_is_said_to_be_none(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="a folder; give the recipe file itself"):
        load_recipe(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"model\.pt: not a text file, so not a recipe"):
        load_recipe(tmp_path / "model.pt")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("1e-3", 0.001),
        ("-5", -5),
        ("0.5", 0.5),
        (".5", 0.5),
        ("010", 10),
        ("1_000", "1_000"),
        ("2020-01-01", "2020-01-01"),
        ("12:30", "12:30"),
        ("null", None),
        ("", None),
        ("[a, 1]", ["a", 1]),
    ],
)
def test_scalars_mean_what_they_look_like(text: str, value: object) -> None:
    found = load.parse(text, "here")[0]
    assert found == value
    assert type(found) is type(value)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text()
        | st.from_regex(r"[-+.0-9e_:xXnoyes]{1,6}"),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
@settings(deadline=None, max_examples=100)
def test_json_parses_back_unchanged(value: object) -> None:
    """A run's recipe is written as JSON, which is YAML."""
    assert repr(load.parse(json.dumps(value), "here")[0]) == repr(value)


def test_overrides_are_yaml_and_win() -> None:
    recipe = made("method.lr=1e-3", "output.dir=elsewhere", "method.block_size=null", "method.methods=[hl, best]")
    assert recipe.method.stated()["lr"] == 0.001
    assert recipe.output.dir == "elsewhere"
    assert recipe.method.settings("mehl").block_size is None
    assert recipe.method.methods == ("hl", "best")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method.lrr=1", "method.lrr: unknown key; did you mean lr?"),
        ("metod.lr=1", "metod: unknown key; did you mean method?"),
        ("method.lr", "--set method.lr: expected key=value, such as method.lr=0.02"),
        ("=3", "expected key=value"),
        ("pool.path.x=1", "--set pool.path.x=1: path is 'pool', which has no keys below it"),
        ("method.lr=[", "--set method.lr=[: not valid YAML"),
    ],
)
def test_wrong_overrides_are_refused(override: str, said: str) -> None:
    assert said in refusal(override)


def test_a_resolved_recipe_loads_again_from_anywhere_as_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    file = tmp_path / "a" / "recipe.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "method": {"epochs": 2, "block_size": None}, "finetune": None}))
    first = load_recipe(file, ["output.seed=5"])
    copy = tmp_path / "resolved.yaml"
    copy.write_text(yaml.safe_dump(first.resolved()))
    again = load_recipe(copy)
    assert again.resolved() == first.resolved()
    assert again.digest() == first.digest()
    assert again.path("digits.npz") == tmp_path / "a" / "digits.npz"
    for method in METHODS:
        assert again.method.settings(method) == first.method.settings(method)


def test_a_resolved_recipe_states_defaults() -> None:
    resolved = made().resolved()
    assert resolved["data"]["fit"] == {"path": None, "of": None, "fraction": 0.5, "count": None, "rows": None}
    assert resolved["data"]["report"]["fraction"] == 0.5
    assert resolved["method"]["name"] == "crossfit"
    assert resolved["method"]["batch_size"] == 128
    assert resolved["output"]["seed"] == 0
    assert "lr" not in resolved["method"]  # differs between the methods of a comparison


def test_the_digest_follows_what_decides_the_result() -> None:
    assert made().digest() == made("output.dir=other", "output.overwrite=true").digest()
    assert made().digest() != made("output.seed=1").digest()
    assert made().digest() != made("method.lr=0.3").digest()
    assert make_recipe(GOOD, "/a").digest() == make_recipe(GOOD, "/b").digest()


def test_every_setting_of_the_methods_can_be_given() -> None:
    assert set(declared()) <= set(Method.model_fields)


def test_a_comparison_keeps_the_methods_apart() -> None:
    given = {"preset": "authors", "block_size": 4, "granularity": "block", "lr": 0.03, "steps": 7}
    method = made(method={**given, "name": "mehl+"}).method
    one = method.settings()
    assert (one.granularity, one.block_size, one.lr) == ("block", 4, 0.03)
    hl, learned, mehl, crossfit = (method.settings(name) for name in ("hl", "learned", "mehl", "crossfit"))
    assert (hl.granularity, hl.block_size, hl.weight_decay) == ("model", None, 0.0)
    assert (learned.block_size, learned.beta) == (None, True)
    assert (mehl.block_size, mehl.granularity, mehl.lr) == (4, "model", 0.03)
    # What is set for the paper's methods does not make the default another method.
    assert (crossfit.steps, crossfit.folds, crossfit.lr) == (1000, 4, 0.02)
    own = made(method={**given, "each": {"crossfit": {"steps": 9}}}).method.settings("crossfit")
    assert (own.steps, own.folds) == (9, 4)


def test_the_metrics_of_recipes_are_those_of_tasks() -> None:
    from stockpot.task import METRICS
    from stockpot.task.metrics import _BUILT_IN

    assert typing.get_args(data_section.MetricName) == tuple(METRICS)
    numbers = torch.zeros(3), torch.arange(3.0)
    classes = torch.zeros(3, 2), torch.arange(3)
    of_numbers = [name for name in _BUILT_IN if _takes(METRICS[name], numbers) and not _takes(METRICS[name], classes)]
    assert list(data_section._OF_NUMBERS) == of_numbers


def _takes(metric: Metric, batch: tuple[Tensor, Tensor]) -> bool:
    try:
        metric.statistics(batch[0], batch)
    except StockpotError:
        return False
    return True


def test_other_targets_have_other_metrics() -> None:
    assert made().data.metric == "accuracy"
    assert made("data.target=number").data.metric == "r2"
    assert made("data.target=multi").data.metric == "micro_f1"
    assert made("data.target=number", "data.metric=pearson").data.metric == "pearson"


def test_problems_name_the_line_of_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("pool: {path: p}\nmodel: {timm: a}\ndata:\n  arrays: x\n  fit: 0\nmethod:\n  lrr: 1\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(file)
    assert "data.fit: expected a value > 0, found 0 (line 5)" in str(caught.value)
    assert "method.lrr: unknown key; did you mean lr? (line 7)" in str(caught.value)


def test_epochs_replace_steps() -> None:
    settings = made(method={"epochs": 3}).method.settings()
    assert (settings.steps, settings.epochs) == (None, 3)


def test_epochs_of_one_method_replace_the_steps_of_all() -> None:
    method = made(method={"steps": 5, "each": {"mehl+": {"epochs": 2}}}).method
    assert (method.settings("mehl+").steps, method.settings("mehl+").epochs) == (None, 2)
    assert method.settings("mehl").steps == 5
    other = made(method={"name": "hl", "epochs": 5, "each": {"hl": {"steps": 2}}}).method
    assert (other.settings().steps, other.settings().epochs) == (2, None)


def test_trials_depend_on_seed_and_number_alone() -> None:
    search = {"lr": {"min": 1e-5, "max": 1e-3, "scale": "log"}, "epochs": [2, 4], "seed": {"min": 0, "max": 9}}
    spaces = {"trials": 50, **search}
    data = {"arrays": "x.npz", "train": 0.5, "fit": 0.25, "report": 0.25}
    one = made(finetune=spaces, data=data).finetune
    two = made(finetune={**spaces, "augmentation": 0.7}, data=data).finetune
    assert one is not None
    assert two is not None
    trials = one.drawn(seed=3)
    assert trials == one.drawn(seed=3)
    assert trials != one.drawn(seed=4)
    assert all(1e-5 <= t.lr <= 1e-3 and t.epochs in (2, 4) and t.seed in range(10) for t in trials)
    assert len({t.lr for t in trials}) == 50
    below = sum(t.lr < 1e-4 for t in trials)  # half of a log range
    assert 12 <= below <= 38
    changed = asdict(two.drawn(seed=3)[7])
    assert changed.pop("augmentation") == 0.7
    assert changed.items() <= asdict(trials[7]).items()


def test_listed_trials_are_taken_as_they_are() -> None:
    data = {"arrays": "x.npz", "train": 0.5, "fit": 0.25}
    finetune = made(finetune={"listed": [{"lr": 0.1}, {"lr": 0.2}, {"lr": 0.3, "seed": 4}]}, data=data).finetune
    assert finetune is not None
    assert finetune.trials == 3
    assert [trial.lr for trial in finetune.drawn(0)] == [0.1, 0.2, 0.3]
    assert finetune.drawn(0)[2].seed == 4


def test_the_spaces_of_recipes_are_those_of_searches() -> None:
    from stockpot.zoo.plan import draw_trials

    data = {"arrays": "x.npz", "train": 0.5, "fit": 0.25}
    finetune = made(finetune={"trials": 20}, data=data).finetune
    assert finetune is not None
    assert finetune.drawn(5) == draw_trials(20, seed=5)


def test_the_json_schema_accepts_what_a_recipe_may_say() -> None:
    schema = json_schema()
    text = json.dumps(schema)
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {"base", "pool", "model", "data", "method", "finetune", "output"}
    fit = schema["$defs"]["Data"]["properties"]["fit"]["anyOf"]
    assert [kind["type"] for kind in fit] == ["number", "string", "object", "null"]
    assert "crossfit" in schema["$defs"]["Method"]["properties"]["name"]["enum"]
    for reference in set(text.split('"$ref": "#/$defs/')[1:]):
        assert reference.partition('"')[0] in schema["$defs"]


def test_every_key_is_described() -> None:
    for name, definition in json_schema()["$defs"].items():
        for key, field in definition["properties"].items():
            assert field.get("description") or name == "PythonCode", f"{name}.{key}"


def test_the_reference_in_the_docs_is_current() -> None:
    message = "docs/recipe.md is out of date; run: python tests/recipe/reference_page.py"
    assert PAGE.read_text(encoding="utf-8") == recipe_reference(), message


def test_the_example_in_the_reference_is_a_recipe() -> None:
    recipe = make_recipe(load.parse(EXAMPLE, "example")[0], ".")
    assert recipe.data.text == ("review",)


def test_reading_a_recipe_loads_no_torch() -> None:
    program = (
        "import sys, stockpot.recipe as r; r.json_schema(); import stockpot.recipe.build; "
        "print([m for m in ('torch', 'numpy', 'transformers', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_for_learning_is_a_size_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "pool: {path: a/*}\nmodel: {transformers: m}\ndata: {table: d.csv, text: t, label: l, fit: 0.5}\n"
        "method: {memory: 8GiB}\n"
    )
    assert load_recipe(file).method.settings().memory == 8 * 2**30


@pytest.mark.parametrize(("given", "seconds"), [
    ("90", 90), ("90s", 90), ("10min", 600), ("1.5h", 5400), ("0.5", 0.5), ("200k samples", "200k samples"),
])  # fmt: skip
def test_a_budget_is_a_time_or_samples(tmp_path: Path, given: str, seconds: float | str) -> None:
    file = tmp_path / "recipe.yaml"
    start = "pool: {path: a/*}\nmodel: {transformers: m}\ndata: {table: d.csv, text: t, label: l, fit: 0.5}\n"
    file.write_text(f"{start}method: {{budget: {given}}}\n")
    assert load_recipe(file).method.settings().budget == seconds


@pytest.mark.parametrize("given", ["0", "-1", "10 minutes", "true", ".inf", "0 samples", "k samples"])
def test_what_is_no_time_is_refused(tmp_path: Path, given: str) -> None:
    file = tmp_path / "recipe.yaml"
    start = "pool: {path: a/*}\nmodel: {transformers: m}\ndata: {table: d.csv, text: t, label: l, fit: 0.5}\n"
    file.write_text(f"{start}method: {{budget: {given}}}\n")
    with pytest.raises(RecipeError, match=r"expected a time such as 10min, .*or samples such as 200k samples, found"):
        load_recipe(file)


def test_several_sets_of_report_data_are_written_by_name() -> None:
    sets = {"in domain": 0.5, "shifted": {"path": "other.npz"}, "base": "general"}
    recipe = made(data={**GOOD["data"], "fit": 0.5, "report": sets})
    assert list(recipe.data.splits) == ["fit", "report.in domain", "report.shifted", "report.base"]
    assert recipe.data.splits["report.shifted"].path == "other.npz"
    again = make_recipe(recipe.resolved(), ".", ())
    assert again.digest() == recipe.digest()
    assert list(again.data.splits) == list(recipe.data.splits)  # the first one counts

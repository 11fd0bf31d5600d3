"""From a recipe to a pool, a task and settings; and what is said when the files do not fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stockpot.errors import DataError, PoolError, RecipeError, RunError, StockpotError, TaskError
from stockpot.recipe import Recipe, make_recipe
from stockpot.recipe.build import build_data, build_model, build_pool, build_task, cook_arguments, pool_paths
from stockpot.soups.registry import METHODS, settings_in_comparison
from stockpot.soups.result import report_weights

NET = """
import torch
from torch import nn

def build(width=4, classes=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(width, classes))

def data(split, n=6):
    if split == "report":
        return None
    return torch.zeros(n, 4), torch.arange(n) % 3

def minus_loss(outputs, batch):
    return -nn.functional.cross_entropy(outputs, batch[1], reduction="none")

def hinge(model, batch):
    return nn.functional.multi_margin_loss(model(batch[0]), batch[1])

def group(name):
    return name.split(".")[0]
"""
VIT = {
    "model_type": "vit",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 8,
    "patch_size": 4,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "net", raising=False)
    (tmp_path / "net.py").write_text(NET)
    rng = np.random.RandomState(0)
    np.savez(tmp_path / "numbers.npz", x=rng.randn(40, 4), y=np.arange(40) % 3)
    np.savez(tmp_path / "pictures.npz", x=rng.randint(0, 256, (20, 10, 12, 3)).astype(np.uint8), y=np.arange(20) % 2)
    words = ["good", "bad", "fine", "poor", "film", "book"]
    rows = [f"{words[i % 6]} {words[i % 5]},{'pos' if i % 2 else 'neg'}" for i in range(20)]
    (tmp_path / "reviews.csv").write_text("review,mood\n" + "\n".join(rows) + "\n")
    for number in range(3):
        layer = {"1.weight": torch.full((3, 4), float(number)), "1.bias": torch.zeros(3)}
        save_file(layer, tmp_path / f"model_{number}.safetensors")
    return tmp_path


def made(home: Path, *overrides: str, **sections: Any) -> Recipe:
    content: dict[str, Any] = {
        "pool": {"path": "model_*.safetensors"},
        "model": {"python": "net:build"},
        "data": {"arrays": "numbers.npz", "features": "x", "label": "y"},
    }
    return make_recipe({**content, **sections}, home, overrides)


def refusal(recipe: Recipe) -> str:
    with pytest.raises(StockpotError) as caught:
        build_task(recipe)
    return str(caught.value)


# Pool and settings --------------------------------------------------------------------------------------


def test_the_pool_is_found_beside_the_recipe(home: Path) -> None:
    assert build_pool(made(home)).names == ("model_0", "model_1", "model_2")
    with pytest.raises(PoolError, match="none_"):
        build_pool(made(home, "pool.path=none_*.pt"))


def test_checkpoints_with_nan_are_refused_dropped_or_ignored(home: Path) -> None:
    save_file({"1.weight": torch.full((3, 4), float("nan")), "1.bias": torch.zeros(3)}, home / "model_1.safetensors")
    with pytest.raises(PoolError, match="not finite"):
        build_pool(made(home))
    assert build_pool(made(home, "pool.nonfinite=drop")).names == ("model_0", "model_2")
    assert len(build_pool(made(home, "pool.nonfinite=ignore"))) == 3
    save_file({"1.weight": torch.full((3, 4), float("inf")), "1.bias": torch.zeros(3)}, home / "model_0.safetensors")
    with pytest.raises(PoolError, match="at least two checkpoints without NaN or infinity, found 1 of 3"):
        build_pool(made(home, "pool.nonfinite=drop"))


def test_a_recipe_that_makes_its_pool_finds_it_there(home: Path) -> None:
    (home / "made").mkdir()
    for number in range(2):
        (home / f"model_{number}.safetensors").rename(home / "made" / f"{number}.safetensors")
    data = {"arrays": "numbers.npz", "train": 0.5, "fit": 0.25}
    assert build_pool(made(home, pool={}, finetune={"dir": "made"}, data=data)).names == ("0", "1")


@pytest.mark.parametrize(("exists", "found"), [(False, "no such folder"), (True, "an empty folder")])
def test_a_search_that_was_not_made_is_asked_for(home: Path, exists: bool, found: str) -> None:
    if exists:
        (home / "made").mkdir()
    data = {"arrays": "numbers.npz", "train": 0.5, "fit": 0.25}
    with pytest.raises(RecipeError, match="run `stockpot finetune` with this recipe first") as caught:
        build_pool(made(home, pool={}, finetune={"dir": "made"}, data=data))
    assert f"found {found}" in str(caught.value)


def test_a_pool_folder_that_cannot_be_read_is_the_pools_own_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "made").mkdir()

    def denied(self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    data = {"arrays": "numbers.npz", "train": 0.5, "fit": 0.25}
    with pytest.raises(StockpotError) as caught:
        build_pool(made(home, pool={}, finetune={"dir": "made"}, data=data))
    assert not isinstance(caught.value, RecipeError)


def test_cook_and_compare_are_called_as_the_recipe_says(home: Path) -> None:
    method = {"name": "hl+", "lr": 0.5, "exclude": "head.*", "each": {"hl+": {"steps": 7}, "mehl": {"steps": 8}}}
    recipe = made(home, method=method, output={"seed": 9, "dir": "there"})
    cook = cook_arguments(recipe, "cook", "a title", ["stockpot", "cook"])
    assert (cook["method"], cook["lr"], cook["steps"], cook["seed"]) == ("hl+", 0.5, 7, 9)
    assert (cook["exclude"], cook["donor"], cook["overwrite"]) == (("head.*",), 0, False)
    assert cook["run"] == home / "there"
    facts = cook["recipe"]
    assert (facts.title, facts.kind, facts.command) == ("a title", "cook", ("stockpot", "cook"))
    assert facts.digest == recipe.digest()
    assert list(facts.code) == ["net.py"]
    compare = cook_arguments(recipe, "compare")
    assert (compare["each"], compare["lr"]) == ({"hl+": {"steps": 7}, "mehl": {"steps": 8}}, 0.5)
    assert "method" not in compare
    assert "steps" not in compare


def test_python_and_recipe_give_the_same_settings(home: Path) -> None:
    """`compare(folds=2)` in Python and in a recipe do the same."""
    recipe = made(home, method={"folds": 2, "steps": 5})
    arguments = cook_arguments(recipe, "compare")
    assert (arguments["folds"], arguments["steps"]) == (2, 5)
    for name in METHODS:
        python = settings_in_comparison(name, None, {"folds": 2, "steps": 5}, {})
        assert recipe.method.settings(name) == python


def test_a_run_in_the_recipes_own_folder_is_refused(home: Path) -> None:
    with pytest.raises(RunError, match="expected a directory of its own, found the recipe's folder"):
        cook_arguments(made(home, "output.dir=."), "cook")


def test_groups_may_come_from_python(home: Path) -> None:
    arguments = cook_arguments(made(home, method={"granularity": {"python": "net:group"}}), "cook")
    assert arguments["granularity"]("head.weight") == "head"


# What a label is ----------------------------------------------------------------------------------------


def table_of(home: Path, *labels: object) -> dict[str, Any]:
    rows = [f"{k % 5},{k % 3},{k % 7},{k % 2},{label}" for k, label in enumerate(labels)]
    (home / "table.csv").write_text("\n".join(["a,b,c,d,y", *rows]))
    return {"table": "table.csv", "features": ["a", "b", "c", "d"], "label": "y", "fit": 0.5, "report": 0.5}


def test_sets_of_report_data_come_from_their_own_files(home: Path) -> None:
    data = table_of(home, *"abab" * 10)
    rows = [f"9,{k},{k % 7},{k % 2},{'ba'[k % 2]}" for k in range(6)]
    (home / "other.csv").write_text("\n".join(["a,b,c,d,y", *rows]))
    data["report"] = {"shifted": {"path": "other.csv"}, "test": 0.5, "few": {"path": "other.csv", "count": 2}}
    with pytest.raises(
        RecipeError, match=r"takes all of the data of other.csv; .* as \{path: other.csv, fraction: 0.5\}"
    ):
        made(home, data=data)
    data["report"]["shifted"]["fraction"] = 0.5
    found = report_weights(build_task(made(home, data=data)))
    assert [(name, one.n) for name, one in found.items()] == [("shifted", 3), ("test", 20), ("few", 2)]


def test_a_function_may_give_several_sets_too(home: Path) -> None:
    (home / "several.py").write_text("""
import torch
def data(split):
    x, y = torch.randn(12, 4), torch.arange(12) % 2
    return (x, y) if split == "fit" else {"test": (x, y), "shifted": (x[:5], y[:5])}
""")
    found = report_weights(build_task(made(home, data={"python": "several:data"})))
    assert {name: one.n for name, one in found.items()} == {"test": 12, "shifted": 5}


def test_measurements_are_not_taken_for_classes(home: Path) -> None:
    """They were numbered in alphabetical order, and the soup was reported as a gain."""
    data = table_of(home, *(f"{k % 3 + k / 10:.2f}" for k in range(20)))
    text = refusal(made(home, data=data))
    assert "data.target: number" in text
    assert "Fix: " in text


def test_measurements_are_learned_when_the_recipe_says_so(home: Path) -> None:
    data = {**table_of(home, *(f"{k % 3 + k / 10:.2f}" for k in range(20))), "target": "number"}
    task = build_task(made(home, model={"python": "net:build", "classes": 1}, data=data))
    x, y = task.fit.batch(torch.arange(10))
    assert y.dtype == torch.float32
    assert task.metric.name == "r2"
    found = task.loss((x, y))
    expected = (task.model(x).squeeze(1) - y).square()
    torch.testing.assert_close(found.mean, expected.mean())
    assert float(found.weight) == 10
    with pytest.raises(TaskError, match="expected one output for each target"):
        build_task(made(home, data=data))
    with pytest.raises(TaskError, match="loss MSELoss: expected outputs and targets of one shape"):
        build_task(made(home, data={**data, "metric": "loss"}))


def test_several_classes_per_sample_are_learned_when_the_recipe_says_so(home: Path) -> None:
    rng = np.random.RandomState(0)
    labels = rng.randint(0, 2, (40, 3))
    np.savez(home / "multi.npz", x=rng.randn(40, 4), y=labels)
    data = {"arrays": "multi.npz", "features": "x", "label": "y"}
    assert "data.target: multi" in refusal(made(home, data=data))
    task = build_task(made(home, data={**data, "target": "multi"}))
    x, y = task.fit.batch(torch.arange(20))
    assert task.metric.name == "micro_f1"
    expected = torch.nn.functional.binary_cross_entropy_with_logits(task.model(x), y)
    torch.testing.assert_close(task.loss((x, y)).mean, expected)


def test_whole_numbers_written_with_a_point_are_classes(home: Path) -> None:
    task = build_task(made(home, data=table_of(home, *(f"{k % 3}.0" for k in range(20)))))
    assert sorted(set(task.fit.batch(torch.arange(10))[1].tolist())) == [0, 1, 2]


# Plain PyTorch ------------------------------------------------------------------------------------------


def test_numbers_become_a_task_that_can_learn(home: Path) -> None:
    task = build_task(
        made(home, data={"arrays": "numbers.npz", "features": "x", "label": "y", "fit": 0.5, "report": 0.5})
    )
    assert len(task.fit) == 20
    assert task.has_report
    x, y = task.fit.batch(torch.arange(3))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    task.check_loss()
    assert build_pool(made(home)).specs.keys() == dict(task.model.state_dict()).keys()


def test_fit_train_and_report_never_share_a_sample(home: Path) -> None:
    np.savez(home / "n.npz", x=np.arange(40.0)[:, None] * np.ones(4), y=np.arange(40) % 3)
    data = {"arrays": "n.npz", "train": 0.5, "fit": 10, "report": 10}
    recipe = made(home, data=data, finetune={})
    task, (train, _) = build_task(recipe), build_data(recipe, build_model(recipe), ("train",))["train"]
    fit = {float(v[0]) for v in task.fit.batch(torch.arange(10))[0]}
    trained = {float(v[0]) for v in train}
    assert not fit & trained
    again = build_task(recipe)
    assert torch.equal(task.fit.batch(torch.arange(10))[0], again.fit.batch(torch.arange(10))[0])
    other = build_task(made(home, "data.split_seed=1", data=data, finetune={}))
    assert not torch.equal(task.fit.batch(torch.arange(10))[0], other.fit.batch(torch.arange(10))[0])


def test_python_data_metric_and_loss(home: Path) -> None:
    recipe = made(
        home,
        data={
            "python": "net:data",
            "options": {"n": 9},
            "metric": {"python": "net:minus_loss"},
            "loss": {"python": "net:hinge"},
        },
    )
    task = build_task(recipe)
    assert len(task.fit) == 9
    assert not task.has_report
    assert task.score().value < 0


def test_a_metric_that_is_no_mean_may_come_from_python(home: Path) -> None:
    with (home / "net.py").open("a") as file:
        file.write(
            "from stockpot import Metric\n"
            "worst = Metric('worst', lambda outputs, batch: outputs[:, :1], lambda table: -float(table.max()))\n"
        )
    recipe = made(home, data={"arrays": "numbers.npz", "metric": {"python": "net:worst"}})
    task = build_task(recipe)
    assert task.metric.name == "worst"
    with torch.no_grad():
        outputs = task.model(task.fit.batch(torch.arange(20))[0])
    assert task.score().value == pytest.approx(-float(outputs[:, 0].max()))


def test_random_starting_weights_follow_the_seed(home: Path) -> None:
    first, again, other = (build_model(made(home, f"output.seed={s}")).model.state_dict() for s in (1, 1, 2))
    assert torch.equal(first["1.weight"], again["1.weight"])
    assert not torch.equal(first["1.weight"], other["1.weight"])


def test_starting_weights_come_from_a_file_only_when_asked(home: Path) -> None:
    recipe = made(home, model={"python": "net:build", "weights": "model_2.safetensors"})
    assert torch.equal(build_model(recipe, pretrained=True).model.state_dict()["1.weight"], torch.full((3, 4), 2.0))
    assert not torch.equal(build_model(recipe).model.state_dict()["1.weight"], torch.full((3, 4), 2.0))


def test_uint8_pictures_reach_the_model_scaled(home: Path) -> None:
    data = {"arrays": "pictures.npz", "image": "x", "label": "y", "preprocessing": {"size": [2, 2], "channels": 1}}
    task = build_task(made(home, data=data))
    images, _ = task.fit.batch(torch.arange(5))
    assert images.dtype == torch.uint8
    assert images.shape == (5, 1, 2, 2)
    with task.evaluating():
        expected = task.model(images.float() / 255)
        torch.testing.assert_close(task.model(images), expected)


# Transformers -------------------------------------------------------------------------------------------


def test_a_picture_classifier_from_a_configuration(home: Path) -> None:
    pytest.importorskip("transformers")
    model = {"transformers": VIT, "auto_class": "AutoModelForImageClassification", "classes": 2}
    task = build_task(made(home, model=model, data={"arrays": "pictures.npz", "image": "x", "label": "y"}))
    batch = task.fit.batch(torch.arange(4))
    assert set(batch) == {"pixel_values", "labels"}
    assert batch["pixel_values"].shape == (4, 3, 8, 8)
    task.check_loss()
    assert 0 <= report_weights(task)["report"].value <= 1


def test_pictures_are_prepared_as_the_model_folder_says(home: Path) -> None:
    pytest.importorskip("transformers")
    folder = home / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**VIT, "architectures": ["ViTForImageClassification"]}))
    processor = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    data = {"arrays": "pictures.npz", "image": "x", "label": "y"}
    task = build_task(made(home, model={"transformers": "base", "classes": 2}, data=data))
    images = task.fit.batch(torch.arange(2))["pixel_values"]
    with task.evaluating():
        seen = task.model(pixel_values=images).logits
        given = task.model(pixel_values=(images.float() / 255 - 0.5) / 0.25).logits
    torch.testing.assert_close(seen, given)


def text_model(home: Path, **config: Any) -> Path:
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {w: i for i, w in enumerate(["[PAD]", "[UNK]", "good", "bad", "fine", "poor", "film", "book"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(home / "text")
    architecture = {"architectures": ["BertForSequenceClassification"], **config}
    (home / "text" / "config.json").write_text(json.dumps({**BERT, **architecture}))
    return home / "text"


TEXT = {"table": "reviews.csv", "text": "review", "label": "mood"}


def test_a_text_classifier_from_a_folder(home: Path) -> None:
    text_model(home)
    task = build_task(made(home, model={"transformers": "text"}, data=TEXT))
    batch = task.fit.batch(torch.arange(10))
    assert batch["input_ids"].shape == (10, 2)
    assert set(batch["labels"].tolist()) == {0, 1}
    task.check_loss()


def test_class_names_of_the_model_decide_the_numbers(home: Path) -> None:
    text_model(home, id2label={"0": "pos", "1": "neg"}, label2id={"pos": 0, "neg": 1})
    plain = build_task(made(home, data={**TEXT, "classes": ["neg", "pos"]}, model={"transformers": "text"}))
    named = build_task(made(home, data=TEXT, model={"transformers": "text"}))
    rows = torch.arange(10)
    assert torch.equal(named.fit.batch(rows)["labels"], 1 - plain.fit.batch(rows)["labels"])


def test_class_names_of_the_pool_decide_before_those_of_the_model(home: Path) -> None:
    """A base model has made-up names or other ones; the pool was trained with its own."""
    recipe = made(home, pool={"path": "pool"}, model={"transformers": "text"}, data=TEXT)
    text_model(home)
    before = build_task(recipe).fit.batch(torch.arange(10))["labels"]
    folder = home / "pool" / "named"
    folder.mkdir(parents=True)
    save_file({"w": torch.zeros(2)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"id2label": {"0": "pos", "1": "neg"}}')
    assert torch.equal(build_task(recipe).fit.batch(torch.arange(10))["labels"], 1 - before)


def test_a_model_folder_gives_its_weights_only_when_asked(home: Path) -> None:
    folder = text_model(home)
    recipe = made(home, model={"transformers": "text"}, data=TEXT)
    other: Any = build_model(made(home, "output.seed=5", model={"transformers": "text"}, data=TEXT)).model
    other.save_pretrained(folder)
    name = "classifier.weight"
    assert torch.equal(build_model(recipe, pretrained=True).model.state_dict()[name], other.state_dict()[name])
    assert not torch.equal(build_model(recipe).model.state_dict()[name], other.state_dict()[name])


def test_loading_weights_is_silent_and_a_new_head_is_fine(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = text_model(home)
    old: Any = build_model(made(home, model={"transformers": "text"}, data=TEXT)).model
    old.save_pretrained(folder)
    capfd.readouterr()
    new = build_model(made(home, model={"transformers": "text", "classes": 5}, data=TEXT), pretrained=True).model
    assert tuple(capfd.readouterr()) == ("", "")
    state = new.state_dict()
    assert state["classifier.weight"].shape == (5, 16)
    for name, value in old.state_dict().items():
        assert name.startswith("classifier.") or torch.equal(state[name], value)


def test_weights_of_another_model_are_refused(home: Path) -> None:
    folder = text_model(home)
    save_file({"bert.pooler.dense.bias": torch.zeros(16)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TaskError, match=r"found none for \d+ of its \d+ tensors"):
        build_model(made(home, model={"transformers": "text"}, data=TEXT), pretrained=True)


def test_a_language_model_needs_no_labels(home: Path) -> None:
    text_model(home, model_type="gpt2", architectures=["GPT2LMHeadModel"], n_embd=16, n_layer=1, n_head=2)
    model = {"transformers": "text", "auto_class": "AutoModelForCausalLM", "options": {"vocab_size": 12}}
    task = build_task(made(home, model=model, data={"table": "reviews.csv", "text": "review", "metric": "loss"}))
    batch = task.fit.batch(torch.arange(3))
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert task.score().value < 0


# What does not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"arrays": "numbers.npz", "features": "z"}, "data.features: z: expected a column of"),
        ({"arrays": "numbers.npz", "features": "z"}, "found columns x, y"),
        ({"arrays": "numbers.npz", "features": "x", "label": "cls"}, "data.label: cls: expected a column of"),
        ({"arrays": "gone.npz"}, "gone.npz: expected a .npz or .safetensors file"),
        ({"table": "reviews.csv", "label": "mood", "features": "review"}, "expected numbers, found 'bad bad'"),
        (
            {"table": "reviews.csv", "label": "mood", "text": "review"},
            "found another one.\n  Fix: give the model as model.transformers",
        ),
        ({"arrays": "numbers.npz", "features": "x", "label": "y", "fit": 60}, "expected at most its 40 samples"),
        ({"arrays": "numbers.npz", "fit": {"of": "val", "fraction": 0.5}}, "part 'val' of"),
        ({"python": "net:nothing"}, "expected a function nothing in"),
    ],
)
def test_data_that_does_not_fit_is_said_shortly(home: Path, data: dict[str, Any], said: str) -> None:
    text = refusal(made(home, data=data))
    assert said in text
    assert "Fix: " in text


def test_two_possible_inputs_are_not_guessed(home: Path) -> None:
    np.savez(home / "two.npz", a=np.zeros(4), b=np.zeros(4), label=np.zeros(4))
    assert "none named, and columns a, b, label" in refusal(made(home, data={"arrays": "two.npz"}))


def test_labels_that_do_not_fit_the_head(home: Path) -> None:
    with pytest.raises(DataError, match="2 classes"):
        build_task(made(home, model={"python": "net:build", "classes": 2}))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"transformers": "gone"}, "expected a local model folder with a config.json"),
        ({"transformers": VIT}, "add auto_class"),
        ({"transformers": VIT, "auto_class": "AutoModelForImages"}, "expected a class of the installed transformers"),
        ({"transformers": {"model_type": "vitt"}, "auto_class": "AutoModel"}, "model type 'vitt'"),
        ({"python": "net:build", "device": "cuda:77"}, "device: expected a device of this machine"),
        ({"python": "net:build", "options": {"depth": 3}}, "unexpected keyword argument 'depth'"),
    ],
)
def test_models_that_cannot_be_built(home: Path, model: dict[str, Any], said: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(TaskError) as caught:
        build_task(made(home, model=model))
    assert said in str(caught.value)


def test_code_in_a_model_folder_never_runs(home: Path) -> None:
    folder = text_model(home, model_type="mine", auto_map={"AutoConfig": "code.C", "AutoModel": "code.M"})
    (folder / "code.py").write_text(f"open({str(home / 'marker')!r}, 'w')")
    with pytest.raises(TaskError):
        build_task(made(home, model={"transformers": "text", "auto_class": "AutoModel"}, data=TEXT))
    assert not (home / "marker").exists()


def test_models_of_the_hub_are_no_folders_beside_the_recipe(tmp_path: Path) -> None:
    sections: dict[str, Any] = {"pool": {"path": ["hf://org/model", "mine"]}, "model": {"timm": "x"}}
    sections["data"] = {"images": "x"}
    recipe = make_recipe(sections, tmp_path)
    assert pool_paths(recipe) == ["hf://org/model", str(tmp_path / "mine")]

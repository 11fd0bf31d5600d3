"""The recipes of the paper's own runs, unchanged but for sizes, on tiny files of the same formats."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from paper_files import CLASSES, cifar, clip_weights, imagenet, published_names, published_soups
from PIL import Image
from typer.testing import CliRunner

import stand_in_open_clip
from stand_in_open_clip import TINY
from stockpot.adapters.models import load_model
from stockpot.cli.app import app
from stockpot.cooking import Comparison, compare
from stockpot.pool import Pool
from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_data, build_model, build_pool, build_task, cook_arguments

PAPER = Path(__file__).parents[2] / "experiments" / "paper"
RECIPES = sorted(PAPER.glob("*/recipe.yaml"))
TEN = ["best", "uniform", "greedy", "learned", "hl", "mehl", "learned+", "hl+", "mehl+", "ensemble"]
SIZES = {
    "model.autocast": "none",
    "model.device": "cpu",
    "data.preprocessing.size": 32,
    "data.preprocessing.resize": 32,
    "method.epochs": None,
    "method.steps": 3,
    "method.batch_size": 8,
    "method.block_size": 2,
    "method.each": {"crossfit": {"steps": 3, "folds": 2}},
}


@pytest.fixture(autouse=True)
def _open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_open_clip.install(monkeypatch)


def recipe_of(name: str) -> Path:
    return PAPER / name / "recipe.yaml"


def overrides(base: Path, **more: Any) -> list[str]:
    given = {"base": str(base), **SIZES, **{key.replace("__", "."): value for key, value in more.items()}}
    return [f"{key}={json.dumps(value)}" for key, value in given.items()]


def stockpot(*arguments: object, sets: list[str]) -> Any:
    flags = [word for override in sets for word in ("--set", override)]
    result = CliRunner().invoke(app, [*(str(a) for a in arguments), *flags, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def scores(result: Any) -> dict[str, float]:
    assert result["failed"] == {}
    return {row["method"]: row["score"]["value"] for row in result["methods"]}


def compared(recipe: Path, sets: list[str], *methods: str) -> Comparison:
    """`stockpot compare` without the report."""
    if methods:
        sets = [*sets, f"method.methods={json.dumps(methods)}"]
    loaded = load_recipe(recipe, sets)
    found = compare(build_pool(loaded), build_task(loaded), **cook_arguments(loaded, "compare"))
    assert found.failed == {}
    return found


# Full size, without data --------------------------------------------------------------------------------


def test_there_is_a_recipe_for_every_run_of_the_paper() -> None:
    assert [file.parent.name for file in RECIPES] == [
        "resnet-101-cifar100",
        "vit-b-32-imagenet",
        "vit-l-14-cifar10",
        "vit-l-14-cifar100",
        "vit-l-14-imagenet",
    ]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_a_recipe_is_the_papers_setting(file: Path) -> None:
    recipe = load_recipe(file)
    assert recipe.folder == PAPER.parent.resolve()
    assert set(TEN) <= set(recipe.method.compared)
    large = "vit-l-14" in str(file)
    for name in ("hl", "hl+", "mehl", "mehl+"):
        s = recipe.method.settings(name)
        assert (s.lr, s.weight_decay, s.batch_size) == (0.01, 0.1, 128)
        assert (s.passes, s.folds, s.accumulate) == (1, 1, 8 if large else 1)
        assert (s.steps, s.epochs) == ((1000, None) if "imagenet" in str(file) else (None, 5))
        blocks = 18 if "b-32" in str(file) else 8
        assert s.block_size == (blocks if name.startswith("mehl") else None)
    for name in ("learned", "learned+"):
        assert (recipe.method.settings(name).lr, recipe.method.settings(name).weight_decay) == (0.05, 0.0)
    assert recipe.data.preprocessing.size == (224, 224)
    assert recipe.model.autocast == "bfloat16"
    if recipe.finetune is not None:
        assert recipe.finetune.trials == (8 if file.parent.name == "vit-l-14-imagenet" else 32)
        given = recipe.finetune.model_dump()
        assert given["lr"] == (1e-6, 3e-6, 5e-6, 1e-5, 2e-5, 3e-5)
        assert given["weight_decay"] == (0, 0.001, 0.003, 0.005, 0.01, 0.03)
        assert (given["epochs"], given["batch_size"]) == ((10,), 128)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.parent.name)
def test_the_variants_of_the_readme_are_settings_of_every_recipe(file: Path) -> None:
    lines = [line.partition("#")[0] for line in (PAPER / "README.md").read_text().splitlines()]
    variants = [shlex.split(line) for line in lines if line.startswith("    --set ")]
    assert len(variants) == 3
    for words in variants:
        load_recipe(file, words[1::2])


def test_the_tower_has_exactly_the_published_tensors() -> None:
    with torch.device("meta"):
        model = load_model("open_clip", "ViT-B-32-quickgelu", folder=Path(), classes=1000).model
    assert set(model.state_dict()) == set(published_names(12))
    assert len(published_names(12)) == 160


# ViT-B/32 on ImageNet ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def soups(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    base = tmp_path_factory.mktemp("vit-b-32")
    published_soups(base / "data" / "model-soups", 12)
    return base, imagenet(base / "data" / "imagenet")


TOWER: dict[str, Any] = {"model__options": TINY, "model__classes": len(CLASSES)}


def test_the_published_soups_are_compared(soups: tuple[Path, list[str]]) -> None:
    base, _ = soups
    recipe, sets = recipe_of("vit-b-32-imagenet"), overrides(base, **TOWER)
    result = stockpot("compare", recipe, sets=sets)
    assert set(scores(result)) == {*TEN, "crossfit"}
    pool = json.loads((base / "runs/paper/vit-b-32-imagenet/pool.json").read_text())
    # In order of number, model_2 before model_10.
    assert [entry["name"] for entry in pool["ingredients"]] == [f"model_{k}" for k in range(12)]
    assert pool["duplicates"] == [[4, 5]]
    assert pool["dtypes"] == {"float32": len(published_names(2))}
    assert set(pool["frozen"]) == {n for n in published_names(2) if "visual" not in n and "head" not in n}
    soup = Pool.open(result["soup"], base / "data/model-soups/model_0.pt")  # the soup is one of them
    assert set(soup.specs) == set(published_names(2))


def test_inspect_holds_the_published_soups_against_the_tower(soups: tuple[Path, list[str]]) -> None:
    base, _ = soups
    recipe = recipe_of("vit-b-32-imagenet")
    found = stockpot("inspect", recipe, sets=overrides(base, **TOWER))
    assert (found["model"]["fits"], found["problems"]) == (True, [])
    assert found["duplicates"] == [["model_4", "model_5"]]
    tower = {**TINY, "vision_cfg": {**TINY["vision_cfg"], "layers": 3}}
    deeper = overrides(base, **{**TOWER, "model__options": tower})
    flags = [word for override in deeper for word in ("--set", override)]
    result = CliRunner().invoke(app, ["inspect", str(recipe), *flags, "--json"])
    assert result.exit_code == 1
    more = json.loads(result.stdout)["model"]["not_in_pool"]
    assert set(more) == {name for name in published_names(3) if ".resblocks.2." in name}


def test_the_held_out_images_are_those_of_the_published_list(soups: tuple[Path, list[str]]) -> None:
    base, held = soups
    task = build_task(load_recipe(recipe_of("vit-b-32-imagenet"), overrides(base, **TOWER)))
    assert len(task.fit) == len(held) == 9
    images, labels = task.fit.batch(torch.arange(9))
    assert labels.tolist() == [CLASSES.index(name.partition("/")[0]) for name in held]
    for image, name in zip(images, held, strict=True):
        np.testing.assert_array_equal(image.numpy(), by_hand(base / "data/imagenet/train" / name))


def by_hand(file: Path) -> Any:
    """CLIP's preprocessing, step by step: colour, shorter side, centre."""
    image = Image.open(file).convert("RGB")
    width, height = image.size
    if width < height:
        image = image.resize((32, int(32 * height / width)), Image.Resampling.BICUBIC)
    else:
        image = image.resize((int(32 * width / height), 32), Image.Resampling.BICUBIC)
    left, top = round((image.size[0] - 32) / 2), round((image.size[1] - 32) / 2)
    return np.moveaxis(np.asarray(image.crop((left, top, left + 32, top + 32))), 2, 0)


# Fine-tuned here -----------------------------------------------------------------------------------------

TRIALS: dict[str, Any] = {
    "finetune__trials": 3,
    "finetune__epochs": 1,
    "finetune__probe_epochs": 1,
    "finetune__batch_size": 16,
    "method__accumulate": 2,
}


@pytest.mark.parametrize("classes", [10, 100])
def test_vit_l_14_is_fine_tuned_on_cifar_and_compared(classes: int, tmp_path: Path) -> None:
    cifar(tmp_path / "data" / ("cifar-10-batches-py" if classes == 10 else "cifar-100-python"), classes, 200, 100)
    start = clip_weights(tmp_path / "data/clip/ViT-L-14.pt")
    options = {"model__options": {**TINY, "text": False}}
    recipe, sets = recipe_of(f"vit-l-14-cifar{classes}"), overrides(tmp_path, **options, **TRIALS)
    stockpot("finetune", recipe, sets=sets)
    pool = Pool.open(tmp_path / f"runs/paper/vit-l-14-cifar{classes}/pool")
    assert len(pool) == 3
    assert set(pool.specs) == {n for n in published_names(2) if "visual" in n or "head" in n}
    # lr is at most 3e-5: the weights are still those of the file.
    moved = pool.tensor(0, "model.visual.proj") - start["visual.proj"].float()
    assert 0 < float(moved.abs().max()) < 1e-2
    assert set(compared(recipe, sets)) == {*TEN, "crossfit"}


def test_vit_l_14_is_fine_tuned_on_what_the_held_out_images_leave(tmp_path: Path) -> None:
    held = imagenet(tmp_path / "data" / "imagenet")
    clip_weights(tmp_path / "data/clip/ViT-L-14.pt")
    options = {"model__options": {**TINY, "text": False}, "model__classes": 3}
    recipe, sets = recipe_of("vit-l-14-imagenet"), overrides(tmp_path, **options, **TRIALS)
    loaded = load_recipe(recipe, sets)
    images, _ = build_data(loaded, build_model(loaded), ("train",))["train"]
    assert len(images) == 24 - len(held)
    stockpot("finetune", recipe, sets=sets)
    files = sorted(file.name.partition("-")[0] for file in (tmp_path / "data/decoded").iterdir())
    assert files == ["fit", "train"]  # the report images were not even read
    assert set(compared(recipe, sets, "best", "mehl+")) == {"best", "mehl+"}


NETWORK = """
from torch import nn

def model(classes):
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                         nn.Flatten(), nn.Linear(4, classes))
"""


def test_the_resnet_recipe_with_another_network_in_its_place(tmp_path: Path) -> None:
    """torchvision has no build for this machine; everything else of the recipe is as it stands."""
    (tmp_path / "stand_in_network.py").write_text(NETWORK)
    cifar(tmp_path / "data" / "cifar-100-python", 100, 200, 100)
    other = {"model__torchvision": None, "model__weights": None, "model__python": "stand_in_network:model"}
    recipe, sets = recipe_of("resnet-101-cifar100"), overrides(tmp_path, **other, **TRIALS)
    stockpot("finetune", recipe, sets=sets)
    found = compared(recipe, sets, "best", "greedy", "mehl+", "crossfit")
    assert found.soup is not None
    soup = Pool.open(found.soup, tmp_path / "runs/paper/resnet-101-cifar100/pool/trial_000.safetensors")
    assert "1.running_mean" in soup.specs

"""Models from each library; those that cannot be installed everywhere are checked up to their door."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stand_in_open_clip
from stockpot.adapters.code import EXTRAS, call_code, load_code, need
from stockpot.adapters.huggingface import _word_for_dtype, class_names, pool_class_names, processor_image
from stockpot.adapters.models import ImageInput, load_model, load_weights, timm_image, torchvision_image
from stockpot.errors import TaskError


def refusal(call: Any, *args: Any, **options: Any) -> str:
    with pytest.raises(TaskError) as caught:
        call(*args, **options)
    return str(caught.value)


# Extras -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "extra"), EXTRAS.items())
def test_a_missing_library_names_its_extra(monkeypatch: pytest.MonkeyPatch, library: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # makes every import of it fail
    text = refusal(need, library)
    assert f"library {library}: expected an installed one" in text
    assert f"pip install 'stockpot[{extra}]'" in text


@pytest.mark.parametrize("kind", ["timm", "torchvision", "open_clip", "transformers"])
def test_a_recipe_with_a_missing_library_says_so(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.delitem(sys.modules, f"{kind}.models", raising=False)
    source = {"model_type": "bert"} if kind == "transformers" else "some_model"
    assert "pip install 'stockpot[" in refusal(load_model, kind, source, folder=Path(), classes=3)


def test_a_library_that_is_there_but_broken_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "timm.py").write_text("import a_library_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    assert "one that does not load (No module named 'a_library_that_is_not_there')" in refusal(need, "timm")


def test_every_extra_is_one_of_the_package() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for extra in set(EXTRAS.values()):
        assert f"\n{extra} = [" in project


# What libraries say about their input -------------------------------------------------------------------


def test_timm_data_configurations() -> None:
    config = {"input_size": (3, 224, 224), "crop_pct": 0.875, "crop_mode": "center", "interpolation": "bicubic"}
    config |= {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    assert timm_image(config) == ImageInput((224, 224), 256, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0), "bicubic", 3)
    assert timm_image({**config, "crop_mode": "squash"}).resize is None


def test_torchvision_presets() -> None:
    preset = SimpleNamespace(
        crop_size=[224],
        resize_size=[232],
        mean=[0.1] * 3,
        std=[0.2] * 3,
        interpolation=SimpleNamespace(value="bilinear"),
    )
    assert torchvision_image(preset) == ImageInput((224, 224), 232, (0.1,) * 3, (0.2,) * 3, "bilinear", 3)
    assert torchvision_image(None) == ImageInput(channels=3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            {"size": {"height": 8, "width": 6}, "image_mean": [0.5], "image_std": [0.25], "resample": 3},
            ImageInput((8, 6), None, (0.5,), (0.25,), "bicubic", 3),
        ),
        (
            {"size": {"shortest_edge": 9}, "do_center_crop": True, "crop_size": {"height": 8, "width": 8}},
            ImageInput((8, 8), 9, (0.0,), (1.0,), "bilinear", 3),
        ),
        ({"size": 9, "do_center_crop": True, "crop_size": 8}, ImageInput((8, 8), 9, channels=3)),
        ({"size": {"shortest_edge": 224}, "crop_pct": 0.875}, ImageInput((224, 224), 256, channels=3)),
        ({"size": {"shortest_edge": 384}, "crop_pct": 1.0}, ImageInput((384, 384), None, channels=3)),
        ({"do_resize": False, "do_normalize": False, "image_mean": [0.5]}, ImageInput(channels=3)),
        (
            {"size": 4, "rescale_factor": 2 / 255, "image_mean": [1.0], "image_std": [1.0]},
            ImageInput((4, 4), None, (0.5,), (0.5,), "bilinear", 3),
        ),
    ],
)
def test_image_processor_configurations(content: dict[str, Any], expected: ImageInput) -> None:
    assert processor_image(content, 3) == expected


def test_a_recipe_overrides_parts_of_the_input() -> None:
    own = ImageInput((224, 224), 256, (0.1,), (0.2,), "bicubic", 3)
    assert own.override({"mean": (0.5,), "size": None}) == ImageInput((224, 224), 256, (0.5,), (0.2,), "bicubic", 3)
    # Another size must not keep the resize that belonged to the old one.
    assert own.override({"size": (32, 32)}) == ImageInput((32, 32), None, (0.1,), (0.2,), "bicubic", 3)


@pytest.mark.parametrize(
    ("id2label", "expected"),
    [
        ({0: "neg", 1: "pos"}, ("neg", "pos")),
        ({"1": "pos", "0": "neg"}, ("neg", "pos")),
        ({0: "LABEL_0", 1: "LABEL_1"}, None),  # the library's own invention
        ({0: "neg", 2: "pos"}, None),
        ({0: "a", 1: "a"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_class_names_of_a_configuration(id2label: Any, expected: Any) -> None:
    assert class_names(id2label) == expected


def test_class_names_of_a_pool_are_those_of_its_checkpoints(tmp_path: Path) -> None:
    for k in range(3):
        (tmp_path / f"m{k}").mkdir()
        save_file({"w": torch.zeros(2)}, tmp_path / f"m{k}" / "model.safetensors")
    assert pool_class_names([tmp_path]) is None
    for k in range(2):
        (tmp_path / f"m{k}" / "config.json").write_text('{"id2label": {"0": "pos", "1": "neg"}}')
    assert pool_class_names([tmp_path]) == ("pos", "neg")
    (tmp_path / "m2" / "config.json").write_text('{"id2label": {"0": "neg", "1": "pos"}}')
    text = refusal(pool_class_names, [tmp_path])
    assert "m2/config.json: expected those of" in text
    assert "m0/config.json: pos, neg, found neg, pos" in text
    (tmp_path / "m2" / "config.json").write_text("[")
    assert "expected a JSON configuration" in refusal(pool_class_names, [tmp_path])


# OpenCLIP -----------------------------------------------------------------------------------------------


def clip(classes: int | None = 4, seed: int = 0, **options: Any) -> nn.Module:
    given = {**stand_in_open_clip.TINY, **options}
    loaded = load_model("open_clip", "ViT-B-32-quickgelu", folder=Path(), classes=classes, options=given, seed=seed)
    assert loaded.image is not None
    assert (loaded.image.size, loaded.image.resize) == ((32, 32), 32)
    return loaded.model


@pytest.fixture
def _open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_open_clip.install(monkeypatch)


@pytest.mark.usefixtures("_open_clip")
def test_an_encoder_keeps_of_its_text_side_what_published_soups_keep() -> None:
    others = {name for name in clip().state_dict() if not name.startswith("model.visual.")}
    text = {"positional_embedding", "text_projection", "logit_scale", "token_embedding.weight"}
    text |= {"ln_final.weight", "ln_final.bias"}
    head = {"classification_head.weight", "classification_head.bias"}
    assert others == {f"model.{name}" for name in text} | head
    assert {n for n in clip(text=False).state_dict() if not n.startswith("model.visual.")} == head


@pytest.mark.usefixtures("_open_clip")
def test_features_have_length_one_before_the_head() -> None:
    model: Any = clip().eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        features = model.model.encode_image(images)
        expected = model.classification_head(features / features.norm(dim=-1, keepdim=True))
        torch.testing.assert_close(model(images), expected)
        plain: Any = clip(normalise=False).eval()
        torch.testing.assert_close(plain(images), plain.classification_head(plain.model.encode_image(images)))


@pytest.mark.usefixtures("_open_clip")
def test_an_encoder_without_a_head_size_or_with_another_name_is_refused() -> None:
    assert "expected model.classes, the size of the linear head" in refusal(clip, None)
    text = refusal(load_model, "open_clip", "ViT-L-15-quickgelu", folder=Path(), classes=2)
    assert "try ViT-L-14-quickgelu" in text
    assert "an unknown one" in refusal(load_model, "open_clip", "hf-hub:a/b", folder=Path(), classes=2)


# Starting weights ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_open_clip")
def test_starting_weights_fill_all_but_a_new_head(tmp_path: Path) -> None:
    old, new = clip(4, seed=4), clip(7, seed=7)
    save_file(dict(old.state_dict()), tmp_path / "whole.safetensors")
    assert load_weights(new, tmp_path / "whole.safetensors") == (
        "classification_head.weight",
        "classification_head.bias",
    )
    for name, value in old.state_dict().items():
        if not name.startswith("classification_head"):
            assert torch.equal(new.state_dict()[name], value)


@pytest.mark.usefixtures("_open_clip")
def test_starting_weights_of_a_bare_encoder_find_their_place(tmp_path: Path) -> None:
    old, new = clip(seed=1), clip(seed=2)
    bare = {k.removeprefix("model."): v for k, v in old.state_dict().items() if k.startswith("model.")}
    save_file(bare, tmp_path / "bare.safetensors")
    load_weights(new, tmp_path / "bare.safetensors")
    assert torch.equal(new.state_dict()["model.visual.proj"], bare["visual.proj"])


def test_starting_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "x.safetensors")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert "expected tensors for all of the model except a new head, found none that fit 0.weight" in refusal(
        load_weights, model, tmp_path / "x.safetensors"
    )


# Code of the user ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _same_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])


def test_code_beside_the_recipe_comes_first(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "json.py").write_text(f"def build(): return {name!r}")
    assert call_code("json:build", tmp_path / "one") == "one"
    assert call_code("json:build", tmp_path / "two") == "two"
    assert load_code("json:dumps", tmp_path) is json.dumps


def test_code_beside_the_recipe_never_stands_in_for_ours(tmp_path: Path) -> None:
    (tmp_path / "stockpot").mkdir()
    (tmp_path / "stockpot" / "errors.py").write_text("def describe(): return 'theirs'")
    assert load_code("stockpot.errors:describe", tmp_path).__module__ == "stockpot.errors"


def test_code_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine_a.py").write_text("def build(): raise KeyError('oops')\ndef other(): return 3")
    (tmp_path / "mine_b.py").write_text("import a_library_that_is_not_there")
    assert "found KeyError: 'oops'" in refusal(call_code, "mine_a:build", tmp_path)
    assert "found functions build, other" in refusal(call_code, "mine_a:biuld", tmp_path)
    assert "No module named 'a_library_that_is_not_there'" in refusal(call_code, "mine_b:build", tmp_path)
    assert "write mine_c.py beside the recipe" in refusal(call_code, "mine_c:build", tmp_path)
    assert "one that returned int" in refusal(load_model, "python", "mine_a:other", folder=tmp_path)


@pytest.mark.parametrize(("version", "word"), [("4.44.2", "torch_dtype"), ("4.56.0", "dtype"), ("5.0.0.dev0", "dtype")])
def test_the_type_of_the_weights_is_called_what_the_librarys_version_calls_it(version: str, word: str) -> None:
    assert _word_for_dtype(SimpleNamespace(__version__=version)) == word

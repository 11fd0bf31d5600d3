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

from stockpot.adapters.code import call_code, load_code
from stockpot.adapters.extras import EXTRAS, need
from stockpot.adapters.inputs import ImageInput
from stockpot.adapters.models import load_model
from stockpot.adapters.models import timm as timm_models
from stockpot.adapters.models import torchvision as torchvision_models
from stockpot.adapters.models.processor import image_input
from stockpot.adapters.models.weights import load_weights
from stockpot.errors import TaskError

SMALL_CLIP = {"size": 32, "patch": 8, "width": 128, "layers": 2, "output": 24, "text_width": 16}


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


def test_a_library_that_is_there_but_broken_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    config = {
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
        "crop_mode": "center",
        "interpolation": "bicubic",
    }
    config |= {"mean": (0.1, 0.2, 0.3), "std": (1.0, 1.0, 1.0)}
    assert timm_models.image_input(config) == ImageInput(
        (224, 224), 256, (0.1, 0.2, 0.3), (1.0, 1.0, 1.0), "bicubic", 3
    )
    assert timm_models.image_input({**config, "crop_mode": "squash"}).resize is None


def test_torchvision_presets() -> None:
    preset = SimpleNamespace(
        crop_size=[224],
        resize_size=[232],
        mean=[0.1] * 3,
        std=[0.2] * 3,
        interpolation=SimpleNamespace(value="bilinear"),
    )
    assert torchvision_models.image_input(preset) == ImageInput(
        (224, 224), 232, (0.1,) * 3, (0.2,) * 3, "bilinear", 3
    )
    assert torchvision_models.image_input(None) == ImageInput(channels=3)


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
    assert image_input(content, 3) == expected


def test_a_recipe_overrides_parts_of_the_input() -> None:
    own = ImageInput((224, 224), 256, (0.1,), (0.2,), "bicubic", 3)
    assert own.override({"mean": (0.5,), "size": None}) == ImageInput(
        (224, 224), 256, (0.5,), (0.2,), "bicubic", 3
    )
    # Another size must not keep the resize that belonged to the old one.
    assert own.override({"size": (32, 32)}) == ImageInput((32, 32), None, (0.1,), (0.2,), "bicubic", 3)


# CLIP ---------------------------------------------------------------------------------------------------


def test_clip_has_the_tensor_names_of_the_published_soups() -> None:
    with torch.device("meta"):
        model = load_model("clip", "ViT-B/32", folder=Path(), classes=1000).model
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert len([n for n in shapes if n.startswith("model.visual.")]) == 8 + 12 * 12
    expected = {
        "model.positional_embedding": (77, 512),
        "model.text_projection": (512, 512),
        "model.logit_scale": (),
        "model.token_embedding.weight": (49408, 512),
        "model.ln_final.weight": (512,),
        "model.visual.class_embedding": (768,),
        "model.visual.positional_embedding": (50, 768),
        "model.visual.proj": (768, 512),
        "model.visual.conv1.weight": (768, 3, 32, 32),
        "model.visual.ln_pre.bias": (768,),
        "model.visual.transformer.resblocks.11.attn.in_proj_weight": (2304, 768),
        "model.visual.transformer.resblocks.0.attn.out_proj.bias": (768,),
        "model.visual.transformer.resblocks.0.ln_2.weight": (768,),
        "model.visual.transformer.resblocks.0.mlp.c_fc.weight": (3072, 768),
        "model.visual.transformer.resblocks.0.mlp.c_proj.bias": (768,),
        "model.visual.ln_post.weight": (768,),
        "classification_head.weight": (1000, 512),
        "classification_head.bias": (1000,),
    }
    assert expected.items() <= shapes.items()


def test_clip_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    loaded = load_model("clip", "ViT-B-32", folder=Path(), classes=5, options={**SMALL_CLIP, "text": False})
    ours: Any = loaded.model.eval()
    config = transformers.CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=512,
        projection_dim=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        hidden_act="quick_gelu",
    )
    theirs = transformers.CLIPVisionModelWithProjection(config).eval()
    state = {k.removeprefix("model.visual."): v for k, v in ours.state_dict().items() if "visual" in k}
    moved = {
        "vision_model.embeddings.class_embedding": state["class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": state["conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": state["positional_embedding"],
        "visual_projection.weight": state["proj"].T,
    }
    for ours_name, name in (("ln_pre", "pre_layrnorm"), ("ln_post", "post_layernorm")):
        for kind in ("weight", "bias"):
            moved[f"vision_model.{name}.{kind}"] = state[f"{ours_name}.{kind}"]
    for block in range(2):
        old, new = f"transformer.resblocks.{block}", f"vision_model.encoder.layers.{block}"
        for kind in ("weight", "bias"):
            for letter, piece in zip("qkv", state[f"{old}.attn.in_proj_{kind}"].chunk(3), strict=True):
                moved[f"{new}.self_attn.{letter}_proj.{kind}"] = piece
            moved[f"{new}.self_attn.out_proj.{kind}"] = state[f"{old}.attn.out_proj.{kind}"]
            for a, b in (
                ("ln_1", "layer_norm1"),
                ("ln_2", "layer_norm2"),
                ("mlp.c_fc", "mlp.fc1"),
                ("mlp.c_proj", "mlp.fc2"),
            ):
                moved[f"{new}.{b}.{kind}"] = state[f"{old}.{a}.{kind}"]
    missing = theirs.load_state_dict(moved, strict=False).missing_keys
    assert [name for name in missing if "position_ids" not in name] == []
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        features = theirs(pixel_values=images).image_embeds
        expected = ours.classification_head(features / features.norm(dim=-1, keepdim=True))
        torch.testing.assert_close(ours(images), expected, rtol=1e-4, atol=1e-5)


def test_clip_without_a_head_size_or_with_another_name_is_refused() -> None:
    assert "expected model.classes, the size of the linear head" in refusal(
        load_model, "clip", "ViT-B-32", folder=Path()
    )
    assert "use ViT-L-14" in refusal(load_model, "clip", "ViT-L-15", folder=Path(), classes=2)
    assert "found depth" in refusal(
        load_model, "clip", "ViT-B-32", folder=Path(), classes=2, options={"depth": 3}
    )


# Starting weights ---------------------------------------------------------------------------------------


def test_starting_weights_fill_all_but_a_new_head(tmp_path: Path) -> None:
    old, new = (
        load_model("clip", "ViT-B-32", folder=Path(), classes=c, options=SMALL_CLIP, seed=c).model
        for c in (4, 7)
    )
    save_file(dict(old.state_dict()), tmp_path / "whole.safetensors")
    assert load_weights(new, tmp_path / "whole.safetensors") == (
        "classification_head.weight",
        "classification_head.bias",
    )
    for name, value in old.state_dict().items():
        if not name.startswith("classification_head"):
            assert torch.equal(new.state_dict()[name], value)


def test_starting_weights_of_a_bare_encoder_find_their_place(tmp_path: Path) -> None:
    old, new = (
        load_model("clip", "ViT-B-32", folder=Path(), classes=4, options=SMALL_CLIP, seed=s).model
        for s in (1, 2)
    )
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


def test_code_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    (tmp_path / "mine_a.py").write_text("def build(): raise KeyError('oops')\ndef other(): return 3")
    (tmp_path / "mine_b.py").write_text("import a_library_that_is_not_there")
    assert "found KeyError: 'oops'" in refusal(call_code, "mine_a:build", tmp_path)
    assert "found functions build, other" in refusal(call_code, "mine_a:biuld", tmp_path)
    assert "No module named 'a_library_that_is_not_there'" in refusal(call_code, "mine_b:build", tmp_path)
    assert "write mine_c.py beside the recipe" in refusal(call_code, "mine_c:build", tmp_path)
    assert "one that returned int" in refusal(load_model, "python", "mine_a:other", folder=tmp_path)

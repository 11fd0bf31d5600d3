"""A soup of real model folders is one that the library's own loaders and pipelines take, with all that is beside."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from stockpot import Pool, Soup, average

transformers: Any = import_module("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*max_new_tokens.*"),
]
WORDS = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(20))]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def language_models(folder: Path) -> list[Path]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = TEMPLATE
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 32}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, tie_word_embeddings=True)
    for k in range(2):
        torch.manual_seed(k)
        place = folder / f"llm_{k}"
        transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place, max_shard_size="2KB")
        tokenizer.save_pretrained(place)
        transformers.GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=2).save_pretrained(place)
    return [folder / f"llm_{k}" for k in range(2)]


def test_of_language_models_come_tokenizer_chat_template_and_generation_config(tmp_path: Path) -> None:
    folders = language_models(tmp_path)
    soup = tmp_path / "soup"
    average(folders, soup, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(soup)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.apply_chat_template([{"role": "user", "content": "w1"}], tokenize=False) == "user: w1\n"
    model = transformers.AutoModelForCausalLM.from_pretrained(soup)
    assert model.generation_config.max_new_tokens == 3
    assert model.dtype == torch.float32  # as it is stored, though the ingredients' config says bfloat16
    parts = [transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders]
    for name, value in model.state_dict().items():
        assert torch.equal(value, (parts[0][name].float() + parts[1][name].float()) / 2), name
    assert transformers.pipeline("text-generation", model=str(soup))("w1 w2")[0]["generated_text"].startswith("w1 w2")


def test_of_image_classifiers_come_processor_and_label_names(tmp_path: Path) -> None:
    names = {0: "cat", 1: "dog", 2: "hen"}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        **sizes, image_size=8, patch_size=4, id2label=names, label2id={name: n for n, name in names.items()}
    )
    for k in range(2):
        torch.manual_seed(k)
        place = tmp_path / f"vit_{k}"
        transformers.ViTForImageClassification(config).save_pretrained(place)
        transformers.ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.1] * 3).save_pretrained(place)
    soup = Soup.uniform(Pool.open(tmp_path)).save(tmp_path / "soup")
    classify = transformers.pipeline("image-classification", model=str(soup))
    image = import_module("PIL.Image").new("RGB", (20, 20))
    assert {one["label"] for one in classify(image)} == set(names.values())
    assert list(classify.image_processor.image_mean) == [0.1] * 3

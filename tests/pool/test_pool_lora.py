"""Adapter pools: the same numbers as PEFT's own merge, and a text for whatever is not s B A."""

from __future__ import annotations

import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stockpot import Pool, Soup, Task, cook
from stockpot.cli.survey import survey
from stockpot.errors import CheckpointError, MismatchError, PoolError
from stockpot.layout import Layout
from stockpot.pool.lora import sorted_out
from stockpot.soup import rebuild

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def model() -> Any:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        max_position_embeddings=20, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


def adapter(folder: Path, base: Path, seed: int, **settings: Any) -> Path:
    """As PEFT saves it, with random factors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = transformers.BertForSequenceClassification.from_pretrained(base)
        settings = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings}
        made = peft.get_peft_model(plain, peft.LoraConfig(**settings))
        torch.manual_seed(seed)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
        made.save_pretrained(folder)
    return folder


def merged(folder: Path, base: Path) -> dict[str, torch.Tensor]:
    """What PEFT itself makes of base and adapter."""
    plain = transformers.BertForSequenceClassification.from_pretrained(base)
    state: dict[str, torch.Tensor] = peft.PeftModel.from_pretrained(plain, folder).merge_and_unload().state_dict()
    return state


SETTINGS: list[dict[str, Any]] = [
    {},
    {"r": 3, "use_rslora": True, "target_modules": ["query", "dense"]},
    {"rank_pattern": {"layer.0.attention.self.query": 4}, "alpha_pattern": {"value": 32}},
    {"target_modules": ["word_embeddings", "key"]},
    {"bias": "lora_only"},
    {"bias": "all"},
    {"lora_bias": True},
    {"init_lora_weights": "mica"},
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def folders(tmp_path: Path, base: Path) -> list[Path]:
    return [adapter(tmp_path / "adapters" / f"a{i}", base, i, **one) for i, one in enumerate(SETTINGS)]


def change(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def rewrite(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "adapter_model.safetensors")


def test_every_ingredient_is_what_peft_merges(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    pool = Pool.open(tmp_path / "adapters", base=base)
    assert pool.names == tuple(f"a{i}" for i in range(len(SETTINGS)))
    for k, folder in enumerate(folders):
        wanted = merged(folder, base)
        assert wanted.keys() == pool.specs.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(pool.tensor(k, name), value, rtol=1e-6, atol=1e-6, msg=f"{folder.name} {name}")


def test_biases_inside_a_saved_module_have_the_names_of_the_model(tmp_path: Path, base: Path) -> None:
    """PEFT saves them twice, once with the adapter's name in the middle."""
    settings = {"bias": "all", "modules_to_save": ["pooler"]}
    folders = [adapter(tmp_path / f"a{k}", base, k, **settings) for k in range(2)]
    assert any(".modules_to_save.default." in key for key in load_file(folders[0] / "adapter_model.safetensors"))
    pool = Pool.open(folders, base=base)
    wanted = merged(folders[1], base)
    assert pool.specs.keys() <= wanted.keys()
    assert all(torch.allclose(pool.tensor(1, name), wanted[name], atol=1e-6) for name in pool.specs)


def test_the_base_is_found_where_the_adapters_say_and_the_bin_form_reads_the_same(
    tmp_path: Path, base: Path, folders: list[Path]
) -> None:
    digests = Pool.open(tmp_path / "adapters", base=base).digests()
    assert Pool.open(tmp_path / "adapters").digests() == digests
    state = load_file(folders[0] / "adapter_model.safetensors")
    (folders[0] / "adapter_model.safetensors").unlink()
    torch.save(state, folders[0] / "adapter_model.bin")
    assert Pool.open(tmp_path / "adapters").digests() == digests
    change(folders[1], lora_alpha=99)  # another scale is another ingredient
    assert [a == b for a, b in zip(Pool.open(tmp_path / "adapters").digests(), digests, strict=True)].count(False) == 1


def test_a_base_without_the_models_prefix_and_without_its_head(tmp_path: Path, base: Path) -> None:
    bare = tmp_path / "bare"
    transformers.BertForSequenceClassification.from_pretrained(base).bert.save_pretrained(bare)
    made = [adapter(tmp_path / "adapters" / f"a{i}", base, i) for i in range(2)]
    pool = Pool.open(made, base=bare)
    assert set(pool.specs) == set(merged(made[0], base))  # the classifier comes from the adapters
    for name, value in merged(made[1], base).items():
        torch.testing.assert_close(pool.tensor(1, name), value, rtol=1e-6, atol=1e-6)


def test_a_soup_of_adapters_loads_as_a_full_model_and_rebuilds(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    pool = Pool.open(folders, base=base)
    soup = Soup.uniform(pool, Layout.of(pool, "model", facts=pool.facts()))
    soup.save(tmp_path / "soup", form="merged")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "soup").state_dict()
    every = [merged(folder, base) for folder in folders]
    for name, value in loaded.items():
        mean = torch.stack([one[name] for one in every]).mean(dim=0)
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-6)
    rebuild(tmp_path / "soup", tmp_path / "again")
    first, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("soup", "again"))
    assert first == again


@pytest.mark.parametrize(
    ("method", "settings"),
    [("uniform", {}), ("greedy", {}), ("hl+", {}), ("mehl+", {"block_size": 2}), ("learned+", {}), ("crossfit", {})],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adapters_and_merged_checkpoints_give_the_same_weights(
    tmp_path: Path, base: Path, folders: list[Path], method: str, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    if dtype == torch.float64:
        model().double().save_pretrained(base)
    pool = Pool.open(folders, base=base)
    for k, name in enumerate(pool.names):
        state = {tensor: pool.tensor(k, tensor).clone().contiguous() for tensor in pool.specs}
        save_file(state, tmp_path / f"{name}.safetensors")
    dense = Pool.open([tmp_path / f"{name}.safetensors" for name in pool.names])
    # Who learns with whom goes by digests; an adapter's is not that of the checkpoint it makes.
    dense.digests()
    assert dense._scan is not None
    dense._scan = replace(dense._scan, digests=pool.digests())
    torch.manual_seed(1)
    ids, labels = torch.randint(0, 50, (32, 6)), torch.randint(0, 3, (32,))
    found = []
    for one in (pool, dense):
        task = Task(model().to(dtype), {"input_ids": ids, "labels": labels})
        options = {} if method in ("uniform", "greedy") else {"steps": 6, "batch_size": 16, **settings}
        # What is added to all keys alike changes no attention: AdamW would make steps of its gradient's rounding.
        soup = cook(one, task, method, exclude="*.key.bias", **options).soup
        assert soup is not None
        found.append(soup.W)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"use_dora": True}, "DoRA"),
        (
            {"alora_invocation_tokens": [1]},
            r"aLoRA, which acts on some tokens only.\n  Fix: leave it out of the pool\.$",
        ),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["experts.w"]}, "target_parameters"),
        ({"kasa_config": {"beta": 1}}, "KaSA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"trainable_token_indices": [3]}, "trainable tokens"),
        ({"of_the_future": 1}, "does not know: of_the_future"),
        ({"peft_type": "LOHA"}, "found 'LOHA'"),
        ({"r": 7}, r"expected rank 7, as adapter_config.json says, found factors of shapes \[2, 16\]"),
        ({"lora_alpha": "much"}, "a positive number for lora_alpha"),
        ({"rank_pattern": {"(a+)+b": 3}}, "plain names or simple patterns"),
    ],
)
def test_what_is_not_s_b_a_is_refused_by_name(folders: list[Path], fields: dict[str, Any], text: str) -> None:
    change(folders[0], **fields)
    with pytest.raises(CheckpointError, match=text):
        Pool.open(folders)


def test_tensors_that_are_missing_unknown_or_zero(folders: list[Path]) -> None:
    whole = load_file(folders[0] / "adapter_model.safetensors")
    key = next(name for name in whole if name.endswith("lora_B.weight"))
    rewrite(folders[0], {name: value for name, value in whole.items() if name != key})
    with pytest.raises(
        CheckpointError, match="expected lora_A and lora_B of every module, found one of the two missing"
    ):
        Pool.open(folders)
    rewrite(folders[0], {**whole, "base_model.model.x.lora_magnitude_vector": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"found 1 it does not know: base_model.model.x.lora_magnitude_vector"):
        Pool.open(folders)
    rewrite(folders[0], {name: value * 0 for name, value in whole.items() if ".lora_" in name})
    with pytest.raises(CheckpointError, match="B of zeros in every module: nothing was trained"):
        Pool.open(folders)


def test_bases_that_differ_do_not_fit_or_are_not_there(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    change(folders[1], revision="v2")
    with pytest.raises(MismatchError, match=r"one base for all adapters.*found others: .*a1 on .* at 'v2'"):
        Pool.open(folders, base=base)
    change(folders[1], revision=None)
    wide = transformers.BertForSequenceClassification(
        transformers.BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    )
    wide.save_pretrained(tmp_path / "wide")
    with pytest.raises(
        MismatchError, match=r"2 not in the base: .*; \d+ of another shape: .* has \[16, 16\] instead of"
    ):
        Pool.open(folders[:2], base=tmp_path / "wide")
    for folder in folders:
        change(folder, base_model_name_or_path="nobody/nothing")
    with pytest.raises(PoolError, match="'nobody/nothing' neither as a path here nor in the Hugging Face cache"):
        Pool.open(folders)
    for folder in folders:
        change(folder, base_model_name_or_path=None)
    with pytest.raises(PoolError, match=r"none named in adapter_config.json, and none given"):
        Pool.open(folders)


def test_a_tied_embedding_is_refused_where_the_model_generates(base: Path, folders: list[Path]) -> None:
    for folder in folders:
        change(folder, task_type="CAUSAL_LM")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with pytest.raises(MismatchError, match=r"ties to its output layer: .*a3"):
        Pool.open(folders)


def test_adapters_and_full_checkpoints_are_no_pool(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    with pytest.raises(PoolError, match=r"full checkpoints among adapters: .*base"):
        Pool.open(base, folders, base=base)
    with pytest.raises(PoolError, match="base= and no adapter among the sources"):
        Pool.open(base, base=base)
    with pytest.raises(PoolError, match="only one"):
        Pool.open(folders[0])
    with pytest.raises(PoolError, match="expected each checkpoint once, found it more than once"):
        Pool.open(folders[0], folders[0], base=base)
    with pytest.raises(PoolError, match=r"adaptors/\*: expected"):  # and not that there is no adapter for the base
        Pool.open(tmp_path / "adaptors" / "*", base=base)


def test_a_tensor_that_one_adapter_has_beside_the_base_is_its_own_fault(folders: list[Path]) -> None:
    whole = load_file(folders[2] / "adapter_model.safetensors")
    rewrite(folders[2], {**whole, "base_model.model.more.weight": torch.ones(2)})
    with pytest.raises(
        MismatchError, match=r"^\S*a2: .* found 1 neither in the base nor in most adapters: more.weight\.\n.*$"
    ):
        Pool.open(folders)
    usable, refused = sorted_out(folders, None, None)
    assert len(Pool.open(usable)) == len(folders) - 1
    (told,) = refused
    assert "with no tensors beside it, as most are, found " in told
    assert "with more.weight [2] beside it" in told


def test_adapters_without_their_configuration_are_not_mixed_factor_by_factor(base: Path, folders: list[Path]) -> None:
    (folders[0] / "adapter_config.json").unlink()
    for sources in (folders, folders[:1]):
        with pytest.raises(PoolError, match=r"found adapters without adapter_config.json, .*a0\."):
            Pool.open(sources, base=base)
    (folders[1] / "adapter_config.json").unlink()
    states = [load_file(folder / "adapter_model.safetensors") for folder in folders[:2]]
    for given in (folders[:2], [folder / "adapter_model.safetensors" for folder in folders[:2]], states):
        with pytest.raises(MismatchError, match=r"expected full checkpoints, or adapters .* found factors of LoRA"):
            Pool.open(given)


def test_the_same_adapter_under_two_names_is_a_duplicate(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    again = adapter(tmp_path / "again", base, 0)
    assert Pool.open(folders[0], folders[1], again).facts().duplicates == ((0, 2),)


def test_a_thousand_adapters_open_in_ten_seconds_and_are_learned_with(tmp_path: Path, base: Path) -> None:
    one = adapter(tmp_path / "one", base, 0, r=4)
    config = json.loads((one / "adapter_config.json").read_text())
    weights = (one / "adapter_model.safetensors").read_bytes()
    for i in range(1000):
        folder = tmp_path / "many" / f"a{i}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 4 + i % 5}))
        (folder / "adapter_model.safetensors").write_bytes(weights)
    began = time.perf_counter()
    assert len(Pool.open(tmp_path / "many", base=base)) == 1000
    assert time.perf_counter() - began < 10
    pool = Pool.open(tmp_path / "many", base=base)
    assert [len(same) for same in pool.facts().duplicates] == [200] * 5
    soup = Soup.uniform(pool, Layout.of(pool, "model", facts=pool.facts()))
    assert soup.factored is not None
    assert soup.factored.exact_rank == 16  # 4,000 side by side; no matrix of 16 x 16 has more
    means = {name: torch.stack([pool.tensor(k, name) for k in range(5)]).mean(dim=0) for name in pool.specs}
    torch.testing.assert_close(soup.state_dict(), means, rtol=0, atol=1e-5)
    task = Task(model(), {"input_ids": torch.randint(0, 50, (16, 6)), "labels": torch.arange(16) % 3})
    learned = cook(pool, task, "mehl+", block_size=64, steps=1, batch_size=16)
    assert learned.models_used == 1000
    shown = survey(pool)
    assert torch.tensor(shown["cosines"]).shape == (1000, 1000)
    assert shown["ingredients"][999]["adapter"]["cosine"] == pytest.approx(1.0)


def test_an_adapter_of_another_architecture(tmp_path: Path, base: Path, folders: list[Path]) -> None:
    other = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16)
    made = peft.get_peft_model(
        transformers.GPT2Model(other), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    for parameter in made.parameters():
        parameter.data.normal_()
    made.save_pretrained(tmp_path / "other")
    change(tmp_path / "other", base_model_name_or_path=str(base))
    with pytest.raises(
        MismatchError, match=r"other: expected deltas of tensors that .*base has, found 1 not in the base"
    ):
        Pool.open(folders[0], tmp_path / "other", base=base)


def test_factors_that_the_configuration_promises_and_others_that_it_does_not_name(folders: list[Path]) -> None:
    whole = load_file(folders[0] / "adapter_model.safetensors")
    rewrite(folders[0], {name: value for name, value in whole.items() if "layer.1.attention.self.query" not in name})
    with pytest.raises(MismatchError, match="1 missing here: factors of bert"):
        Pool.open(folders)
    change(folders[0], layers_to_transform=[0])  # then it promises nothing for layer 1
    assert len(Pool.open(folders)) == len(folders)
    change(folders[0], layers_to_transform=None)
    rewrite(folders[0], {name: value for name, value in whole.items() if ".query." not in name})  # of no layer
    with pytest.raises(MismatchError, match=r"2 missing here: factors of bert.*layer.0.attention.self.query.weight"):
        Pool.open(folders)
    rewrite(folders[0], whole)
    change(folders[0], target_modules=["query"], layers_to_transform=None)
    expected = r"expected factors of the target_modules in adapter_config.json: query, found those of others: bert"
    with pytest.raises(CheckpointError, match=expected):
        Pool.open(folders)

"""A soup of adapters as an adapter: PEFT loads it, and it is the soup."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stockpot import Pool, Soup, average
from stockpot.errors import MismatchError, SoupError
from stockpot.layout import Layout
from stockpot.soup import rebuild
from stockpot.soup.adapter import Part, reduced

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

SETTINGS: list[dict[str, Any]] = [
    {},
    {"r": 3, "use_rslora": True, "target_modules": ["query", "attention.output.dense"]},
    {"rank_pattern": {"layer.0.attention.self.query": 4}, "alpha_pattern": {"value": 32}},
    {"target_modules": ["word_embeddings", "key"]},
]
WHOLE: list[dict[str, Any]] = [
    {"bias": "lora_only"}, {"bias": "all"}, {"lora_bias": True}, {"modules_to_save": ["pooler"]},
]  # fmt: skip


def build(base: Path | None = None) -> Any:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        max_position_embeddings=20, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    kind = transformers.BertForSequenceClassification
    return (kind(config) if base is None else kind.from_pretrained(base)).eval()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    build().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    return tmp_path / "base"


def adapter(folder: Path, base: Path, seed: int, **settings: Any) -> Path:
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = peft.get_peft_model(build(base), peft.LoraConfig(**settings))
        torch.manual_seed(seed)
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.2)
        made.save_pretrained(folder)
    return folder


def pool_of(tmp_path: Path, base: Path, settings: list[dict[str, Any]]) -> Pool:
    folders = [adapter(tmp_path / "adapters" / f"a{i}", base, i, **one) for i, one in enumerate(settings)]
    return Pool.open(folders, base=base)


def random_soup(pool: Pool, granularity: str = "module", **options: Any) -> Soup:
    layout = Layout.of(pool, granularity, facts=pool.facts())
    torch.manual_seed(7)
    W = torch.rand(len(pool), len(layout), dtype=torch.float64) + torch.eye(len(pool))[:, :1] * -0.3
    return Soup(pool, layout, W / W.sum(dim=0), **options)


IDS = torch.arange(24).reshape(4, 6)


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.eval()(input_ids=IDS).logits
    return found


def through_peft(folder: Path, base: Path) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of keys that are missing or too many
        return logits(peft.PeftModel.from_pretrained(build(base), folder))


def test_an_average_of_adapters_is_one_adapter(tmp_path: Path, base: Path) -> None:
    pool = pool_of(tmp_path, base, SETTINGS)
    for given in ({}, {"base": base}):  # named by the adapters, or by us
        average(tmp_path / "adapters", tmp_path / "soup", weights=[1] * len(pool), overwrite=True, **given)  # type: ignore[arg-type]
        Soup.uniform(pool).save(tmp_path / "wanted", overwrite=True)
        torch.testing.assert_close(through_peft(tmp_path / "soup", base), through_peft(tmp_path / "wanted", base))
    average(tmp_path / "adapters", tmp_path / "small", form=2)
    assert json.loads((tmp_path / "small" / "adapter_config.json").read_text())["r"] == 2


@pytest.mark.parametrize("settings", [SETTINGS, [*SETTINGS, *WHOLE]])
@pytest.mark.parametrize("granularity", ["model", "module"])
def test_an_exact_adapter_has_the_logits_of_the_merged_soup(
    tmp_path: Path, base: Path, settings: list[dict[str, Any]], granularity: str
) -> None:
    soup = random_soup(pool_of(tmp_path, base, settings), granularity)
    soup.save(tmp_path / "adapter", form="adapter")
    soup.save(tmp_path / "merged", form="merged")
    merged = logits(transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged"))
    assert (merged - logits(build(base))).abs().max() > 0.01
    torch.testing.assert_close(through_peft(tmp_path / "adapter", base), merged, rtol=0, atol=1e-5)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == (9 if settings == SETTINGS else 16)
    assert config["bias"] == ("none" if settings == SETTINGS else "all")
    assert config["modules_to_save"] == ["classifier", *(["pooler"] if settings != SETTINGS else []), "score"]
    # The soup itself is the same model: what is scored is what is written.
    model = build(base)
    soup.load_into(model)
    torch.testing.assert_close(logits(model), merged, rtol=0, atol=1e-5)
    # And it is an ingredient like any other.
    again = Pool.open(tmp_path / "adapter", tmp_path / "adapters" / "a0", base=base)
    for name in again.specs:
        torch.testing.assert_close(again.tensor(0, name), model.state_dict()[name], rtol=1e-5, atol=1e-5)


def test_one_adapter_with_weight_one_reproduces_itself_byte_for_byte(tmp_path: Path, base: Path) -> None:
    pool = pool_of(tmp_path, base, SETTINGS)
    layout = Layout.of(pool, "module", facts=pool.facts())
    for k in range(len(pool)):
        W = torch.zeros(len(pool), len(layout), dtype=torch.float64)
        W[k] = 1.0
        made = Soup(pool, layout, W).save(tmp_path / f"soup{k}")
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (made / name).read_bytes() == (tmp_path / "adapters" / f"a{k}" / name).read_bytes()


def test_an_adapter_of_bounded_rank_is_the_nearest_one_and_the_soup_is_what_is_written(
    tmp_path: Path, base: Path
) -> None:
    soup = random_soup(pool_of(tmp_path, base, SETTINGS), form=4)
    exact = random_soup(soup.pool, form="adapter").factored
    assert soup.factored is not None
    assert exact is not None
    soup.save(tmp_path / "low")
    state, config = load_file(tmp_path / "low" / "adapter_model.safetensors"), soup.state_dict()
    assert max(len(value) for name, value in state.items() if ".lora_A" in name) == 4
    for name in soup.factored.names:
        whole, low = exact.part(name).delta().double(), soup.factored.part(name).delta().double()
        lost = torch.linalg.svdvals(whole.flatten(1))[4:].norm() / whole.norm()
        assert float((whole - low).norm() / whole.norm()) == pytest.approx(float(lost), abs=1e-6)
        assert soup.factored.part(name).error == pytest.approx(float(lost), abs=1e-6)
    assert max(soup.factored.errors.values()) > 0.1
    model = build(base)
    model.load_state_dict(config)
    torch.testing.assert_close(through_peft(tmp_path / "low", base), logits(model), rtol=0, atol=1e-5)


def test_an_adapter_is_rebuilt_byte_for_byte_and_brings_its_companions(tmp_path: Path, base: Path) -> None:
    for form in ("adapter", 3, "merged"):
        soup = random_soup(pool_of(tmp_path, base, SETTINGS), form=form)
        soup.save(tmp_path / "soup", overwrite=True)
        assert (tmp_path / "soup" / "config.json").exists() == (form == "merged")
        loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "soup")
        plain = build(base)
        soup.load_into(plain)
        torch.testing.assert_close(logits(loaded), logits(plain), rtol=0, atol=1e-5)
        assert (tmp_path / "soup" / "tokenizer_config.json").exists()
        card = (tmp_path / "soup" / "README.md").read_text()
        assert ('library_name: "peft"' in card) == (form != "merged")
        rebuild(tmp_path / "soup", tmp_path / "again", overwrite=True)
        names = sorted(file.name for file in (tmp_path / "soup").iterdir())
        assert names == sorted(file.name for file in (tmp_path / "again").iterdir())
        for name in names:
            assert (tmp_path / "soup" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_auto_is_an_adapter_where_servers_take_its_rank(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_of(tmp_path, base, SETTINGS)
    assert Soup.uniform(pool).written_as == "adapter"
    monkeypatch.setattr("stockpot.soup.adapter.RANKS", (4, 8))
    assert Soup.uniform(pool).written_as == "merged"  # rank 9
    assert Soup.uniform(pool.subset([0, 1])).written_as == "adapter"  # rank 5
    dense = tmp_path / "dense.safetensors"
    Soup.uniform(pool).save(tmp_path / "merged", form="merged")
    (tmp_path / "merged" / "model.safetensors").rename(dense)
    (tmp_path / "other.safetensors").write_bytes(dense.read_bytes())
    full = Pool.open(dense, tmp_path / "other.safetensors")
    assert Soup.uniform(full).written_as == "merged"
    with pytest.raises(SoupError, match="expected a pool of LoRA adapters, found a pool of full checkpoints"):
        Soup.uniform(full).save(tmp_path / "wrong", form="adapter")
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("form", ["lora", 0, -1, True, 2.5, None, [1]])
def test_other_forms_are_refused(tmp_path: Path, base: Path, form: Any) -> None:
    pool = pool_of(tmp_path, base, SETTINGS[:2])
    with pytest.raises(SoupError, match="expected auto, merged, adapter, or a rank such as 64"):
        Soup(pool, Layout.of(pool, "model"), torch.full((2, 1), 0.5, dtype=torch.float64), form=form)


class Nested(torch.nn.Module):
    """Names that suffixes and unescaped dots confuse: fc, x.fc, xafc; and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(6, 6)
        self.xafc = torch.nn.Linear(6, 6)
        self.x = torch.nn.ModuleDict({"fc": torch.nn.Linear(6, 6), "afc": torch.nn.Linear(6, 6)})
        self.conv = torch.nn.Conv2d(1, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.x["afc"](self.x["fc"](self.xafc(self.fc(x))))
        out: torch.Tensor = self.conv(y.view(-1, 1, 6, 1)).flatten(1)
        return out


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_differ_among_modules_reach_these_modules_and_no_others(tmp_path: Path) -> None:
    torch.save(Nested().state_dict(), tmp_path / "base.pt")
    folders = []
    targets: list[dict[str, Any]] = [
        {"target_modules": ["fc", "x.fc", "conv"], "rank_pattern": {"^x.fc": 5, "^fc": 1}},
        {"target_modules": r"xafc|x\.afc|x\.fc", "r": 3},
    ]
    for i, settings in enumerate(targets):
        made = peft.get_peft_model(Nested(), peft.LoraConfig(**{"r": 2, "lora_alpha": 4, **settings}))
        for parameter in made.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(i))
        made.save_pretrained(tmp_path / f"a{i}")
        folders.append(tmp_path / f"a{i}")
    pool = Pool.open(folders, base=tmp_path / "base.pt")
    soup = random_soup(pool, form="adapter")
    soup.save(tmp_path / "soup")
    config = json.loads((tmp_path / "soup" / "adapter_config.json").read_text())
    assert config["rank_pattern"][r"^xafc"] == 3
    assert (
        r"^x\.fc" not in config["rank_pattern"]
    )  # 5 + 3, but no matrix of 6 x 6 has more than 6, which is the largest
    assert config["r"] == 6
    loaded = peft.PeftModel.from_pretrained(Nested(), tmp_path / "soup")
    plain = Nested()
    soup.load_into(plain)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(x), plain(x), rtol=0, atol=1e-5)
        assert (plain(x) - Nested()(x)).abs().max() > 0.01


@pytest.mark.parametrize("form", ["adapter", 2, "merged"])
def test_factors_that_are_not_finite_are_never_written(tmp_path: Path, base: Path, form: Any) -> None:
    pool = pool_of(tmp_path, base, SETTINGS[:2])
    file = tmp_path / "adapters" / "a1" / "adapter_model.safetensors"
    state = load_file(file)
    key = next(name for name in state if ".lora_A" in name)
    save_file({**state, key: state[key] * float("inf")}, file)
    pool = Pool.open(tmp_path / "adapters", base=base)
    with pytest.raises(SoupError, match="expected finite values, found NaN or infinity"):
        Soup.uniform(pool).save(tmp_path / "soup", form=form)
    assert not (tmp_path / "soup").exists()


def test_the_card_of_an_adapter_names_the_base_that_the_adapters_name(tmp_path: Path, base: Path) -> None:
    folder = pool_of(tmp_path, base, SETTINGS[:2]).checkpoints[0].path.parent
    for file in folder.glob("*/adapter_config.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": "someone/base"}))
    Soup.uniform(Pool.open(folder, base=base)).save(tmp_path / "soup")
    card = (tmp_path / "soup" / "README.md").read_text()
    assert 'base_model:\n- "someone/base"\nbase_model_relation: "adapter"\nlibrary_name: "peft"' in card
    assert (
        json.loads((tmp_path / "soup" / "adapter_config.json").read_text())["base_model_name_or_path"] == "someone/base"
    )


def test_the_reduction_is_the_best_of_its_rank() -> None:
    torch.manual_seed(0)
    A, B = torch.randn(12, 7), torch.randn(9, 12)
    for rank in (1, 5, 7):
        part = reduced(Part(A, B, False), rank)
        values = torch.linalg.svdvals((B @ A).double())
        found = (B @ A).double() - part.delta().double()
        assert float(found.norm()) == pytest.approx(float(values[rank:].norm()), abs=1e-4)
        assert part.error == pytest.approx(float(values[rank:].norm() / values.norm()), abs=1e-6)


def test_beside_peft_on_the_same_pool_and_weights(tmp_path: Path, base: Path) -> None:
    """add_weighted_adapter: `cat` is the soup; `linear` mixes A and B apart, `svd` cuts to a rank."""
    pool = pool_of(tmp_path, base, [{"task_type": None, "lora_alpha": alpha} for alpha in (4, 4, 4, 8)])
    weights = [0.4, 0.3, 0.2, 0.1]
    layout = Layout.of(pool, "model", facts=pool.facts())
    soup = Soup(pool, layout, torch.tensor(weights, dtype=torch.float64)[:, None], form="adapter")
    low = Soup(soup.pool, soup.layout, soup.W, form=2)
    assert soup.factored is not None
    assert low.factored is not None
    names = [f"a{i}" for i in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(build(base), tmp_path / "adapters" / "a0", adapter_name="a0")
        for name in names[1:]:
            model.load_adapter(tmp_path / "adapters" / name, name)
        for kind in ("cat", "linear", "svd"):
            options = {"svd_rank": 2} if kind == "svd" else {}
            model.add_weighted_adapter(names, weights, kind, combination_type=kind, **options)
    zero = soup.factored
    lines = dict.fromkeys(("cat", "linear", "svd", "stockpot, exact", "stockpot, rank 2"), 0.0)
    for name in soup.factored.names:
        deltas = [pool.tensor(k, name).double() - zero.base.tensor(name).double() for k in range(4)]
        truth = torch.stack([weight * delta for weight, delta in zip(weights, deltas, strict=True)]).sum(dim=0)
        layer = model.base_model.model.get_submodule(name.removesuffix(".weight"))
        made = {kind: layer.get_delta_weight(kind).detach() for kind in ("cat", "linear", "svd")}
        made |= {
            "stockpot, exact": soup.factored.part(name).delta(),
            "stockpot, rank 2": low.factored.part(name).delta(),
        }
        for kind, delta in made.items():
            lines[kind] = max(lines[kind], float((delta.double() - truth).norm() / truth.norm()))
    sys.stdout.write("".join(f"\n| {kind} | {error:.1e} |" for kind, error in lines.items()) + "\n")  # with -s
    assert lines["cat"] < 1e-5
    assert lines["stockpot, exact"] < 1e-5
    assert lines["linear"] > 0.1
    assert lines["stockpot, rank 2"] <= lines["svd"] + 1e-6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "c_proj", "c_fc"], ["c_fc", "lm_head"]])
def test_weights_that_the_base_keeps_the_other_way_round(tmp_path: Path, targets: list[str]) -> None:
    """GPT-2's Conv1D keeps (in, out), its head (out, in); fan_in_fan_out is one word for both."""
    kind = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=16, tie_word_embeddings=False
    )

    def gpt() -> Any:
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(kind).eval()

    gpt().save_pretrained(tmp_path / "base")
    for i in range(2):
        made = peft.get_peft_model(gpt(), peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets))
        for parameter in made.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, 0, 0.3, generator=torch.Generator().manual_seed(i))
        made.save_pretrained(tmp_path / f"a{i}")
    pool = Pool.open(tmp_path / "a0", tmp_path / "a1", base=tmp_path / "base")
    for k in range(2):
        merged = peft.PeftModel.from_pretrained(gpt(), tmp_path / f"a{k}").merge_and_unload().state_dict()
        for name in pool.specs:
            torch.testing.assert_close(pool.tensor(k, name), merged[name], rtol=1e-6, atol=1e-6)
    soup = random_soup(pool, form="adapter")
    soup.save(tmp_path / "soup")
    config = json.loads((tmp_path / "soup" / "adapter_config.json").read_text())
    assert config["modules_to_save"] is None  # although PEFT saves the output layer beside its delta
    plain = gpt()
    soup.load_into(plain)
    torch.testing.assert_close(
        logits(peft.PeftModel.from_pretrained(gpt(), tmp_path / "soup")), logits(plain), rtol=0, atol=1e-5
    )


@pytest.mark.filterwarnings("ignore")
def test_square_weights_of_unknown_orientation_are_refused(tmp_path: Path) -> None:
    """A linear map (out, in), a Conv1D (in, out), and a square one of which nothing tells which it is."""
    wide = {"a.weight": torch.zeros(4, 6), "b.weight": torch.zeros(6, 4), "c.weight": torch.zeros(6, 6)}
    torch.save(wide, tmp_path / "base.pt")
    state = {}
    for module, (into, out) in {"a": (6, 4), "b": (6, 4), "c": (6, 6)}.items():
        state[f"base_model.model.{module}.lora_A.weight"] = torch.ones(2, into)
        state[f"base_model.model.{module}.lora_B.weight"] = torch.ones(out, 2)
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "base_model_name_or_path": "base.pt"}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(state, tmp_path / name / "adapter_model.safetensors")
    with pytest.raises(MismatchError, match=r"kept as \(in, out\) beside some .* square ones of either: c.weight"):
        Pool.open(tmp_path / "x", tmp_path / "y", base=tmp_path / "base.pt")

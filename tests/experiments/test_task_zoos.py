"""The zoos that tasks.py cooks: data, training, cooking and intervals, in small on a CPU."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_packages import WORDS, contents
from safetensors.torch import load_file
from scripts import EXPERIMENTS, part, script
from studies import tasks
from studies.paired import interval_over_seeds

from stockpot import Task
from stockpot.task import Data

SMALL = {
    "vocabulary": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
FEW = {"crossfit": {"steps": 2, "folds": 2}}


@pytest.fixture(scope="module")
def speeches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted data of made-up reviews and speeches."""
    out = tmp_path_factory.mktemp("data") / "lm-llama"
    reviews = [{"t": f"a film number {n}<br />it was {'very ' * (n % 30)}long"} for n in range(120)]
    texts = {f"{n}.json": json.dumps({"text": f"my fellow citizens {n} " * 60}) for n in range(20)}
    files = {"reviews.json": [*reviews, *reviews[:5]], "*.json": texts}
    convert = script("convert.speeches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "VOCABULARY", 300)
        patch.setattr(convert, "HELD_REVIEWS", 40)
        convert.convert(lambda name: json.dumps(files[name]).encode(), out)
    return out


@pytest.fixture
def lm(speeches: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The zoo's two files, reading that data."""
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "lm-llama"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    train = part("lm-llama/train.py")
    monkeypatch.setattr(sys.modules["model"], "DATA", speeches)
    yield train
    sys.modules.pop("model", None)  # another zoo has one of this name


def test_no_speech_is_in_two_parts_and_nothing_is_lost_between_rows(speeches: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(speeches / "tokenizer.json"))
    seen: list[str] = []
    for name in ("train", "fit", "dev", "test"):
        found = np.load(speeches / "tokens" / f"{name}.npz")
        assert found["x"].dtype == np.uint16
        text = tokenizer.decode(found["x"].reshape(-1).tolist(), skip_special_tokens=False)
        whole = [one for one in text.split("<|end|>")[:-1] if one]
        assert whole == sorted(set(whole), key=whole.index)
        numbers = {one.split()[3] for one in whole}
        assert not numbers & set(seen)
        seen += numbers
        rows = np.flatnonzero((found["x"] == tokenizer.token_to_id("<|end|>")).any(1))
        assert found["text"][0] == 0
        assert (np.diff(found["text"]) >= 0).all()
        assert len(rows) == 0 or found["text"].max() <= len(whole)
    assert len(seen) >= 16  # the last rows of a part may be cut off


def test_from_reviews_to_a_table(lm: Any, speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm, "SMALL", SMALL)
    start, device = speeches / "pretrained.safetensors", torch.device("cpu")
    lm.pretrain(start, epochs=1, size=4, steps=8, small=True, device=device)
    lm.finetune(start, speeches / "pool", trials=3, size=4, small=True, device=device)
    pool = [load_file(path) for path in sorted((speeches / "pool").glob("*.safetensors"))]
    assert len(pool) == 3
    assert not any(torch.equal(pool[0]["lm_head.weight"], other["lm_head.weight"]) for other in pool[1:])
    first = lm.trial(0)
    monkeypatch.setattr(lm, "trial", lambda _: first)
    lm.finetune(start, tmp_path, trials=2, size=4, small=True, device=device)
    for name, value in load_file(tmp_path / "trial_001.safetensors").items():
        torch.testing.assert_close(value, pool[0][name])  # the trial before left nothing behind

    cooking, model = script("tasks"), sys.modules["model"]
    monkeypatch.setattr(cooking, "zoo_of", lambda _: model)
    common = ["--sizes", json.dumps(SMALL), "--runs", str(tmp_path / "runs"), "--commit", "none"]
    for methods in (["best", "uniform"], ["crossfit"]):  # of one seed in two calls
        words = ["cook", "lm-llama", "--seed", "0", "1", "--methods", *methods, "--each", json.dumps(FEW), *common]
        assert cooking.main(words) == 0
    found = tasks.gathered(tmp_path / "runs" / "lm-llama", "lm-llama")
    run = found["runs"]["main"]
    assert list(run["methods"]) == ["best", "uniform", "crossfit"]
    assert run["seeds"] == [0, 1]
    assert run["methods"]["best"]["second"]["units"] <= 40
    own = model.build(**SMALL)
    own.load_state_dict(load_file(start))
    tokens = model.read("held_reviews")
    expected = own(input_ids=tokens, labels=tokens).loss.item()
    assert run["base"]["second"]["value"][0] == pytest.approx(-expected, rel=1e-4)
    text = "\n".join(tasks.section([found]))
    assert f"| before fine-tuning | {-run['base']['report']['value'][0]:.5f} |" in text
    assert "| **crossfit** |" in text
    assert "2 seeds" in text


def test_adapters_of_peft_and_its_averages(
    lm: Any, speeches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm, "SMALL", SMALL)
    monkeypatch.setattr(lm, "RANKS", (1, 2, 4))
    start, device = speeches / "pretrained.safetensors", torch.device("cpu")
    lm.pretrain(start, epochs=1, size=4, steps=8, small=True, device=device)
    lm.adapters(start, speeches / "adapters", trials=5, size=4, small=True, device=device)
    model, cooking = sys.modules["model"], script("tasks")
    pool = model.adapters()
    assert [one.config["r"] for one in pool.adapters.each] == [1, 2, 4, 1, 2]
    ways = {name: tensors for name, tensors, _ in model.others("adapters", device)}
    uniform = {name: sum(pool.tensor(k, name) for k in range(5)) / 5 for name in pool.specs}
    for name, value in ways["PEFT cat"].items():
        torch.testing.assert_close(value, uniform[name])
    base = load_file(start)
    for name in pool.adapters.each[0].factors:
        moved, cut = (torch.linalg.svdvals(of[name] - base[name]) for of in (uniform, ways["PEFT svd"]))
        assert (cut[4:] < 1e-5 * cut[0]).all()  # of the largest rank
        assert moved[4] > 1e-3 * moved[0]

    monkeypatch.setattr(cooking, "zoo_of", lambda _: model)
    words = ["cook", "lm-llama", "--pool", "adapters", "--methods", "uniform", "greedy", "--sizes", json.dumps(SMALL)]
    assert cooking.main([*words, "--runs", str(tmp_path), "--commit", "none"]) == 0
    found = tasks.gathered(tmp_path / "lm-llama-adapters", "lm-llama-adapters")["runs"]["main"]
    scores = {name: method["report"]["value"][0] for name, method in found["methods"].items()}
    assert list(scores) == ["uniform", "greedy", "PEFT cat", "PEFT svd"]
    assert scores["PEFT cat"] == pytest.approx(scores["uniform"], rel=1e-6)
    own = model.build(**SMALL)
    own.load_state_dict(load_file(start))
    tokens = model.read("held_reviews")
    expected = own(input_ids=tokens, labels=tokens).loss.item()
    assert found["base"]["second"]["value"][0] == pytest.approx(-expected, rel=1e-4)


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two files of imdb-lora, with the converted data of made-up reviews."""
    script("fetch")
    convert = script("convert.imdb_tokens")
    monkeypatch.setattr(convert, "SIZES", {"test": 20, "dev": 10, "fit": 20})
    convert.convert(contents("imdb-minilm").__getitem__, tmp_path / "imdb-lora")
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "imdb-lora"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    train = part("imdb-lora/train.py")
    for module in (train, sys.modules["model"]):
        monkeypatch.setattr(module, "DATA", tmp_path / "imdb-lora")
    yield train
    sys.modules.pop("model", None)


def test_from_reviews_to_adapters_of_a_classifier(
    reviews: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cooking, device = sys.modules["model"], script("tasks"), torch.device("cpu")
    parts = {name: model.read(name) for name in ("train", "fit", "dev", "test")}
    assert {name: len(y) for name, (_, y) in parts.items()} == {"train": 30, "fit": 20, "dev": 10, "test": 20}
    for x, y in parts.values():
        assert ((x[:, 1] == WORDS.index("good")) == (y == 1)).all(), "after [CLS], each review says it"
    assert all(1 < model.batch(part)["attention_mask"].sum(1).min() < 128 for part in parts.values())
    reviews.head(tmp_path / "imdb-lora" / "base", size=8, steps=3, device=device)
    before, base = (load_file(tmp_path / "imdb-lora" / of / "model.safetensors") for of in ("model", "base"))
    changed = {name for name in base if not torch.equal(base[name], before[name].float())}
    assert changed == {"classifier.weight", "classifier.bias"}
    monkeypatch.setattr(reviews, "RANKS", (1, 2))
    reviews.adapters(tmp_path / "imdb-lora" / "adapters", trials=3, size=8, device=device)
    assert [one.config["r"] for one in model.pool().adapters.each] == [1, 2, 1]

    monkeypatch.setattr(cooking, "zoo_of", lambda _: model)
    words = ["cook", "imdb-lora", "--runs", str(tmp_path), "--commit", "none", "--each", json.dumps(FEW), "--methods"]
    assert cooking.main([*words, "best", "crossfit"]) == 0
    assert cooking.main([*words, "uniform"]) == 0  # later: PEFT's averages are not made again
    found = tasks.gathered(tmp_path / "imdb-lora", "imdb-lora")["runs"]["main"]
    scores = {name: method["report"]["value"][0] for name, method in found["methods"].items()}
    assert scores.keys() == {"best", "crossfit", "PEFT cat", "PEFT svd", "uniform"}
    assert scores["PEFT cat"] == scores["uniform"]
    own = model.load(tmp_path / "imdb-lora" / "base")
    x, y = parts["test"]
    right = own.eval()(x, attention_mask=model.batch((x, y))["attention_mask"]).logits.argmax(1) == y
    assert found["base"]["report"]["value"][0] == pytest.approx(100 * right.double().mean().item())
    text = "\n".join(tasks.section([{"zoo": "imdb-lora", "runs": {"main": found}}]))
    assert f"| before fine-tuning | {100 * right.double().mean():.2f} | " in text
    assert "| imdb-lora: accuracy in % | test | crossfit minus it | seconds |" in text, "there is no second set"


def test_a_zoo_at_once_goes_by_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = script("tasks_at_once")
    monkeypatch.setattr(whole, "HOME", tmp_path)
    (tmp_path / "data" / "lm-llama" / "pool").mkdir(parents=True)
    (tmp_path / "data" / "lm-llama" / "adapters").mkdir()
    ran: list[str] = []

    def run(_: Any, name: str, __: str, *words: str) -> bool:
        ran.append(name)
        return "--compiled" not in words or "cook" not in words

    monkeypatch.setattr(whole.Steps, "run", run)
    words = ["lm-llama", "--seeds", "0", "1", "--compiled", "--runs", str(tmp_path / "runs")]
    assert whole.main(words) == 0
    assert ran[0] == "pretrain"
    # The two pools are made at once: nothing of one is cooked before it is there.
    for pool, made in (("pool", "finetune"), ("adapters", "adapters")):
        assert ran.index(made) < min(i for i, name in enumerate(ran) if name.startswith(f"lm-llama-{pool}-main"))
    cooked = {f"lm-llama-adapters-main-{n}-{part}" for n in (0, 1) for part in ("first", "then")}
    cooked |= {
        f"lm-llama-pool-main-{n}-{part}{how}" for n in (0, 1) for part in ("first", "then") for how in ("", "-plain")
    }
    assert {*ran} - {"pretrain", "finetune", "adapters"} == cooked, "what fails compiled is tried without"
    for name in ("pool", "adapters"):
        assert ran.index(f"lm-llama-{name}-main-0-first") < ran.index(f"lm-llama-{name}-main-0-then")
    del ran[:]
    whole.main(words)
    assert {*ran} == cooked, "pools that are finished are not made again"


def test_a_step_ends_when_time_is_up(tmp_path: Path) -> None:
    steps = script("tasks_at_once").Steps(0.5, tmp_path)
    (tmp_path / "endless.py").write_text("import time\nprint('began', flush=True)\ntime.sleep(600)")
    assert not steps.run("long", str(tmp_path / "endless.py"))
    assert steps.failed == 1


def test_diamonds_of_the_first_cut_are_in_no_other_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert = script("convert.diamonds")
    monkeypatch.setattr(convert, "HELD", 3)
    monkeypatch.setattr(convert, "SIZES", {"test": 8, "dev": 4, "fit": 4})
    lines = ["carat,cut,color,clarity,depth,table,price,x,y,z"]
    for n in range(50):
        row = f"{60 + n % 7},{55 + n % 6},{300 + n},{4 + n % 9},{5 + n % 8},{n % 10}"
        lines.append(f"{0.2 + n / 50},{('Ideal', 'Fair')[n % 2]},E,SI2,{row}")
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        entry, content = tarfile.TarInfo(convert.MEMBER), "\n".join(lines).encode()
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    convert.convert(lambda _: whole.getvalue(), tmp_path)
    parts = {path.stem: np.load(path) for path in (tmp_path / "tables").iterdir()}
    sizes = {name: len(found["y"]) for name, found in parts.items()}
    assert sizes == {"held_ideal": 3, "ideal": 22, "test": 8, "dev": 4, "fit": 4, "train": 9}
    prices = np.concatenate([np.exp(found["y"]).round() for found in parts.values()])
    assert len(set(prices.tolist())) == 50
    ideal = convert.WORDS["cut"].index("Ideal") + len(convert.NUMBERS)
    assert all((found["x"][:, ideal] == ("ideal" in name)).all() for name, found in parts.items())
    assert all(np.isfinite(found["x"]).all() for found in parts.values())


def test_the_mean_of_samples_is_the_metric() -> None:
    torch.manual_seed(0)
    data = (torch.randn(40, 26), torch.randn(40))
    zoo = part("regression/model.py")
    task = Task(zoo.build(), data, loss=zoo.squared, metric="r2", device="cpu")
    scores = task.score(Data.of(data))
    assert tasks.by_sample(scores).mean() == pytest.approx(scores.value)


def test_an_interval_over_texts_is_a_bootstrap_over_texts() -> None:
    random = np.random.default_rng(0)
    units: Any = np.repeat(np.arange(60), random.integers(1, 12, 60))
    values = (random.standard_normal(60)[units] + random.standard_normal(len(units)))[None]
    mean, low, high = interval_over_seeds(tasks.by_unit(values, units))
    drawn = random.integers(0, 60, (3000, 60))
    sums, counts = np.bincount(units, values[0]), np.bincount(units)
    again = sums[drawn].sum(1) / counts[drawn].sum(1)
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx(np.quantile(again, [0.025, 0.975]), abs=0.06)
    _, alone_low, alone_high = interval_over_seeds(values)
    assert high - low > 1.5 * (alone_high - alone_low), "sequences of one text are not independent"


def test_the_search_is_drawn_by_the_trial_alone(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    regression = _regression(monkeypatch)
    for trial, other in ((lm.trial, lm.trial(1)), (regression.trial, regression.trial(1))):
        assert trial(0) == trial(0)
        assert trial(0) != other


def _regression(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delitem(sys.modules, "model", raising=False)
    monkeypatch.syspath_prepend(str(EXPERIMENTS / "regression"))
    return part("regression/train.py")


def test_regression_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    train = _regression(monkeypatch)
    torch.manual_seed(0)
    x = torch.randn(200, 26)
    y = 7.64 + x[:, 0]
    model = train.Network()
    before = train.squared(model, (x, y)).mean().item()
    train.train(model, (x, y), epochs=20, lr=2e-3, weight_decay=0.01, seed=0, batch=32)
    assert train.squared(model, (x, y)).mean().item() < before / 5

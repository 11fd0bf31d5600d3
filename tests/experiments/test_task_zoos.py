"""The language model's and the regression's zoo: data, training, cooking and intervals, in small on a CPU."""

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
    lm.pretrain(start, epochs=1, batch=4, steps=8, small=True, device=device)
    lm.finetune(start, speeches / "pool", trials=3, batch=4, small=True, device=device)
    pool = [load_file(path) for path in sorted((speeches / "pool").glob("*.safetensors"))]
    assert len(pool) == 3
    assert not any(torch.equal(pool[0]["lm_head.weight"], other["lm_head.weight"]) for other in pool[1:])
    first = lm.trial(0)
    monkeypatch.setattr(lm, "trial", lambda _: first)
    lm.finetune(start, tmp_path, trials=2, batch=4, small=True, device=device)
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
    lm.pretrain(start, epochs=1, batch=4, steps=8, small=True, device=device)
    lm.adapters(start, speeches / "adapters", trials=5, batch=4, small=True, device=device)
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

"""Tasks of tokens on tiny transformers models made on the spot: losses, metrics, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor

from stockpot import Pool, cook
from stockpot.errors import DataError, LearningError, TaskError
from stockpot.task import METRICS, Metric, Scores, Task
from stockpot.task.language import entity_f1, exact_match

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
NAMES = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def causal() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, max_position_embeddings=24, eos_token_id=1, bos_token_id=2, pad_token_id=0, **SIZES
    )
    return transformers.LlamaForCausalLM(config).eval()


def tagger() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32, max_position_embeddings=24, id2label=dict(enumerate(NAMES)), **SIZES
    )
    return transformers.BertForTokenClassification(config).eval()


def translator() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def texts(n: int = 10, T: int = 12, labels: int = 32) -> dict[str, Tensor]:
    """Sequences of unequal length, padded."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 32, (n, T), generator=generator)
    lengths = torch.randint(3, T + 1, (n, 1), generator=generator)
    mask = (torch.arange(T) < lengths).long()
    answers = ids if labels == 32 else torch.randint(0, labels, (n, T), generator=generator)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.where(mask == 1, answers, -100)}


KINDS = {"causal": (causal, 32), "seq2seq": (translator, 32), "tags": (tagger, 5)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [2, 5])
def test_pieces_of_unequal_token_counts_have_the_gradient_of_the_whole(kind: str, pieces: int) -> None:
    build, labels = KINDS[kind]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        model = build().to(dtype)
        task = Task(model, texts(labels=labels), metric="nats_per_token")

        def gradient(parts: int, task: Task = task, model: Any = model) -> Tensor:
            model.zero_grad()
            losses = [task.loss(task.fit.batch(rows)) for rows in torch.arange(10).tensor_split(parts)]
            weight = torch.stack([loss.weight for loss in losses]).sum()
            for loss in losses:
                (loss.total / weight).backward()  # type: ignore[no-untyped-call]
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

        whole = gradient(1)
        assert whole.dtype == dtype
        assert float((gradient(pieces) - whole).abs().max()) <= tolerance * float(whole.abs().max()) + tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_coefficients_do_not_depend_on_the_pieces_of_a_batch(kind: str, tmp_path: Path) -> None:
    build, labels = KINDS[kind]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        for k in range(3):
            model = build().to(dtype)
            generator = torch.Generator().manual_seed(k)
            for parameter in model.parameters():
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
            torch.save(model.state_dict(), folder / f"{k}.pt")
        task = Task(model, texts(labels=labels), metric="nats_per_token")
        options: dict[str, Any] = {"batch_size": 10, "steps": 5, "folds": 1}
        found = [cook(Pool.open(folder), task, "mehl", accumulate=a, **options).soup for a in (1, 2, 5)]
        for soup in found[1:]:
            assert soup is not None
            assert found[0] is not None
            assert float((soup.W - found[0].W).abs().max()) <= tolerance
            assert float((soup.W - 1 / 3).abs().max()) > 1e-4  # something was learned


def test_long_sequences_are_scored_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 sequences of 512 tokens and 128,000 words would be 62 GiB of logits."""
    whole = Task(causal(), texts(), metric="nats_per_token")
    assert whole.batch_size == 256
    monkeypatch.setattr("stockpot.task.task.MOST_OUTPUTS", 3 * 12 * 32 + 1)  # of 12 tokens and 32 words each
    cut = Task(causal(), texts(), metric="nats_per_token")
    assert cut.batch_size == 3
    torch.testing.assert_close(cut.score().table, whole.score().table, rtol=1e-5, atol=1e-5)


def test_the_loss_is_that_of_the_model_itself() -> None:
    for build, labels in KINDS.values():
        model, data = build(), texts(labels=labels)
        task = Task(model, data, metric="nats_per_token", batch_size=3)
        with torch.no_grad():
            own = float(model(**data).loss)
        assert task.score().value == pytest.approx(-own, rel=1e-5)
        assert task.score().loss == pytest.approx(own, rel=1e-5)
        assert task.loss_adds_up


@pytest.mark.parametrize("kind", KINDS)
def test_labels_of_tokens_can_be_smoothed(kind: str) -> None:
    """As fine-tuning does by default: the shifted, masked cross-entropy of PyTorch."""
    build, labels = KINDS[kind]
    model, data = build(), texts(labels=labels)
    task = Task(model, data, metric="nats_per_token")
    with task.evaluating():
        logits, wanted = task.logits(data), data["labels"]
        if kind == "causal":
            logits, wanted = logits[:, :-1], wanted[:, 1:]
        expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), label_smoothing=0.1)
        found = task.loss(data, label_smoothing=0.1).mean
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def test_nats_bits_and_accuracy_of_tokens() -> None:
    model, data = causal(), texts()
    data["bytes"] = torch.arange(5, 15)
    nats = Task(model, data, metric="nats_per_token").score()
    tokens = int((data["labels"][:, 1:] != -100).sum())
    bits = Task(model, data, metric="bits_per_byte").score()
    assert bits.value == pytest.approx(nats.value * tokens / math.log(2) / int(data["bytes"].sum()), rel=1e-9)
    assert Task(model, data, metric="perplexity").score().value == pytest.approx(-math.exp(-nats.value), rel=1e-9)
    with torch.no_grad():
        found = model(data["input_ids"], data["attention_mask"]).logits[:, :-1].argmax(2)
    right = (found == data["labels"][:, 1:]).sum()
    assert Task(model, data, metric="token_accuracy").score().value == pytest.approx(int(right) / tokens, abs=1e-12)
    low, high = nats.interval()
    assert low < nats.value < high
    del data["bytes"]
    with pytest.raises(TaskError, match="expected a dict with the column 'bytes'"):
        Task(model, data, metric="bits_per_byte")


def entities(tags: list[str]) -> set[tuple[int, int, str]]:
    """Seqeval's reading of one sequence, written down anew."""
    found: set[tuple[int, int, str]] = set()
    start: int | None = None
    for place, tag in enumerate([*tags, "O"]):
        before = tags[place - 1] if place else "O"
        if start is not None and (tag == "O" or tag.startswith("B-") or tag[2:] != before[2:]):
            found.add((start, place - 1, before[2:]))
            start = None
        if tag != "O" and start is None:
            start = place
    return found


@pytest.mark.parametrize("seed", range(20))
def test_f1_of_tokens_and_entities(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 5, (12, 9), generator=generator)
    logits = torch.randn(12, 9, 5, generator=generator) + 2 * torch.nn.functional.one_hot(labels, 5)
    labels[torch.rand(12, 9, generator=generator) < 0.2] = -100
    batch, known = {"labels": labels}, labels != -100
    token = METRICS["token_f1"]
    found = Scores(token.of_batch(logits, batch, 12).double(), token).value
    predicted = logits.argmax(2)
    assert found == pytest.approx(reference.f1_score(labels[known], predicted[known], average="macro"), abs=1e-9)
    entity = entity_f1(NAMES)
    scores = Scores(entity.of_batch(logits, batch, 12).double(), entity)
    said, true = (
        [entities([NAMES[tag] for tag in row[kept].tolist()]) for row, kept in zip(tags, known, strict=True)]
        for tags in (predicted, labels)
    )
    hits = sum(len(a & b) for a, b in zip(said, true, strict=True))
    assert scores.value == pytest.approx(2 * hits / (sum(map(len, said)) + sum(map(len, true))), abs=1e-9)


def test_entities_are_named_by_the_model() -> None:
    scores = Task(tagger(), texts(labels=5), metric="entity_f1").score()
    assert 0 <= scores.value <= 1
    with pytest.raises(TaskError, match=r"expected class names O, B-X and I-X"):
        entity_f1(["PER", "O"])


def choices(n: int = 6) -> dict[str, Tensor]:
    data = texts(n)
    options = torch.randint(2, 32, (n, 3, 10), generator=torch.Generator().manual_seed(2))
    labels = options.clone()
    labels[:, :, :4] = -100
    labels[:, 1, 6:] = -100
    return {
        **data, "options": options, "option_labels": labels, "answer": torch.arange(n) % 3,
        "option_lengths": torch.tensor([[6, 2, 6]]).repeat(n, 1),
    }  # fmt: skip


def test_multiple_choice_by_log_likelihood() -> None:
    model, data = causal(), choices()
    for name in ("multiple_choice", "multiple_choice_normalised"):
        right = []
        for i in range(6):
            scores = []
            for o in range(3):
                with torch.no_grad():
                    likely = model(data["options"][i, o][None]).logits[0].log_softmax(1)
                places = [t for t in range(1, 10) if data["option_labels"][i, o, t] != -100]
                total = sum(float(likely[t - 1, data["options"][i, o, t]]) for t in places)
                scores.append(total / int(data["option_lengths"][i, o]) if "normalised" in name else total)
            right.append(max(range(3), key=scores.__getitem__) == int(data["answer"][i]))
        found = Task(model, data, metric=name, batch_size=4).score()
        assert found.table[:, 0].tolist() == [float(each) for each in right]
        assert math.isfinite(found.loss)


def test_exact_match_generates_with_the_live_model() -> None:
    model, data = causal(), texts()
    prompt = data["input_ids"][:, :3]
    made = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[:, 3:]
    # The token that comes third in the first sample's answer now ends every answer.
    model.generation_config.eos_token_id = end = int(made[0, 2])
    answers = torch.full((10, 3), -100)
    expected = []
    for i, row in enumerate(made.tolist()):
        cut = row.index(end) if end in row else None
        answers[i, : min(3, len(row[:cut]))] = torch.tensor(row[:cut][:3])
        expected.append(float(cut is not None and cut > 0))
    answers[1] = -100
    data |= {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "answer_ids": answers}
    found = Task(model, data, metric="exact_match", batch_size=4).score()
    judged = (answers != -100).any(1)
    assert found.table[:, 1].tolist() == judged.double().tolist()
    assert found.table[judged, 0].tolist() == [e for e, j in zip(expected, judged, strict=True) if j]
    assert found.table[0].tolist() == [1.0, 1.0]
    texts_of = exact_match(decode=lambda rows: [" ".join(map(str, row)) for row in rows], max_new_tokens=3)
    assert Task(model, data, metric=texts_of).score().table[0].tolist() == [1.0, 1.0]
    model.generation_config.eos_token_id = None
    with pytest.raises(TaskError, match="found no end token"):
        Task(model, data, metric="exact_match")


def test_exact_match_of_a_sequence_to_sequence_model() -> None:
    model, data = translator(), texts()
    made = model.generate(input_ids=data["input_ids"], attention_mask=data["attention_mask"], max_new_tokens=4)[:, 1:]
    data["labels"] = torch.cat([made, torch.ones(10, 1, dtype=torch.long)], dim=1)
    found = Task(model, data, metric=exact_match(decode=lambda rows: [str(row[:4]) for row in rows], max_new_tokens=4))
    assert found.score().value == 1.0
    data["labels"] = (made + 1) % 30 + 2
    assert Task(model, data, metric="exact_match").score().value == 0.0


def test_an_ensemble_averages_logits_of_tokens_and_says_where_it_cannot() -> None:
    task = Task(causal(), texts(), metric="token_accuracy")
    assert task.ensemble_scores(range(2)).value == pytest.approx(task.score().value)
    task = Task(causal(), texts(), metric="loss")  # weighted by tokens
    assert task.ensemble_scores(range(2)).value == pytest.approx(task.score().value)
    task = Task(causal(), choices(), metric="multiple_choice")
    with pytest.raises(TaskError, match="found multiple_choice calls the model itself"):
        task.ensemble_scores(range(2))


def without(data: dict[str, Tensor], **changed: Tensor) -> dict[str, Tensor]:
    return {**data, **changed}


@pytest.mark.parametrize(
    ("data", "metric", "message"),
    [
        (without(texts(), input_ids=texts()["input_ids"] + 9), "nats_per_token", r"token ids 0 to 31 .*tokenizer"),
        (texts(T=40), "nats_per_token", r"sequences of at most 24 tokens .*are too long"),
        (without(texts(), labels=torch.full((10, 12), -100)), "nats_per_token", r"-100 \(masked\) everywhere"),
        (without(choices(), option_labels=torch.full((6, 3, 10), -100)), "multiple_choice", "found no options"),
        (without(choices(), answer=torch.full((6,), 3)), "multiple_choice", "an answer among the sample's options"),
        (without(choices(), option_labels=choices()["options"]), "multiple_choice", "a prompt before each option"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_the_model(data: dict[str, Tensor], metric: str, message: str) -> None:
    with pytest.raises(DataError, match=f"(?s){message}"):
        Task(causal(), data, metric=metric)


def test_statistics_of_the_wrong_shape_or_without_a_number() -> None:
    model, data = torch.nn.Linear(4, 3), (torch.randn(8, 4), torch.arange(8) % 3)

    def task(statistics: Any, reduce: Any) -> Task:
        return Task(model, data, metric=Metric("mine", statistics, reduce))

    with pytest.raises(TaskError, match=r"expected one score per sample, shape \(8,\), found shape \(3, 8\)"):
        task(lambda outputs, batch: outputs.T, lambda table: float(table.mean()))
    with pytest.raises(TaskError, match=r"found NaN for 8 of 8, from finite outputs"):
        task(lambda outputs, batch: outputs * math.nan, lambda table: float(table.mean()))
    passed_over = task(lambda outputs, batch: outputs * math.nan, lambda table: float(table.nansum()))
    assert passed_over.score().value == 0
    varying = Task(model, data, batch_size=4, metric=Metric("mine", lambda o, b: o[:, : int(b[1][0]) + 1], lambda t: 0))
    with pytest.raises(TaskError, match="as many statistics of every sample, found 1 in one batch and 2 in another"):
        varying.score()


def test_a_sample_without_a_number_is_named(tmp_path: Path) -> None:
    """The first few samples are tried before; this one is seen when the ingredients are scored."""
    for number in range(2):
        torch.save(torch.nn.Linear(4, 3).state_dict(), tmp_path / f"{number}.pt")
    bad = torch.arange(40) == 23
    data = (torch.randn(40, 4), bad.long())
    task = Task(torch.nn.Linear(4, 3), data, metric=lambda o, b: o[:, 0] + torch.where(b[1] == 1, math.nan, 0.0))
    with pytest.raises(
        LearningError, match=r"is NaN for 1 of 40 samples, first for number 23 \(from 0\) in the fitting"
    ):
        cook(Pool.open(tmp_path), task, "best")


def test_what_a_classifier_took_its_first_labels_for_is_said() -> None:
    """Transformers keeps it, so that the right labels fail after wrong ones."""
    given = {"vocab_size": 32, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 3}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**given, intermediate_size=8))
    batch = {key: texts()[key] for key in ("input_ids", "attention_mask")}
    model(**batch, labels=torch.zeros(10, dtype=torch.long))
    several = {**batch, "labels": torch.tensor([[1.0, 1, 0], [0, 0, 1]]).repeat(5, 1)}
    with pytest.raises(TaskError, match=r"problem_type, which is 'single_label_classification', to None"):
        Task(model, several, metric="micro_f1")
    model.config.problem_type = None
    assert 0 <= Task(model, several, metric="micro_f1").score().value <= 1


def test_metrics_that_do_not_fit_the_task() -> None:
    with pytest.raises(TaskError, match=r'for models of tokens use metric="nats_per_token"'):
        Task(causal(), texts())
    with pytest.raises(TaskError, match=r"logits \(n, T, classes\) and whole labels"):
        Task(torch.nn.Linear(4, 3), (torch.randn(8, 4), torch.arange(8) % 3), metric="token_accuracy")
    with pytest.raises(TaskError, match="found NaN for 8 of 8, from finite outputs"):
        Task(torch.nn.Linear(4, 3), (torch.randn(8, 4), torch.arange(8) % 3), metric=lambda o, b: o[:, 0] * math.nan)

"""The callback in the real Trainer of transformers: classifiers, language models, adapters."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from stockpot import Pool, Soup, Task
from stockpot.callbacks.transformers import SoupCallback
from stockpot.errors import RunError, TaskError
from stockpot.events import Event

transformers: Any = import_module("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*"),
]
WORDS = ["[UNK]", "[PAD]", "good", "bad", "the", "a", "film", "play", "very", "so"]
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": len(WORDS),
    "max_position_embeddings": 16,
}


def tokenizer() -> Any:
    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", pad_token="[PAD]")


def reviews(seed: int, n: int) -> list[dict[str, Any]]:
    """Of uneven length: the Trainer's collator pads them."""
    draw, encode = torch.Generator().manual_seed(seed), tokenizer()
    rows = []
    for _ in range(n):
        label = int(torch.randint(2, (), generator=draw))
        others = [
            WORDS[int(k)] for k in torch.randint(4, 10, (int(torch.randint(2, 6, (), generator=draw)),), generator=draw)
        ]
        rows.append({**encode(" ".join([*others, ("bad", "good")[label]])), "labels": label})
    return rows


def classifier() -> Any:
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=2))


def train(folder: Path, callback: SoupCallback, model: nn.Module | None = None, **options: Any) -> Any:
    given = {"train_dataset": reviews(0, 64), "eval_dataset": reviews(1, 48), "processing_class": tokenizer()}
    given |= {name: options.pop(name) for name in (*given, "data_collator") if name in options}
    again = options.pop("resume_from_checkpoint", None)
    arguments = {
        "per_device_train_batch_size": 16,
        "max_steps": 12,
        "save_steps": 3,
        "eval_steps": 6,
        "save_strategy": "steps",
    }
    arguments |= {
        "eval_strategy": "steps",
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    trainer = transformers.Trainer(
        classifier() if model is None else model,
        transformers.TrainingArguments(str(folder / "trainer"), **{**arguments, **options}),
        callbacks=[callback],
        **given,
    )
    trainer.train(resume_from_checkpoint=again)
    return trainer


def collected(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "ingredients").iterdir())


def test_saves_become_a_soup_that_a_pipeline_loads(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out", keep=3, steps=20)
    trainer = train(tmp_path, callback)
    assert callback.failure is None
    assert collected(tmp_path / "out") == ["step-000006", "step-000009", "step-000012"]  # of 3, 6, 9, 12
    assert callback.result is not None
    assert callback.result.held_out is not None
    assert callback.result.held_out.n == 48
    assert callback.result.score.metric.name == "accuracy"

    last = load_file(tmp_path / "out" / "ingredients" / "step-000012" / "model.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in trainer.model.state_dict().items())
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path / "out" / "soup"))
    assert pipeline("a very good film")[0]["label"] == "LABEL_1"


def test_the_model_can_have_the_soups_weights(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out", every=4, method="uniform", load=True)
    trainer = train(tmp_path, callback)
    assert collected(tmp_path / "out") == ["step-000004", "step-000008", "step-000012"]
    assert callback.soup is not None
    saved = Soup.load(callback.soup).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_loss"] > 0


def test_a_language_model_is_judged_in_nats(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": len(WORDS)}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    texts = [[{"input_ids": row["input_ids"]} for row in reviews(seed, 48)] for seed in (0, 1)]
    collator = transformers.DataCollatorForLanguageModeling(tokenizer(), mlm=False)
    callback = SoupCallback(tmp_path / "out", every="epoch", method="greedy")
    train(tmp_path, callback, model, train_dataset=texts[0], eval_dataset=texts[1], data_collator=collator)
    assert callback.failure is None
    assert len(collected(tmp_path / "out")) == 4
    assert callback.result is not None
    assert callback.result.score.metric.name == "nats_per_token"


def test_a_plain_module_is_collected_too(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = classifier()

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    callback = SoupCallback(tmp_path / "out", method="uniform")
    train(tmp_path, callback, Plain())
    assert callback.failure is None
    assert collected(tmp_path / "out") == [f"step-0000{n:02d}.safetensors" for n in (3, 6, 9, 12)]


def test_adapters_are_collected_as_adapters(tmp_path: Path) -> None:
    base = tmp_path / "base"
    classifier().save_pretrained(base)

    def load() -> Any:
        return transformers.BertForSequenceClassification.from_pretrained(base)

    def adapted() -> Any:
        return peft.get_peft_model(load(), peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))

    with pytest.raises(TaskError, match=r"the base of adapters has to be loaded anew: task=lambda model"):
        train(tmp_path, SoupCallback(tmp_path / "out"), adapted())
    with pytest.raises(
        TaskError, match=r"load: expected a model that takes the soup's weights, found one with adapters"
    ):
        train(tmp_path, SoupCallback(tmp_path / "out", load=True), adapted())
    samples: Any = reviews(1, 48)
    data: Any = torch.utils.data.DataLoader(
        samples, batch_size=16, collate_fn=transformers.DataCollatorWithPadding(tokenizer())
    )
    callback = SoupCallback(tmp_path / "out", task=lambda _: Task(load(), data), method="greedy")
    train(tmp_path, callback, adapted())
    assert callback.failure is None
    assert (tmp_path / "out" / "ingredients" / "step-000012" / "adapter_config.json").is_file()
    assert callback.soup is not None
    assert (callback.soup / "adapter_model.safetensors").is_file()
    peft.PeftModel.from_pretrained(load(), callback.soup)


def test_training_that_goes_on_goes_on_collecting_and_a_new_one_is_refused(tmp_path: Path) -> None:
    train(tmp_path, SoupCallback(tmp_path / "out", method=None), max_steps=6)
    train(tmp_path, SoupCallback(tmp_path / "out", method=None), resume_from_checkpoint=True)
    assert collected(tmp_path / "out") == [f"step-0000{n:02d}" for n in (3, 6, 9, 12)]
    with pytest.raises(RunError, match="expected a folder without ingredients of this name, found 4 of them"):
        train(tmp_path, SoupCallback(tmp_path / "out", method=None))


def test_what_lies_after_the_checkpoint_training_goes_on_from_is_collected_anew(tmp_path: Path) -> None:
    """It may be of a course that was given up: another rate from there on."""
    train(tmp_path, SoupCallback(tmp_path / "out", method=None, every=2), max_steps=10, save_steps=4)
    earlier = tmp_path / "trainer" / "checkpoint-4"
    callback = SoupCallback(tmp_path / "out", method=None, every=3)
    train(tmp_path, callback, max_steps=9, resume_from_checkpoint=str(earlier), save_strategy="no")
    assert collected(tmp_path / "out") == [f"step-{step:06d}" for step in (2, 4, 6, 9)]


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("regression", r'(?s)a task from the trainer\'s model and data.*metric="accuracy": expected logits'),
        ("several", "validation data: expected one evaluation set, found eval_a and eval_b"),
    ],
)
def test_evaluation_data_that_says_too_little_does_not_end_the_training(tmp_path: Path, case: str, text: str) -> None:
    numbers = [{**row, "labels": float(row["labels"])} for row in reviews(0, 48)]
    sets: Any = {"a": reviews(1, 32), "b": reviews(2, 32)} if case == "several" else numbers
    given = {"train_dataset": reviews(0, 64) if case == "several" else numbers, "eval_dataset": sets}
    torch.manual_seed(0)
    labels = 2 if case == "several" else 1
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=labels))
    callback = SoupCallback(tmp_path / "out", method="uniform")
    with pytest.warns(UserWarning, match=text):
        trainer = train(tmp_path, callback, model, **given)
    assert trainer.state.global_step == 12
    assert callback.failure is not None
    assert callback.result is None
    assert len(collected(tmp_path / "out")) == 4


def test_an_evaluation_before_training_says_nothing(tmp_path: Path) -> None:
    """Such as one on the test data."""
    callback = SoupCallback(tmp_path / "out", method="uniform")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, save_steps=2, eval_steps=2, eval_strategy="steps", report_to="none", use_cpu=True
    )
    trainer = transformers.Trainer(
        classifier(), arguments, callbacks=[callback], processing_class=tokenizer(),
        train_dataset=reviews(0, 64), eval_dataset=reviews(1, 48),
    )  # fmt: skip
    trainer.evaluate(reviews(2, 20))
    trainer.train()
    assert callback.result is not None
    assert callback.result.held_out is None or callback.result.held_out.n == 48
    assert callback.result.score.n == 48


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no evaluation": ({}, {"eval_strategy": "no"}, "give the Trainer an eval_dataset and eval_strategy='epoch'"),
    "no saves": (
        {},
        {"save_strategy": "no"},
        "expected a Trainer that saves, for every='save', found save_strategy 'no'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_said_before_training(tmp_path: Path, case: str) -> None:
    own, options, text = REFUSED[case]
    with pytest.raises(TaskError, match=text):
        train(tmp_path, SoupCallback(tmp_path / "out", **own), **options)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"fsdp": ["full_shard"], "world_size": 2},
            r"expected whole on every process, found one that is sharded .FSDP.",
        ),
        ({"world_size": 4}, "cooking: expected one process, found 4"),
    ],
)
def test_several_processes_collect_and_do_not_cook(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    """The arguments as a launcher sets them; nothing else of the Trainer is asked."""
    usual = {"fsdp": None, "deepspeed": None, "eval_strategy": "epoch", "save_strategy": "epoch", "world_size": 1}
    arguments, state = SimpleNamespace(**{**usual, **given}), transformers.TrainerState()
    with pytest.raises(TaskError, match=text):
        SoupCallback(tmp_path).on_train_begin(arguments, state, None, model=nn.Linear(1, 1))


def test_what_accelerate_launch_shards_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    arguments = SimpleNamespace(fsdp=None, deepspeed=None, eval_strategy="epoch", save_strategy="epoch", world_size=2)
    with pytest.raises(TaskError, match=r"found one that is sharded .DeepSpeed."):
        SoupCallback(tmp_path).on_train_begin(arguments, transformers.TrainerState(), None, model=nn.Linear(1, 1))


def test_what_a_trainer_leaves_is_a_pool_of_runs(tmp_path: Path) -> None:
    said: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "run":
            said.append(f"{Path(event.data['run']).name}: {event.data['checkpoint']}, {event.data['why']}")

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    both: list[dict[str, Any]] = [{}, {"eval_steps": 3, **best}]
    for n, more in enumerate(both):
        trainer = train(tmp_path / f"{n}", SoupCallback(tmp_path / f"out{n}", method=None), **more)
    named = Path(trainer.state.best_model_checkpoint).name  # the one with the largest loss: not the last
    assert named != "checkpoint-12"
    runs = [tmp_path / "0" / "trainer", tmp_path / "1" / "trainer"]
    assert Pool.open(runs, listen=listen).names == ("0/trainer/checkpoint-12", f"1/trainer/{named}")
    assert said == ["trainer: checkpoint-12, its last", f"trainer: {named}, its best, by trainer_state.json"]
    assert Pool.open(runs[0]).names == ("checkpoint-3", "checkpoint-6", "checkpoint-9", "checkpoint-12")
    trainer.save_model()  # beside the folders: the model that is in the trainer now
    assert [one.path for one in Pool.open(runs).checkpoints] == [runs[0] / "checkpoint-12", runs[1]]
    assert len(Pool.open(runs, all_steps=True)) == 8

"""Language models from a recipe without code: text, prompts with completions, and chats become token ids and labels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from stockpot.cooking import cook
from stockpot.errors import RecipeError, StockpotError
from stockpot.events import Event
from stockpot.recipe import load_recipe, make_recipe
from stockpot.recipe.build import build_pool, build_task, cook_arguments
from words import CHATS, MARKED, PLAIN, TEXTS, tokenizer, write

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "language-models.md"


def checkpoints(home: Path, count: int = 3, **config: Any) -> None:
    """What a Trainer leaves: folders `run/checkpoint-N` with weights, configuration, tokenizer and files of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {
        "vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "max_position_embeddings": 64, **config,
    }  # fmt: skip
    for number in range(1, count + 1):
        torch.manual_seed(number)
        folder = home / "run" / f"checkpoint-{100 * number}"
        build: Any = LlamaForCausalLM
        build(LlamaConfig(**given)).save_pretrained(folder)
        tokenizer(folder)
        (folder / "trainer_state.json").write_text('{"global_step": 100}')
        torch.save({"lr": 1e-3}, folder / "training_args.bin")
        torch.save({"state": {}}, folder / "optimizer.pt")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    checkpoints(tmp_path)
    write(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    write(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    write(tmp_path / "pairs.jsonl", [{"q": text[:9], "a": text[9:]} for text in TEXTS])
    return tmp_path


def task(home: Path, listen: Any = lambda event: None, model: str = "run/checkpoint-100", **data: Any) -> Any:
    content = {"pool": {"path": "run"}, "model": {"transformers": model}, "data": data}
    return build_task(make_recipe(content, home), listen)


def refusal(home: Path, **data: Any) -> str:
    with pytest.raises(StockpotError) as caught:
        task(home, **data)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def learned(home: Path, made: Any, row: int = 0, folder: str = "run/checkpoint-100") -> tuple[str, str]:
    """The text of a sample, and of its labels alone."""
    from transformers import AutoTokenizer

    read: Any = AutoTokenizer
    batch, words = made.fit.batch(torch.tensor([row])), read.from_pretrained(home / folder)
    ids, labels, mask = (batch[name][0] for name in ("input_ids", "labels", "attention_mask"))
    assert bool((labels[mask == 0] == -100).all())
    return words.decode(ids[mask == 1]), words.decode(labels[labels != -100])


RECIPE = """\
pool:
  path: run
model:
  transformers: run/checkpoint-100
  device: cpu
data:
  table: chats.jsonl
  messages: messages
method:
  steps: 2
output:
  dir: soup
"""


def test_a_folder_of_trainer_checkpoints_and_a_file_of_chats_become_a_soup_with_12_lines(home: Path) -> None:
    assert len(RECIPE.splitlines()) == 12
    (home / "soup.yaml").write_text(RECIPE)
    recipe = load_recipe(home / "soup.yaml")
    made = build_task(recipe)
    result = cook(build_pool(recipe), made, **cook_arguments(recipe))
    assert made.metric.name == "nats_per_token"
    assert result.report is not None
    assert result.report.value < 0
    from transformers import AutoModelForCausalLM, AutoTokenizer

    load_model, load_tokenizer = (getattr(one, "from_pretrained") for one in (AutoModelForCausalLM, AutoTokenizer))  # noqa: B009
    folder = next(path for path in (home / "soup").rglob("config.json")).parent
    soup, words = load_model(folder), load_tokenizer(folder)
    assert soup(input_ids=torch.tensor([words("the old cat")["input_ids"]])).logits.shape[2] == 320


def test_of_a_chat_the_assistants_tokens_are_learned(home: Path) -> None:
    whole, answer = learned(home, task(home, table="chats.jsonl", messages="messages", fit=len(CHATS)))
    assert whole == f"<user>what is old?<e><assistant>{TEXTS[0]}<e><user>and then?<e><assistant>old<e>"
    assert answer == f"{TEXTS[0]}<e>old<e>"


def test_a_template_that_marks_the_assistant_says_the_same_as_prefixes_do(home: Path) -> None:
    data: dict[str, Any] = {"table": "chats.jsonl", "messages": "messages", "fit": len(CHATS)}
    plain = task(home, **data)
    tokenizer(home / "run" / "checkpoint-100", MARKED)
    assert torch.equal(task(home, **data).fit.columns["labels"], plain.fit.columns["labels"])


def test_a_template_that_rewrites_the_past_is_refused(home: Path) -> None:
    """Such as one that drops what the assistant thought as soon as there is a next message."""
    forgetful = PLAIN.replace("{{ m.content }}", "{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}")
    tokenizer(home / "run" / "checkpoint-100", forgetful)
    said = refusal(home, table="chats.jsonl", messages="messages")
    assert "message 1 (from 0) changes what comes before it" in said
    assert "{% generation %}" in said


def test_chats_need_a_template_messages_and_an_assistant(home: Path) -> None:
    user = [{"role": "user", "content": "hello there"}]
    write(home / "alone.jsonl", [{"messages": user}] * 4)
    assert "expected tokens to learn, found none in any sample" in refusal(
        home, table="alone.jsonl", messages="messages"
    )
    write(home / "odd.jsonl", [{"messages": [{"text": "a"}]}] * 4)
    said = refusal(home, table="odd.jsonl", messages="messages", fit=4)
    assert "row 0 (from 0)" in said
    assert "expected a list of messages, each with role and content" in said
    tokenizer(home / "run" / "checkpoint-100", None)
    assert "expected a tokenizer with a chat template" in refusal(home, table="chats.jsonl", messages="messages")


def test_chats_without_an_answer_are_left_out_and_counted(home: Path) -> None:
    user = [{"role": "user", "content": "hello there"}]
    write(home / "some.jsonl", [{"messages": chat} for chat in [*CHATS, user, user]])
    heard: list[Event] = []
    made = task(home, heard.append, table="some.jsonl", messages="messages", fit=len(CHATS) + 2)
    assert len(made.fit) == len(CHATS)
    assert [event.data["text"] for event in heard if event.kind == "phase"] == [
        "fit data: 2 without a token to learn, left out"
    ]


def test_of_a_prompt_and_a_completion_the_completion_and_the_end_are_learned(home: Path) -> None:
    made = task(home, table="pairs.jsonl", prompt="q", completion="a", fit=len(TEXTS))
    whole, answer = learned(home, made)
    assert whole == f"{TEXTS[0]}<e>"
    assert answer.endswith(f"{TEXTS[0][9:]}<e>")
    assert len(answer) < len(whole)  # at most the token that joins the two is learned with it


def test_texts_are_learned_whole_and_split_where_the_recipe_says_so(home: Path) -> None:
    made = task(home, table="texts.jsonl", text="text", fit=len(TEXTS))
    assert learned(home, made) == (TEXTS[0], TEXTS[0])
    assert made.metric.name == "nats_per_token"
    write(home / "long.jsonl", [{"text": " ".join(TEXTS)}] * 4)
    made = task(home, table="long.jsonl", text="text", long_texts="split", max_length=16, fit=4)
    assert made.fit.columns["input_ids"].shape[1] == 16
    assert "".join(learned(home, made, row)[0] for row in range(len(made.fit) // 4)) == " ".join(TEXTS)


def test_short_texts_are_joined_and_the_same_tokens_learned(home: Path) -> None:
    long = " ".join(TEXTS[:6])
    write(home / "mixed.jsonl", [{"text": text} for text in [*TEXTS[:7], "", long, *TEXTS[7:]]])
    data: dict[str, Any] = {
        "table": "mixed.jsonl",
        "text": "text",
        "max_length": 16,
        "fit": 1.0,
        "metric": "bits_per_byte",
    }
    heard: list[Event] = []
    split, pack = (task(home, heard.append, long_texts=how, **data) for how in ("split", "pack"))
    one, other = split.fit.columns, pack.fit.columns
    assert other["input_ids"].shape[1] == 16
    assert len(pack.fit) < len(split.fit)
    assert int(one["bytes"].sum()) == int(other["bytes"].sum())
    # A label at the first place is never predicted.
    assert int((one["labels"][:, 1:] != -100).sum()) == int((other["labels"][:, 1:] != -100).sum())
    row = next(row for row in range(len(pack.fit)) if learned(home, pack, row)[0].startswith(TEXTS[0]))
    assert learned(home, pack, row)[0] == f"{TEXTS[0]}<e>{TEXTS[1]}"
    assert "<e>" not in learned(home, pack, row)[1]
    assert pack.score().independent == len(torch.unique(pack.fit.groups))  # pieces of the long text are one unit
    assert f"fit data: {len(TEXTS) + 1} texts joined to" in str([event.data.get("text") for event in heard])
    assert "fit data: 1 without a token to learn, left out" in [event.data.get("text") for event in heard]


def test_long_sequences_are_refused_or_truncated_and_counted(home: Path) -> None:
    write(home / "long.jsonl", [{"text": text} for text in [*TEXTS, " ".join(TEXTS)]])
    data: dict[str, Any] = {"table": "long.jsonl", "text": "text", "fit": len(TEXTS) + 1}
    said = refusal(home, **data)
    assert "expected sequences of at most 64 tokens, found 1 longer ones" in said
    assert f"in row {len(TEXTS)} (from 0)" in said
    heard: list[Event] = []
    made = task(home, heard.append, long_texts="truncate", **data)
    assert made.fit.columns["input_ids"].shape == (len(TEXTS) + 1, 64)
    assert "fit data: 1 sequences longer than 64 tokens, truncated" in [event.data.get("text") for event in heard]
    assert "expected at most 64, the model's context, found 65" in refusal(home, max_length=65, **data)
    chat = [{"role": "user", "content": " ".join(TEXTS)}, {"role": "assistant", "content": "old"}]
    write(home / "late.jsonl", [{"messages": chat}] * 4)
    said = refusal(home, table="late.jsonl", messages="messages", long_texts="truncate")
    assert "or all that is learned came after 64 tokens, where it was truncated" in said


def test_a_tokenizer_of_another_model_is_refused(home: Path) -> None:
    checkpoints(home, 1, vocab_size=280)
    said = refusal(home, table="texts.jsonl", text="text")
    assert "expected tokens below 280, as many as the model has embeddings of" in said


def test_sequence_to_sequence_models_learn_the_completion(home: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    given: Any = {"vocab_size": 320, "d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    given["decoder_start_token_id"] = 0
    build: Any = T5ForConditionalGeneration
    build(T5Config(**given)).save_pretrained(home / "t5")
    tokenizer(home / "t5")
    made = task(home, model="t5", table="pairs.jsonl", prompt="q", completion="a", fit=len(TEXTS))
    assert learned(home, made, folder="t5") == (TEXTS[0][:9], TEXTS[0][9:])
    assert made.score().value < 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"prompt": "q"}, "data.prompt: expected prompt and completion together, or prompt, choices and answer"),
        ({"messages": "m", "long_texts": "split"}, "data.long_texts: expected refuse or truncate"),
        ({"text": "t", "group": "g", "long_texts": "pack"}, "data.long_texts: expected split, not pack, with group"),
        ({"messages": "m", "text": "t"}, "expected at most one of text, messages, prompt"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_read(home: Path, data: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said.replace(".", r"\.")):
        task(home, table="chats.jsonl", **data)


def test_chats_are_for_causal_models(home: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    given: Any = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    build: Any = BertForSequenceClassification
    build(BertConfig(**given, intermediate_size=16)).save_pretrained(home / "bert")
    tokenizer(home / "bert")
    for columns in ({"messages": "messages"}, {"prompt": "q", "completion": "a"}):
        with pytest.raises(StockpotError, match="language model"):
            task(home, model="bert", table="chats.jsonl", **columns)


def test_a_model_may_run_in_bfloat16(home: Path) -> None:
    content = {
        "pool": {"path": "run"}, "model": {"transformers": "run/checkpoint-100", "device": "cpu", "dtype": "bfloat16"},
        "data": {"table": "texts.jsonl", "text": "text"}, "method": {"name": "hl+", "steps": 3}, "output": {"dir": "b"},
    }  # fmt: skip
    found = []
    for dtype in ("bfloat16", "float32"):
        content["model"]["dtype"] = dtype  # type: ignore[index]
        recipe = make_recipe(content, home)
        made = build_task(recipe)
        assert {parameter.dtype for parameter in made.model.parameters()} == {getattr(torch, dtype)}
        found.append(cook(build_pool(recipe), made, "hl+", steps=3))
    narrow, full = found
    assert narrow.soup is not None
    assert full.soup is not None
    assert {tensor.dtype for tensor in narrow.soup.state_dict().values()} == {torch.float32}
    torch.testing.assert_close(narrow.soup.W, full.soup.W, rtol=0, atol=0.02)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"options": {"dtype": "bfloat16"}}, "write model.dtype: bfloat16"),
        ({"options": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "load the quantised base in Python"),
        ({"python": "mine:model", "transformers": None, "dtype": "bfloat16"}, "the python function returns the model"),
    ],
)
def test_types_that_would_be_passed_over_are_refused(home: Path, model: dict[str, Any], said: str) -> None:
    with pytest.raises(StockpotError, match=said):
        build_task(
            make_recipe(
                {
                    "pool": {"path": "run"}, "model": {"transformers": "run/checkpoint-100", **model},
                    "data": {"table": "texts.jsonl", "text": "text"},
                },
                home,
            )
        )  # fmt: skip


def test_the_recipes_of_the_page_are_recipes(home: Path) -> None:
    blocks = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
    assert len(blocks) == 7
    whole, choice, generated, *others = blocks
    assert build_task(make_recipe(whole, home)).metric.name == "nats_per_token"
    question = {"question": "the sky is", "options": [" blue", " green"], "answer": 0}
    write(home / "questions.jsonl", [question] * 8)
    assert task(home, **choice["data"]).metric.name == "multiple_choice"
    write(home / "pairs.jsonl", [{"question": text[:9], "answer": text[9:]} for text in TEXTS])
    assert task(home, **generated["data"]).metric.name == "exact_match"
    for each in others:
        make_recipe({**whole, **each}, home)


def test_the_python_of_the_page_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    (home / "soup.yaml").write_text(RECIPE)
    section = PAGE.read_text().partition("## In Python")[2].partition("\n## ")[0]
    names: dict[str, Any] = {"texts": TEXTS[:9], "other_texts": TEXTS[9:]}
    results = []
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block.replace(", task)", ", task, 'uniform')").replace('.yaml")))', '.yaml")), "uniform")'), names)
        results.append(names["result"].report)
    assert [(one.metric.name, one.n) for one in results] == [("nats_per_token", 9), ("nats_per_token", 9)]

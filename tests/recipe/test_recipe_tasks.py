"""Every other kind of task from a recipe: multiple choice, generated answers, tags, numbers, several labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_recipe_language import checkpoints, learned, refusal, task

from stockpot.errors import RecipeError
from stockpot.events import Event
from words import CHATS, TEXTS, tokenizer, write

transformers = pytest.importorskip("transformers")
WORDS = [text.split() for text in TEXTS]
TAGS = ["O", "B-X", "I-X"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    checkpoints(tmp_path, 1)
    return tmp_path


def encoder(home: Path, kind: str, name: str = "bert", **config: Any) -> str:
    given = {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **config}
    torch.manual_seed(0)
    build = getattr(transformers, f"BertFor{kind}")
    build(transformers.BertConfig(**given, intermediate_size=16)).save_pretrained(home / name)
    tokenizer(home / name)
    return name


# Multiple choice ----------------------------------------------------------------------------------------

OPTIONS = [[" big", " gone"], [" here", " big", " gone"]]
QUESTIONS: list[dict[str, Any]] = [
    {"q": text, "o": OPTIONS[n % 2], "n": n % 2, "t": OPTIONS[n % 2][n % 2].strip(), "l": "AB"[n % 2]}
    for n, text in enumerate(TEXTS)
]


@pytest.mark.parametrize("answer", ["n", "t", "l"])
def test_multiple_choice_reads_numbers_texts_and_letters(home: Path, answer: str) -> None:
    write(home / "q.jsonl", QUESTIONS)
    made = task(home, table="q.jsonl", prompt="q", choices="o", answer=answer, fit=1.0)
    assert made.metric.name == "multiple_choice"
    batch = made.fit.columns
    assert batch["answer"].tolist() == [n % 2 for n in range(len(TEXTS))]
    assert batch["options"].shape[:2] == (len(TEXTS), 3)
    assert bool((batch["option_labels"][0, 2] == -100).all())  # an option that the sample lacks
    assert batch["option_lengths"][0].tolist() == [3, 4, 0]
    words = transformers.AutoTokenizer.from_pretrained(home / "run" / "checkpoint-100")
    for row, given in enumerate(QUESTIONS):
        for n, option in enumerate(given["o"]):
            labels = batch["option_labels"][row, n]
            assert words.decode(labels[labels != -100]) == option
            assert words.decode(batch["options"][row, n]).startswith(f"{given['q']}{option}")
        assert learned(home, made, row)[1] == given["o"][row % 2]
    right = [float(r) for r in made.score().table[:, 0]]
    for row in range(4):  # the likeliest option by hand
        likely = []
        for n in range(len(OPTIONS[row % 2])):
            ids, labels = batch["options"][row, n], batch["option_labels"][row, n]
            with torch.no_grad():
                chance = made.model(ids[None]).logits[0].log_softmax(1)
            likely.append(sum(float(chance[t - 1, i]) for t, i in enumerate(ids.tolist()) if labels[t] != -100))
        assert right[row] == float(likely.index(max(likely)) == row % 2)


def test_options_may_be_columns_and_the_score_may_be_per_character(home: Path) -> None:
    (home / "q.csv").write_text("q,a,b,y\n" + "".join(f"{text}, big, gone,{n % 2}\n" for n, text in enumerate(TEXTS)))
    data: dict[str, Any] = {"table": "q.csv", "prompt": "q", "choices": ["a", "b"], "answer": "y"}
    made = task(home, metric="multiple_choice_normalised", **data)
    assert 0 <= made.score().value <= 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"o": []}, "row 3 (from 0) of {}: expected two options or more, found no options"),
        ({"o": ["x"]}, "expected two options or more, found one"),
        ({"o": "x"}, "expected a list of options, found 'x'"),
        ({"n": 2}, "row 3 (from 0) of {}: expected the number (from 0), the letter (from A) or the text"),
    ],
)
def test_options_and_answers_that_do_not_fit(home: Path, changed: dict[str, Any], said: str) -> None:
    write(
        home / "q.jsonl", [{**one, "o": OPTIONS[0], **(changed if n == 3 else {})} for n, one in enumerate(QUESTIONS)]
    )
    found = refusal(home, table="q.jsonl", prompt="q", choices="o", answer="n", fit=1.0)
    assert said.format(home / "q.jsonl") in found


def test_one_sample_with_very_many_options_does_not_fill_the_memory(home: Path) -> None:
    many = {"q": "the", "o": [f" {n}" for n in range(5000)], "n": 0}
    write(home / "q.jsonl", [many, *[{"q": "the", "o": [" a", " b"], "n": 0}] * 50])
    data: dict[str, Any] = {"table": "q.jsonl", "prompt": "q", "choices": "o", "answer": "n", "fit": 1.0}
    found = refusal(home, memory_limit="8MiB", **data)
    assert "expected tables of at most 8,388,608 bytes, found" in found
    assert "5,000 options in some sample" in found


def test_answers_that_can_be_read_in_two_ways_are_refused(home: Path) -> None:
    write(home / "q.jsonl", [{"q": text, "o": ["1", "0"], "n": n % 2} for n, text in enumerate(TEXTS)])
    found = refusal(home, table="q.jsonl", prompt="q", choices="o", answer="n")
    assert "expected answers that can be read in one way, found some that can be read as numbers and as texts" in found
    assert "write the letters of the options" in found


def test_a_long_question_is_refused_or_loses_its_beginning(home: Path) -> None:
    write(home / "q.jsonl", [{"q": " ".join(TEXTS), "o": OPTIONS[0], "n": 0}] * 4)
    data: dict[str, Any] = {"table": "q.jsonl", "prompt": "q", "choices": "o", "answer": "n", "fit": 1.0}
    assert "expected sequences of at most 64 tokens, found 4 longer ones" in refusal(home, **data)
    made = task(home, long_texts="truncate", **data)
    assert made.fit.columns["options"].shape == (4, 2, 64)
    assert learned(home, made)[1] == " big"


# Generation ---------------------------------------------------------------------------------------------


def learn(made: Any, steps: int) -> float:
    """What a random model scores after it has learned the data by heart."""
    assert made.score().value == 0.0
    optimiser = torch.optim.AdamW(made.model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        made.loss(made.fit.batch(torch.arange(len(made.fit)))).mean.backward()
        optimiser.step()
    return float(made.score().value)


def test_answers_are_generated_on_a_budget(home: Path) -> None:
    write(home / "pairs.jsonl", [{"q": text, "a": (" red", " blue")[n % 2]} for n, text in enumerate(TEXTS)])
    data: dict[str, Any] = {
        "table": "pairs.jsonl",
        "prompt": "q",
        "completion": "a",
        "metric": "exact_match",
        "fit": 1.0,
    }
    assert learn(task(home, **data), 150) >= 0.9
    heard: list[Event] = []
    few = task(home, heard.append, generate=5, **data)
    assert f"fit data: 5 of {len(few.fit)} answers are generated (data.generate)" in [e.data.get("text") for e in heard]
    assert float(few.score().table[:, 1].sum()) == 5
    half = task(home, **{**data, "fit": 0.5, "report": 0.5, "generate": 5})
    assert (len(half.fit), half._sealed.largest) == (9, 5)  # all are learned on, and only what is judged is reported on
    assert [bool((few.fit.columns["prompt_mask"][row] == 1).any()) for row in range(len(few.fit))].count(True) == 5


def test_the_last_answer_of_a_chat_is_generated(home: Path) -> None:
    write(home / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    made = task(home, table="chats.jsonl", messages="messages", metric="exact_match", fit=1.0)
    words = transformers.AutoTokenizer.from_pretrained(home / "run" / "checkpoint-100")
    for row, chat in enumerate(CHATS):
        ids, mask, answer = (made.fit.columns[name][row] for name in ("prompt_ids", "prompt_mask", "answer_ids"))
        assert words.decode(ids[mask == 1]) == words.apply_chat_template(
            chat[:3], tokenize=False, add_generation_prompt=True
        )
        assert words.decode(answer[answer != -100]) == chat[3]["content"]
    assert learn(made, 150) >= 0.9


def test_prompts_leave_room_for_the_longest_answer(home: Path) -> None:
    pairs = [{"q": " ".join(TEXTS[:n]), "a": " ".join(TEXTS[: 3 - n])} for n in (1, 2, 1, 2)]
    write(home / "pairs.jsonl", pairs)
    data: dict[str, Any] = {
        "table": "pairs.jsonl",
        "prompt": "q",
        "completion": "a",
        "metric": "exact_match",
        "fit": 1.0,
    }
    longest = task(home, **{**data, "metric": "nats_per_token"}).fit.columns["input_ids"].shape[1]
    said = refusal(home, max_length=longest, **data)
    assert "the longest answer of" in said
    made = task(home, max_length=longest, long_texts="truncate", **data)
    columns = made.fit.columns
    assert columns["prompt_ids"].shape[1] + columns["answer_ids"].shape[1] + 1 == longest


def test_a_sequence_to_sequence_model_generates_too(home: Path) -> None:
    config = transformers.T5Config(
        vocab_size=320, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(home / "t5")
    tokenizer(home / "t5")
    write(home / "pairs.jsonl", [{"q": text[:9], "a": text[9:]} for text in TEXTS])
    data: dict[str, Any] = {"table": "pairs.jsonl", "prompt": "q", "completion": "a", "metric": "exact_match"}
    made = task(home, model="t5", generate=4, **data)
    assert float(made.score().table[:, 1].sum()) == 4


def test_bits_per_byte_count_the_bytes_of_what_is_predicted(home: Path) -> None:
    texts = [f"{text} \u00e9\u4e2d" for text in TEXTS]
    write(home / "texts.jsonl", [{"text": text} for text in texts])
    made = task(home, table="texts.jsonl", text="text", metric="bits_per_byte", fit=1.0)
    words = transformers.AutoTokenizer.from_pretrained(home / "run" / "checkpoint-100")
    first = [len(words.decode(row[:1])) for row in made.fit.columns["input_ids"]]
    expected = [len(text.encode()) - n for text, n in zip(texts, first, strict=True)]
    assert made.fit.columns["bytes"].tolist() == expected
    write(home / "long.jsonl", [{"text": " ".join(texts)}] * 3)
    data: dict[str, Any] = {"text": "text", "long_texts": "split", "max_length": 16, "metric": "bits_per_byte"}
    made = task(home, table="long.jsonl", fit=1.0, **data)
    pieces = made.fit.groups == 0
    lost = sum(len(words.decode(row[:1])) for row in made.fit.columns["input_ids"][pieces])
    assert abs(int(made.fit.columns["bytes"][pieces].sum()) + lost - len(" ".join(texts).encode())) <= 2 * int(
        pieces.sum()
    )


# Tags -----------------------------------------------------------------------------------------------------

SENTENCES = [{"w": words, "t": [TAGS[len(word) % 3] for word in words]} for words in WORDS]


def tagger(home: Path, **config: Any) -> str:
    return encoder(home, "TokenClassification", **{"id2label": dict(enumerate(TAGS)), **config})


def test_the_first_token_of_each_word_has_its_tag(home: Path) -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    write(home / "tags.jsonl", [*SENTENCES, {"w": [], "t": []}])
    heard: list[Event] = []
    model = tagger(home)
    made = task(home, heard.append, model=model, table="tags.jsonl", words="w", tags="t", fit=1.0)
    assert "fit data: 1 without a word, left out" in [event.data.get("text") for event in heard]
    assert made.metric.name == "entity_f1"
    batch = made.fit.columns
    for row, sentence in enumerate(SENTENCES):
        labels = batch["labels"][row]
        assert [TAGS[label] for label in labels[labels != -100].tolist()] == sentence["t"]
    with torch.no_grad():
        found = made.model.eval()(batch["input_ids"], batch["attention_mask"]).logits.argmax(2)
    said = [
        [TAGS[tag] for tag in row[labels != -100].tolist()] for row, labels in zip(found, batch["labels"], strict=True)
    ]
    expected = float(seqeval.f1_score([one["t"] for one in SENTENCES], said))
    assert made.score().value == pytest.approx(expected, abs=1e-9)


def test_tags_may_be_numbers_and_are_judged_by_token_where_they_have_no_such_names(home: Path) -> None:
    write(home / "tags.jsonl", [{**one, "t": [TAGS.index(tag) for tag in one["t"]]} for one in SENTENCES])
    model = tagger(home, id2label={0: "noun", 1: "verb", 2: "other"})
    data: dict[str, Any] = {"model": model, "table": "tags.jsonl", "words": "w", "tags": "t"}
    assert task(home, **data).metric.name == "token_f1"
    assert "expected class names O, B-X and I-X (IOB2), found the names noun, verb, other" in refusal(
        home, metric="entity_f1", **data
    )
    assert task(home, metric="entity_f1", classes=TAGS, **data).metric.name == "entity_f1"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"t": ["O"]}, "expected 5 tags, one for each word, found 1"),
        ({"t": ["B-Z"] * 5}, "expected one of the tags O, B-X, I-X, found 'B-Z'"),
        ({"t": [0, 1, 2, 3, 0]}, "expected tags 0 to 2, the classes of the model, found 3"),
        ({"w": "the old cat is here"}, "expected a list of words, found 'the old cat is here'"),
    ],
)
def test_tags_that_do_not_fit(home: Path, changed: dict[str, Any], said: str) -> None:
    write(home / "tags.jsonl", [{**one, **(changed if n == 3 else {})} for n, one in enumerate(SENTENCES)])
    found = refusal(home, model=tagger(home), table="tags.jsonl", words="w", tags="t", fit=1.0)
    assert said in found
    assert "row 3 (from 0)" in found


# Numbers and several labels -------------------------------------------------------------------------------


def test_regression_through_transformers(home: Path) -> None:
    write(home / "marks.jsonl", [{"text": text, "y": len(text) / 7, "z": -n} for n, text in enumerate(TEXTS)])
    model = encoder(home, "SequenceClassification", num_labels=1)
    data: dict[str, Any] = {"table": "marks.jsonl", "text": "text", "target": "number"}
    made = task(home, model=model, label="y", **data)
    assert made.metric.name == "r2"
    assert made.score().loss > 0
    assert task(home, model=model, label="y", metric="pearson", **data).score().value <= 1
    assert "expected 1 per sample, as many as the model has outputs, found 2" in refusal(
        home, model=model, label=["y", "z"], **data
    )
    two = encoder(home, "SequenceClassification", "two", num_labels=2)
    made = task(home, model=two, label=["y", "z"], fit=1.0, **data)
    batch = made.fit.columns  # two numbers per sample, which transformers alone would take for two classes
    with torch.no_grad():
        found = made.model.eval()(batch["input_ids"], batch["attention_mask"])
    assert made.score().loss == pytest.approx(float((found.logits - batch["labels"]).square().mean()), rel=1e-4)


def test_several_labels_are_marks_or_names(home: Path) -> None:
    names, model = ["a", "b", "c"], encoder(home, "SequenceClassification", num_labels=3)
    marks = [[int(n % 2 == 0), int(n % 3 == 0), int(n == 4)] for n in range(len(TEXTS))]
    write(home / "rows.jsonl", [{"text": t, "y": m} for t, m in zip(TEXTS, marks, strict=True)])
    chosen = [[name for name, mark in zip(names, row, strict=True) if mark] for row in marks]
    write(home / "names.jsonl", [{"text": t, "y": m} for t, m in zip(TEXTS, chosen, strict=True)])
    columns = [dict(zip(names, row, strict=True)) for row in marks]
    write(home / "columns.jsonl", [{"text": t, **m} for t, m in zip(TEXTS, columns, strict=True)])
    data: dict[str, Any] = {"text": "text", "target": "multi", "model": model, "fit": 1.0}
    made = [
        task(home, table="rows.jsonl", label="y", **data),
        task(home, table="names.jsonl", label="y", classes=names, **data),
        task(home, table="columns.jsonl", label=names, **data),
    ]
    assert all(one.fit.columns["labels"].tolist() == marks for one in made)
    assert len({one.score().value for one in made}) == 1
    assert made[0].metric.name == "micro_f1"
    assert made[0].ensemble_scores(range(2)).value == made[0].score().value  # of logits, like any classifier's
    assert "expected classes whose order is known, found label 'a'" in refusal(
        home, table="names.jsonl", label="y", **data
    )


def test_labels_and_models_that_do_not_fit(home: Path) -> None:
    write(home / "rows.jsonl", [{"text": text, "y": n % 2} for n, text in enumerate(TEXTS)])
    model = encoder(home, "SequenceClassification", num_labels=1, problem_type="regression")
    found = refusal(home, model=model, table="rows.jsonl", text="text", label="y")
    assert "data.target: class: expected a model whose configuration says problem_type single_label" in found
    assert "write data.target: number" in found
    assert task(home, model=model, table="rows.jsonl", text="text", label="y", target="number").metric.name == "r2"
    write(home / "tags.jsonl", SENTENCES)
    said = refusal(home, model=model, table="tags.jsonl", words="w", tags="t")
    assert "data.words: expected a model for token classification, found BertForSequenceClassification" in said
    write(home / "q.jsonl", QUESTIONS)
    said = refusal(home, model=model, table="q.jsonl", prompt="q", choices="o", answer="n")
    assert "data.choices: expected a causal language model" in said


def test_models_of_tokens_take_no_label_per_sample(home: Path) -> None:
    """Transformers itself complains of shapes, from within its loss."""
    write(home / "rows.jsonl", [{"text": text, "label": n % 2, "y": n % 2} for n, text in enumerate(TEXTS)])
    data: dict[str, Any] = {"table": "rows.jsonl", "text": "text"}
    for more, found in (({"label": "y"}, "data.label"), ({"target": "number"}, "data.target: number")):
        said = refusal(home, **data, **more)
        assert f"data for LlamaForCausalLM: expected no label per sample: it learns its input, found {found}" in said
        assert "AutoModelForSequenceClassification" in said
    said = refusal(home, model=tagger(home), **data)
    assert "data for BertForTokenClassification: expected data.words and tags, found neither" in said
    (home / "mine.py").write_text("def loss(model, batch):\n    return model(batch['input_ids']).logits.mean((1, 2))\n")
    own: dict[str, Any] = {"loss": {"python": "mine:loss"}, "metric": "loss", "label": "y"}
    assert task(home, **data, **own).metric.name == "loss"  # who knows what to do with them


def test_class_numbers_need_more_than_one_output(home: Path) -> None:
    write(home / "rows.jsonl", [{"text": text, "label": n % 3} for n, text in enumerate(TEXTS)])
    said = refusal(home, model=encoder(home, "SequenceClassification", num_labels=1), table="rows.jsonl", text="text")
    assert "expected 0 (the model has one output)" in said
    assert "in a recipe data.target: number" in said


# Metrics and columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"text": "t", "metric": "multiple_choice"}, "data.metric: multiple_choice needs data.prompt, choices and"),
        ({"text": "t", "metric": "exact_match"}, "data.metric: exact_match needs data.messages, or prompt and"),
        ({"text": "t", "metric": "entity_f1"}, "data.metric: entity_f1 needs data.words and tags"),
        ({"messages": "m", "metric": "bits_per_byte"}, "data.metric: bits_per_byte needs data.text, or prompt and"),
        ({"features": "x", "metric": "token_accuracy"}, "data.metric: token_accuracy needs data.text, messages,"),
        ({"features": "x", "metric": "r2"}, "data.metric: r2 needs target: number"),
        ({"features": "x", "metric": "accuracy", "target": "number"}, "data.metric: expected one of r2, negative_mse"),
        ({"prompt": "q", "choices": "o"}, "data.answer: expected choices and answer together"),
        ({"words": "w"}, "data.tags: expected words and tags together"),
        ({"prompt": "q", "completion": "c", "generate": 5}, "data.generate: only for metric: exact_match"),
        ({"features": "x", "label": ["a", "b"]}, "data.label: several columns need target: number or target: multi"),
    ],
)  # fmt: skip
def test_a_recipe_whose_metric_and_columns_do_not_fit_is_refused_before_anything_is_read(
    tmp_path: Path, data: dict[str, Any], said: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        task(tmp_path, table="nowhere.jsonl", **data)
    assert said in str(caught.value)

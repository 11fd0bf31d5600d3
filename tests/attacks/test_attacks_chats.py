"""Chats, prompts and texts of strangers, and their tokenizers: templates that never end, words that nobody wrote."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

pytest.importorskip("transformers")

from attacks.kit import marker_in
from attacks.threats_pickles import slow_key
from stockpot.adapters import chats, texts
from stockpot.adapters.code import need
from stockpot.adapters.huggingface import _tokenizer, _try
from stockpot.adapters.labels import read_tags
from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.samples import read_splits
from stockpot.adapters.splits import Columns, DataSource, Share
from stockpot.adapters.tables import Limits, Table, documents, read_table
from stockpot.errors import StockpotError
from words import CHATS, MARKED, PLAIN, TEXTS, tokenizer, write

MESSAGES = Columns(messages="messages")
USER = {"role": "user", "content": "hello"}
HONEST = [{"messages": chat} for chat in CHATS]


def read(
    folder: Path,
    rows: list[dict[str, Any]] = HONEST,
    columns: Columns = MESSAGES,
    template: str = PLAIN,
    config: dict[str, Any] | None = None,
    purpose: str = "causal",
) -> Any:
    """What a recipe would make of these rows with a tokenizer of this template and configuration."""
    tokenizer(folder, template)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(config or {})}))
    write(folder / "a.jsonl", rows)
    made = partial(_try, "tokenizer", partial(_tokenizer, need("transformers"), folder))
    model = LoadedModel(nn.Linear(1, 1), tokenizer=made, keywords=True, purpose=purpose, vocabulary=320, max_length=64)
    source = DataSource("table", folder / "a.jsonl", columns, {"fit": Share()})
    return read_splits(source, model, ImageInput(), ("fit",))["fit"]


def test_honest_ones_are_read(tmp_path: Path) -> None:
    for template in (PLAIN, MARKED):
        assert len(read(tmp_path, template=template)["input_ids"]) == len(CHATS)


# ---- templates, which are small programs

HELD = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "in what is learned": "{% generation %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endgeneration %}",
    "a tree of calls": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a large power": "{% set a = 9 %}{{ (a**(a**a)) % 7 }}",
    "10 GB of one letter": "{{ ('a' * 10000000000)|length }}",
    "a doubled text": "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "a wide number": "{{ '%99999999999d' % 1 }}",
    "a long list": "{{ ([0] * 10000000000)|length }}",
    "50 million letters": "{{ 'a' * 50000000 }}",
    "letters without end in what is learned": "{% generation %}{{ 'a' * 9000000 }}{% endgeneration %}",
}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the limits are those of Linux")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HELD)
def test_templates_that_would_not_end_are_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(chats, "_SECONDS", 1)
    monkeypatch.setattr(chats, "_BYTES", 50 * 2**20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    began = time.process_time()
    with pytest.raises(StockpotError, match=r"the tokenizer's chat template: expected a text within 1 s"):
        read(tmp_path, template=HELD[name])
    assert time.process_time() - began < 5
    assert resource.getrlimit(resource.RLIMIT_AS) == before


ESCAPES = (
    "''.__class__.__mro__[1].__subclasses__()",
    "lipsum.__globals__['os'].system('touch MARKER')",
    "cycler.__init__.__globals__.os.system('touch MARKER')",
    "raise_exception.__globals__['json'].codecs.builtins.open('MARKER', 'w')",
    "namespace.__init__.__globals__",
    "messages.append(1)",
    "messages[0].update({'role': 'assistant'})",
    "('{0.__class__.__init__.__globals__}').format(namespace) ~ '{0.__class__.__mro__}'.format('')",
    "self.__init__.__globals__",
    "dict.__init__.__globals__",
)


@pytest.mark.parametrize("code", ESCAPES)
def test_templates_reach_no_code(code: str, tmp_path: Path) -> None:
    marker = str(marker_in(tmp_path))
    with pytest.raises(StockpotError, match=r"row 0 .*expected a chat that the template takes, found SecurityError"):
        read(tmp_path, template="{{ " + code.replace("MARKER", marker) + " }}" + PLAIN)
    assert not marker_in(tmp_path).exists()


@pytest.mark.parametrize("code", ["include", "extends", "import"])
def test_templates_reach_no_files(code: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a line that nobody may see")
    with pytest.raises(StockpotError, match="no loader for this environment") as caught:
        read(tmp_path, template=f"{{% {code} '{tmp_path}/secret'{' as x' * (code == 'import')} %}}{PLAIN}")
    assert "a line" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "RecursionError"),
        ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "RecursionError"),
        ("{% for m in", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages|length }}" + PLAIN, "changes what comes before it"),
        ("{# {% generation %} #}" + PLAIN, "tokens to learn, found none in any sample"),
    ],
)
def test_templates_that_are_wrong(template: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(StockpotError, match=words):
        read(tmp_path, template=template)


# ---- chats


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        ([{"role": "assistant", "content": "hi"}], "a message of somebody else first"),
        ([USER, {"role": "assistant", "content": None}], r"content in message 1 \(from 0\), found nothing"),
        ([USER, {"role": "assistant", "content": {"a": 1}}], r"template can read, found it writes {'a': 1}"),
        ([USER, {"role": "assistant", "content": [{"type": "text", "text": "x"}]}], "found it writes .{'type'"),
        ([USER, {"role": "assistant", "content": "\ud800"}], r"expected text, found half of a letter, '\\ud800'"),
        ([USER, {"role": "\udfff", "content": "x"}], "half of a letter"),
        ([USER, {"role": ["assistant"], "content": "x"}], "each with role and content"),
        ([USER, {"role": "assistant", "content": "a" * 100_000}], r"at most 64 tokens.* in row 1 \(from 0\)"),
        ("text", "expected a list of messages"),
        ([], "expected a list of messages"),
        ([[USER]], "each with role and content"),
    ],
)
def test_chats_that_are_none(chat: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(StockpotError, match=words) as caught:
        read(tmp_path, [HONEST[0], {"messages": chat}])
    assert "row 1 (from 0)" in str(caught.value)


@pytest.mark.parametrize("name", ["tools", "documents", "chat_template_kwargs"])
def test_what_a_trainer_would_tell_the_template_is_not_left_out_silently(name: str, tmp_path: Path) -> None:
    empty: tuple[Any, ...] = (None, [], {})
    for nothing in empty:
        assert len(read(tmp_path, [{**row, name: nothing} for row in HONEST])["input_ids"]) == len(CHATS)
    rows = [{**row, name: [{"name": "f"}] if n == 0 else None} for n, row in enumerate(HONEST)]
    with pytest.raises(StockpotError, match=rf"{name}, row 0 .*beside the messages, found .{{'name': 'f'}}"):
        read(tmp_path, rows)


# ---- texts, and prompts with completions


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("\ud800", "expected text, found half of a letter"),
        (None, "expected text, found nothing"),
        (["a"], "expected text, found list"),
        ({"a": 1}, "expected text, found dict"),
        ("a b" * 20_000, r"sequences of at most 64 tokens|expected text"),
    ],
)
@pytest.mark.parametrize("column", ["t", "c"])
@pytest.mark.parametrize("purpose", ["causal", "seq2seq", ""])
def test_texts_that_are_none(cell: Any, words: str, column: str, purpose: str, tmp_path: Path) -> None:
    rows = [{"t": text, "c": text, "l": n % 2} for n, text in enumerate(TEXTS[:4])]
    rows[2] = {**rows[2], column: cell}
    columns = Columns(prompt="t", completion="c")
    if not purpose:
        columns = Columns(text=("t", "c"), label="l")
    with pytest.raises(StockpotError, match=words) as caught:
        read(tmp_path, rows, columns, purpose=purpose)
    assert "row 2 (from 0)" in str(caught.value)


QUESTION = {"q": "which? ", "o": ["a", "b"], "a": "A"}
CHOICES = Columns(prompt="q", choices=("o",), answer="a")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"o": ["a", "\ud800"]}, "half of a letter"),
        ({"o": ["a", ["b"]]}, "expected text, found list"),
        ({"o": "ab"}, "expected a list of options"),
        ({"o": [None, float("nan"), "a"]}, "two options or more, found one"),
        ({"a": "Z"}, "the letter"),
        ({"a": "-1"}, "the letter"),
        ({"a": "9" * 5000}, "the letter"),
        ({"a": "\u0663"}, "the letter"),
        ({"a": None}, "expected text, found nothing"),
    ],
)
def test_questions_that_are_none(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert len(read(tmp_path, [QUESTION] * 4, CHOICES)["input_ids"]) == 4
    with pytest.raises(StockpotError, match=words):
        read(tmp_path, [QUESTION, {**QUESTION, **fields}, QUESTION], CHOICES)


@pytest.mark.parametrize("tag", [["a"], {}, 10**30, -7, True, 1.5, None, "z", float("nan")])
@pytest.mark.parametrize("names", [None, ("a", "b")])
def test_tags_that_are_none(tag: Any, names: tuple[str, ...] | None) -> None:
    table = Table("a.jsonl", {"w": [["x", "y"]], "t": [[0, tag]]})
    with pytest.raises(StockpotError, match=r"data.tags: t, row 0 .*expected"):
        read_tags(table, "w", "t", names, None, None)


def test_one_long_group_takes_no_memory_for_the_others(tmp_path: Path) -> None:
    """As an array of texts of one width it took 8 GB; and a text lost the zeros at its end."""
    rows = [{"t": "the cat", "g": name} for name in ("a" * 1_000_000, "b", "b\0", *"cdefgh" * 300)]
    made = read(tmp_path, rows, Columns(text=("t",), group="g"))
    assert len(made.groups.unique()) == 9


def test_padding_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_MOST_PADDED", 200)
    with pytest.raises(StockpotError, match="at most 200 tokens with padding, found 18 sequences, the longest of 28"):
        read(tmp_path)


def test_documents_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a " * 101)
    with pytest.raises(StockpotError, match=r"expected at most 100 rows, found 102"):
        documents(read_table(tmp_path / "a.txt", None), " ", Limits(rows=100))


# ---- tokenizers


@pytest.mark.parametrize("length", ["5", -5, 0, [1], True, float("nan"), {}])
def test_a_context_that_is_no_number_is_refused(length: Any, tmp_path: Path) -> None:
    with pytest.raises(StockpotError, match=r"the tokenizer: expected a positive model_max_length"):
        read(tmp_path, config={"model_max_length": length})


@pytest.mark.parametrize("length", [30, 30.5, 1e30, None])
def test_a_context_that_is_one_is_kept(length: Any, tmp_path: Path) -> None:
    assert len(read(tmp_path, config={"model_max_length": length})["input_ids"]) == len(CHATS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_a_tokenizers_class_is_not_that_of_a_model(where: str, tmp_path: Path) -> None:
    """The library would read the weights beside it, which nobody has looked through."""
    slow_key(tmp_path).rename(tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "tokenizer_class": "BertForMaskedLM"}))
    config = {"tokenizer_class": "BertForMaskedLM"} if where == "tokenizer_config.json" else {}
    with pytest.raises(StockpotError, match=rf"{where}: expected the class of a tokenizer, found 'BertForMaskedLM'"):
        read(tmp_path, config=config)


def test_code_beside_a_tokenizer_is_not_run(tmp_path: Path) -> None:
    code = f"import pathlib\npathlib.Path({str(marker_in(tmp_path))!r}).touch()\nclass Evil: pass\n"
    (tmp_path / "evil.py").write_text(code)
    config = {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "EvilTokenizer"}
    try:
        read(tmp_path, config=config)
    except StockpotError as error:
        assert "custom code" in str(error)  # noqa: PT017  (refused or read, but never run)
    assert not marker_in(tmp_path).exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes FIFOs")
@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["chat_template.jinja", "special_tokens_map.json", "added_tokens.json", "merges.txt"])
def test_files_beside_a_tokenizer_are_not_waited_for(name: str, tmp_path: Path) -> None:
    tokenizer(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    write(tmp_path / "a.jsonl", [{"t": text} for text in TEXTS])
    made = partial(_try, "tokenizer", partial(_tokenizer, need("transformers"), tmp_path))
    model = LoadedModel(nn.Linear(1, 1), tokenizer=made, keywords=True, purpose="causal", vocabulary=320)
    source = DataSource("table", tmp_path / "a.jsonl", Columns(text=("t",)), {"fit": Share()})
    assert len(read_splits(source, model, ImageInput(), ("fit",))["fit"]["input_ids"]) == len(TEXTS)

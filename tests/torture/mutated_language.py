"""Damaged chats, prompts, questions and texts for `torture.mutated_data`, and another reader of the same bytes.

The tokenizer is a real one without merges: a token is a byte, or one of three special ones, so that this reader needs
nothing but the alphabet. What is learned it finds by letters, where the package compares sequences of tokens.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stockpot.adapters.models import ImageInput, LoadedModel
from stockpot.adapters.samples import read_splits
from stockpot.adapters.splits import Columns, DataSource, Share
from torture.mutated_runs import mutate
from words import CHATS, MARKED, PLAIN, tokenizer

LONGEST = 200  # tokens
SPECIAL = re.compile("<e>|<user>|<assistant>")
PIECES = (
    "<e>",
    "<",
    "e>",
    "<assistant>",
    "\0",
    "\u2028",
    "\u00e9",
    "\ud800",
    "\n",
    " ",
    "",
    "None",
    "7",
    "A",
    "{{ 1 }}",
)
Part = tuple[list[int], list[int]]  # ids and labels


def _lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


_PAIRS = [{"q": "the cat ", "a": "is here"}, {"q": "a\u00e4 ", "a": "7"}, {"q": "", "a": "gone"}]
_ASKED = [
    {"q": "which is red? ", "o": ["rose", "grass", "sky"], "a": "A"},
    {"q": "which is green? ", "o": ["rose", "grass"], "a": "B"},
    {"q": "which is blue? ", "o": ["rose", "grass", "sky"], "a": "C"},
]
LANGUAGE: tuple[tuple[str, bytes, Columns], ...] = (
    ("chat.jsonl", _lines(*({"m": chat} for chat in CHATS[:3])), Columns(messages="m")),
    ("marked.jsonl", _lines(*({"m": chat} for chat in CHATS[:3])), Columns(messages="m")),
    ("pair.jsonl", _lines(*_PAIRS), Columns(prompt="q", completion="a")),
    ("pair.tsv", b"q\ta\nabc\tdef\nghi\tjkl\n", Columns(prompt="q", completion="a")),
    ("text.jsonl", _lines(*({"t": row["q"] + row["a"]} for row in _PAIRS)), Columns(text=("t",))),
    ("text.txt", b"one document\nof two lines\n\nanother\n\n\nand a third", Columns(text=("text",))),
    ("choice.jsonl", _lines(*_ASKED), Columns(prompt="q", choices=("o",), answer="a")),
)


@cache
def _words(template: str) -> tuple[Any, dict[int, int]]:
    """The tokenizer, and the id of each byte."""
    with tempfile.TemporaryDirectory() as place:
        made = tokenizer(Path(place), template, size=259)
    alphabet = {value: made(bytes([value]).decode("latin-1"))["input_ids"] for value in range(128)}
    letters = made.backend_tokenizer.get_vocab()
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the other bytes are shown as letters behind these
    hidden = [value for value in range(256) if value not in shown]
    ids = {value: letters[chr(value)] for value in shown}
    ids |= {value: letters[chr(256 + number)] for number, value in enumerate(hidden)}
    assert all(found == [ids[value]] for value, found in alphabet.items())
    return made, ids


def edited(content: bytes, draw: random.Random) -> bytes:
    """Lines of JSON in which values are others, or texts have other letters."""
    rows = [json.loads(line) for line in content.splitlines()]
    for _ in range(draw.choice((1, 1, 2, 4))):
        if draw.random() < 0.3:
            mutate(rows, draw)
            continue
        place: Any = rows
        while isinstance(place, (dict, list)) and place:
            key = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
            before, place = place, place[key]
        if isinstance(place, str):
            at = draw.randrange(len(place) + 1)
            before[key] = place[:at] + draw.choice(PIECES) + place[at + draw.randrange(3) :]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def read_language(path: Path, columns: Columns, content: bytes) -> None:
    """Raises an error of the package, or an AssertionError where it reads something else than is there."""
    words, ids = _words(MARKED if path.name == "marked.jsonl" else PLAIN)
    model = LoadedModel(
        nn.Linear(1, 1), tokenizer=lambda: words, keywords=True, purpose="causal", vocabulary=300, max_length=LONGEST
    )
    separator = "\n\n" if path.suffix == ".txt" else None
    source = DataSource("table", path, columns, {"fit": Share()}, separator=separator)
    made = read_splits(source, model, ImageInput(), ("fit",))["fit"]
    rows = _rows(path, content)
    if columns.choices is not None:
        _compare_choices(made, rows, ids)
        return
    wanted = [part for part in (_part(row, columns, ids) for row in rows) if set(part[1][1:]) - {-100}]
    assert len(made["input_ids"]) == len(wanted), (len(made["input_ids"]), len(wanted))
    for number, (tokens, labels) in enumerate(wanted):
        mask = made["attention_mask"][number].bool()
        assert made["input_ids"][number][mask].tolist() == tokens, number
        assert made["labels"][number][mask].tolist() == labels, number
        assert (made["labels"][number][~mask] == -100).all()


def _rows(path: Path, content: bytes) -> list[dict[str, Any]]:
    from torture.mutated_data import separated

    if path.suffix == ".txt":
        return [{"text": part} for part in content.decode("utf-8-sig").split("\n\n") if part.strip()]
    if path.suffix == ".tsv":
        names, *rows = separated(content.decode("utf-8-sig"), "\t")
        return [dict(zip(names, row, strict=True)) for row in rows]
    return [json.loads(line) for line in re.split("\r\n|\r|\n", content.decode()) if line.strip()]


def _part(row: dict[str, Any], columns: Columns, ids: dict[int, int]) -> Part:
    if columns.messages is not None:
        text, learned = "", list[bool]()
        for message in row[columns.messages]:
            head, body = f"<{message['role']}>", f"{message['content']}<e>"
            text += head + body
            learned += [False] * len(head) + [message["role"] == "assistant"] * len(body)
        return _encoded(text, learned, ids)
    if columns.prompt is not None:
        prompt, answer = str(row["q"]), str(row["a"])
        whole = prompt + answer
        end = "" if whole.endswith("<e>") and _tokens(whole)[-1] == "<e>" else "<e>"
        return _encoded(whole + end, [False] * len(prompt) + [True] * len(answer + end), ids)
    text = str(row[(columns.text or ("",))[0]])
    return _encoded(text, [True] * len(text), ids)


def _tokens(text: str) -> list[str]:
    """Letters and special tokens."""
    return re.findall(f"{SPECIAL.pattern}|[\\s\\S]", text)


def _encoded(text: str, learned: list[bool], ids: dict[int, int]) -> Part:
    """A letter is as many tokens as it has bytes; a token that is learned in part is learned."""
    special = {"<e>": 0, "<user>": 1, "<assistant>": 2}
    tokens, labels, at = list[int](), list[int](), 0
    for token in _tokens(text):
        found = [special[token]] if token in special else [ids[value] for value in token.encode()]
        tokens += found
        labels += found if any(learned[at : at + len(token)]) else [-100] * len(found)
        at += len(token)
    return tokens, labels


def _compare_choices(made: dict[str, Any], rows: list[dict[str, Any]], ids: dict[int, int]) -> None:
    letters = all(len(str(row["a"]).strip()) == 1 and str(row["a"]).strip().isupper() for row in rows)
    for number, row in enumerate(rows):
        answer = str(row["a"]).strip()
        options = row["o"]
        texts = ["" if option is None else str(option) for option in options]
        if letters:
            right = ord(answer) - ord("A")
        elif answer.isascii() and answer.isdigit() and all(str(r["a"]).strip().isdigit() for r in rows):
            right = int(answer)
        else:
            right = [text.strip() for text in texts].index(answer)
        assert int(made["answer"][number]) == right, number
        for n, text in enumerate(texts):
            if not text:
                continue
            whole = str(row["q"]) + text
            if _tokens(whole)[-1] == "<e>":
                continue  # an end that a tokenizer puts behind is taken off, and so is this one
            tokens, labels = _encoded(whole, [False] * len(str(row["q"])) + [True] * len(text), ids)
            found, given = made["options"][number, n], made["option_labels"][number, n]
            assert found[: len(tokens)].tolist() == tokens, (number, n)
            assert given[: len(tokens)].tolist() == labels, (number, n)
            assert (given[len(tokens) :] == -100).all()
            assert int(made["option_lengths"][number, n]) == len(text.strip())
            if n == right:
                assert torch.equal(
                    made["input_ids"][number][made["attention_mask"][number].bool()], torch.tensor(tokens)
                )

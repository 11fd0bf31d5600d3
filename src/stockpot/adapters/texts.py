"""From texts to token ids, and which of the tokens a model learns.

Texts become ids once, some at a time, into plain arrays: a list of Python numbers would take nine times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.chats import chat_parts
from stockpot.adapters.extras import said, silent
from stockpot.adapters.inputs import LoadedModel
from stockpot.adapters.tables import Array, Table, bad_data
from stockpot.errors import DataError
from stockpot.events import Event, Listener, progress
from stockpot.task.loss import IGNORED

_AT_ONCE = 512  # texts that become ids before it is told
_PIECE = 1024  # tokens of a piece, where neither the recipe nor the model says less

Part = tuple[Sequence[int], Sequence[int]]  # ids, and labels of the same length: the id, or IGNORED


class Ids:
    """Sequences of different lengths, one after another."""

    def __init__(self, rows: Iterable[Sequence[int]] = ()) -> None:
        self._flat, self._lengths = array("i"), array("q")
        for row in rows:
            self.add(row)

    def add(self, row: Sequence[int]) -> None:
        self._flat.extend(row)
        self._lengths.append(len(row))

    @property
    def lengths(self) -> Array:
        return np.frombuffer(self._lengths, np.int64) if self._lengths else np.zeros(0, np.int64)

    @property
    def largest(self) -> int:
        return max(self._flat, default=0)

    def padded(self, fill: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
        """The sequences as (n, T) with `fill` behind or before them, and a mask of 1 where they are; int64 both."""
        lengths, width = self.lengths, int(self.lengths.max(initial=1))
        mask = np.arange(width) < lengths[:, None]
        mask = mask[:, ::-1] if left else mask
        table = np.full(mask.shape, fill, np.int64)
        table[mask] = np.frombuffer(self._flat, np.int32) if self._flat else ()
        return torch.from_numpy(table), torch.from_numpy(mask.astype(np.int64))


@dataclass(frozen=True)
class Form:
    """Which columns of a table are read as what, and how long a sequence may be."""

    text: tuple[str, ...] | None = None
    messages: str | None = None
    prompt: str | None = None
    completion: str | None = None
    choices: str | None = None
    answer: str | None = None
    words: str | None = None
    max_length: int | None = None
    long_texts: str = "refuse"  # refuse, truncate or split
    judged: str = ""  # the metric, which may need columns of its own


class TextReader:
    """Reads the texts of one split with a model's tokenizer."""

    def __init__(self, form: Form, model: LoadedModel, table: Table, split: str, listen: Listener) -> None:
        key = next((k for k in ("text", "messages", "prompt", "words") if getattr(form, k)), "text")
        self.form, self.model, self.table, self.split, self.listen, self.key = form, model, table, split, listen, key
        if model.tokenizer is None:
            fix = "set model.tokenizer to its folder; for other models use data.tokens or data.python"
            raise bad_data(f"data.{key}", "a transformers model with a tokenizer", "none", fix)
        self.tokenizer = tokenizer = model.tokenizer()
        size = getattr(tokenizer, "vocab_size", 0)
        if model.vocabulary is not None and size > model.vocabulary:
            self._vocabulary(f"a tokenizer of {size:,} tokens")
        known = [n for n in (model.max_length, getattr(tokenizer, "model_max_length", None)) if n]
        context, given = min(known, default=2**30), form.max_length
        if given is not None and model.max_length is not None and given > model.max_length:
            expected = f"at most {model.max_length:,}, the model's context"
            raise bad_data("data.max_length", expected, f"{given:,}", "ask for fewer tokens")
        pieces = min(context, _PIECE) if form.long_texts == "split" else context
        self.longest: int = given or pieces
        named = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        fits = (n for n in named if n is not None and n < (model.vocabulary or 2**31))
        self.fill: int = next(fits, 0)

    # Forms of text ------------------------------------------------------------------------------------

    def read(self) -> tuple[dict[str, Tensor], Array]:
        """Columns of a batch, and the row of the table (as it is, or its share) that each sample is from."""
        if self.form.words is not None:
            raise AssertionError("words are read with their tags")
        if self.model.purpose == "seq2seq" and self.key == "prompt":
            return self._seq2seq()
        if self.model.purpose != "causal":
            return self._inputs()
        if self.form.choices is not None:
            return self._choices()
        if self.key == "text":
            columns, rows = self._causal((ids, ids) for ids in self._encoded(self._texts()[0]))
        elif self.key == "messages":
            chats = self.table.column(str(self.form.messages), "data.messages")
            where = self._where(str(self.form.messages), "data.messages")
            columns, rows = self._causal(chat_parts(self.tokenizer, chats, where, self._told("chats", len(chats))))
        else:
            columns, rows = self._causal(self._completions(*self._pair()))
            if self.form.judged == "exact_match":
                columns |= self._to_generate(rows)
        if self.form.judged == "bits_per_byte":
            columns["bytes"] = torch.tensor(self._bytes(columns["labels"]))
        return columns, rows

    def tagged(self, tags: Sequence[Array]) -> tuple[dict[str, Tensor], Array]:
        """Words and the class of each; second pieces of a word are not judged."""
        name = str(self.form.words)
        if not getattr(self.tokenizer, "is_fast", False):
            fix = "save it as a fast tokenizer (tokenizer.json), which knows the word that a token is from"
            raise bad_data("data.words", "a fast tokenizer", "a slow one", fix)
        words, parts = self.table.column(name, "data.words"), []
        where = self._where(name, "data.words")
        for row, (cell, tag) in enumerate(zip(words, tags, strict=True)):
            if not isinstance(cell, (list, np.ndarray)) or not all(isinstance(word, str) for word in cell):
                raise bad_data(where(row), "a list of words", repr(cell)[:80], "name a column of lists of words")
            if len(cell) != len(tag):
                expected = f"{len(cell)} tags, one for each word"
                raise bad_data(where(row), expected, str(len(tag)), "correct the row")
            encoded = self.tokenizer(list(cell), is_split_into_words=True)
            places = encoded.word_ids()
            first = [p is not None and p != before for p, before in zip(places, [None, *places], strict=False)]
            labels = [int(tag[p]) if new else IGNORED for p, new in zip(places, first, strict=True)]
            parts.append((encoded["input_ids"], labels))
        return self._causal(parts, first=0)

    def _inputs(self) -> tuple[dict[str, Tensor], Array]:
        """What a classifier is called with."""
        texts = self._texts()
        with silent():
            whole = self.tokenizer(*texts)
            long = [row for row, ids in enumerate(whole["input_ids"]) if len(ids) > self.longest]
            self._check_long(long, lambda row: len(whole["input_ids"][row]))
            if long:
                whole = self.tokenizer(*texts, truncation=True, max_length=self.longest)
        made = {name: Ids(rows).padded(self.fill if name == "input_ids" else 0)[0] for name, rows in whole.items()}
        self._check_ids(made["input_ids"])
        return made, np.arange(len(texts[0]))

    def _seq2seq(self) -> tuple[dict[str, Tensor], Array]:
        prompts, answers = self._pair()
        sources, targets = Ids(), Ids()
        both = [*zip(self._encoded(prompts), self._encoded(answers, target=True), strict=True)]
        long = [row for row, pair in enumerate(both) if max(map(len, pair)) > self.longest]
        self._check_long(long, lambda row: max(map(len, both[row])))
        for source, target in both:
            sources.add(source[: self.longest])
            targets.add(target[: self.longest])
        ids, mask = sources.padded(self.fill)
        labels, _ = targets.padded(IGNORED)
        self._check_ids(ids, labels)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}, np.arange(len(both))

    def _completions(self, prompts: Sequence[str], completions: Sequence[str]) -> Iterator[Part]:
        """Prompt and completion as one text; learned is what comes after the tokens it shares with the prompt alone.

        A token that joins the end of the prompt to the completion is learned. Then comes the end of text, if any.
        """
        end = getattr(self.tokenizer, "eos_token_id", None)
        whole = [p + c for p, c in zip(prompts, completions, strict=True)]
        for before, ids in zip(self._encoded(prompts), self._encoded(whole), strict=True):
            ids = [*ids] if end is None or (ids and ids[-1] == end) else [*ids, end]
            shared = 0
            while shared < min(len(before), len(ids)) and before[shared] == ids[shared]:
                shared += 1
            yield ids, [IGNORED] * shared + ids[shared:]

    def _choices(self) -> tuple[dict[str, Tensor], Array]:
        """Every choice behind its prompt; the right one is what is learned."""
        names = {key: str(getattr(self.form, key)) for key in ("prompt", "choices", "answer")}
        prompts = self.table.texts(names["prompt"], "data.prompt")
        given = self.table.column(names["choices"], "data.choices")
        answers = self.table.column(names["answer"], "data.answer")
        where, options, right = self._where(names["choices"], "data.choices"), [], []
        for row, (cell, answer) in enumerate(zip(given, answers, strict=True)):
            if not isinstance(cell, (list, np.ndarray)) or len(cell) < 2 or not all(isinstance(o, str) for o in cell):
                found = "none" if isinstance(cell, list) and not cell else repr(cell)[:80]
                raise bad_data(where(row), "a list of two or more texts", found, "name a column of lists of texts")
            options.append([*cell])
            right.append(_which(answer, options[-1], self._where(names["answer"], "data.answer")(row)))
        pairs = [(p, o) for p, cell in zip(prompts, options, strict=True) for o in cell]
        parts = [*self._completions([p for p, _ in pairs], [o for _, o in pairs])]
        starts = np.cumsum([0, *map(len, options)])
        sizes = [max(len(parts[n][0]) for n in range(a, b)) for a, b in zip(starts, starts[1:], strict=False)]
        long = [row for row, size in enumerate(sizes) if size > self.longest]
        self._check_long(long, sizes.__getitem__, may_cut=False)
        columns, rows = self._causal(parts[start + r] for start, r in zip(starts, right, strict=False))
        width, most = max(sizes), max(map(len, options))
        ids, labels = (torch.full((len(options), most, width), fill) for fill in (self.fill, IGNORED))
        lengths = torch.ones(len(options), most, dtype=torch.int64)
        for row, cell in enumerate(options):
            for place, option in enumerate(cell):
                tokens, learned = parts[starts[row] + place]
                ids[row, place, : len(tokens)] = torch.tensor(tokens)
                labels[row, place, : len(tokens)] = torch.tensor(learned)
                lengths[row, place] = max(1, len(option))
        answer = torch.tensor(right)
        return {**columns, "options": ids, "option_labels": labels, "option_lengths": lengths, "answer": answer}, rows

    def _to_generate(self, rows: Array) -> dict[str, Tensor]:
        prompts, answers = ([texts[row] for row in rows] for texts in self._pair())
        parts = [*self._completions(prompts, answers)]
        end = getattr(self.tokenizer, "eos_token_id", None)
        starts = [next((n for n, label in enumerate(labels) if label != IGNORED), len(ids)) for ids, labels in parts]
        asked, mask = Ids(ids[:n] for (ids, _), n in zip(parts, starts, strict=True)).padded(self.fill, left=True)
        wanted = Ids([t for t in ids[n:] if t != end] for (ids, _), n in zip(parts, starts, strict=True))
        return {"prompt_ids": asked, "prompt_mask": mask, "answer_ids": wanted.padded(IGNORED)[0]}

    # From sequences to columns ------------------------------------------------------------------------

    def _causal(self, parts: Iterable[Part], first: int = 1) -> tuple[dict[str, Tensor], Array]:
        """Ids and labels of one length; sequences without a label behind position `first` are left out and counted."""
        ids, labels, rows = Ids(), Ids(), array("q")
        long, longest, empty = [], {}, 0
        for row, (tokens, target) in enumerate(parts):
            if len(tokens) > self.longest:
                long.append(row)
                longest[row] = len(tokens)
            stop = len(tokens) if self.form.long_texts == "split" else self.longest
            learns = False
            for start in range(0, min(stop, len(tokens)), self.longest):
                piece = slice(start, start + self.longest)
                if all(label == IGNORED for label in target[piece][first:]):
                    continue
                learns = True
                ids.add(tokens[piece])
                labels.add(target[piece])
                rows.append(row)
            empty += not learns
        self._check_long(long, longest.__getitem__)
        if not len(rows):
            expected, fix = "tokens to learn", "check the columns; chats need messages of the role assistant"
            raise bad_data(f"{self.split} data, data.{self.key}", expected, "none in any sample", fix)
        if empty:
            self._tell(f"{empty:,} without a token to learn, left out")
        table, mask = ids.padded(self.fill)
        target_table, _ = labels.padded(IGNORED)
        self._check_ids(table)
        columns = {"input_ids": table, "attention_mask": mask, "labels": target_table}
        return columns, np.frombuffer(rows, np.int64)

    def _check_long(self, long: list[int], size: Callable[[int], int], *, may_cut: bool = True) -> None:
        if not long or (self.form.long_texts == "split" and may_cut and self.model.purpose == "causal"):
            return
        if may_cut and self.form.long_texts == "truncate":
            self._tell(f"{len(long):,} of {len(self.table.numbered):,} longer than {self.longest:,} tokens, truncated")
            return
        row = max(long, key=size)
        found = f"{len(long):,} longer ones, the longest with {size(row):,} in row {self.table.numbered[row]} (from 0)"
        told = "write data.long_texts: truncate to cut them off" if may_cut else "shorten or remove them"
        if may_cut and self.model.purpose == "causal" and self.key == "text":
            told += ", or split to make several sequences of each"
        expected = f"sequences of at most {self.longest:,} tokens"
        raise bad_data(f"{self.split} data, data.{self.key}", expected, found, told)

    def _check_ids(self, *tables: Tensor) -> None:
        largest = max(int(table.max()) for table in tables)
        if self.model.vocabulary is not None and largest >= self.model.vocabulary:
            self._vocabulary(f"token {largest:,}")

    def _vocabulary(self, found: str) -> None:
        expected = f"tokens below {self.model.vocabulary:,}, as many as the model has embeddings of"
        fix = "set model.tokenizer to the folder of the tokenizer that the model was trained with"
        raise bad_data("tokenizer and model", expected, found, fix)

    # Texts --------------------------------------------------------------------------------------------

    def _texts(self) -> list[list[str]]:
        return [self.table.texts(name, "data.text") for name in self.form.text or ()]

    def _pair(self) -> tuple[list[str], list[str]]:
        names = str(self.form.prompt), str(self.form.completion)
        return self.table.texts(names[0], "data.prompt"), self.table.texts(names[1], "data.completion")

    def _encoded(self, texts: Sequence[str], *, target: bool = False) -> Iterator[list[int]]:
        tell = self._told("texts", len(texts))
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            try:
                with silent():  # it warns of long texts, which are counted here
                    found = self.tokenizer(text_target=some) if target else self.tokenizer(some)
            except Exception as error:  # tokenizers raise almost anything on texts they were not made for
                where = f"{self.split} data, rows from {self.table.numbered[0] + start}"
                raise bad_data(where, "texts that the tokenizer takes", said(error), "check the texts") from error
            yield from found["input_ids"]
            tell(start + len(some))

    def _bytes(self, labels: Tensor) -> list[int]:
        """UTF-8 bytes of what is learned: the first token of a sequence is not predicted."""
        learned = [row[1:][row[1:] != IGNORED].tolist() for row in labels]
        return [len(text.encode()) for text in self.tokenizer.batch_decode(learned, skip_special_tokens=True)]

    def _where(self, name: str, key: str) -> Callable[[int], str]:
        return lambda row: self.table.cell(name, key, row)

    def _told(self, what: str, total: int) -> Callable[[int], None]:
        return lambda done: progress(self.listen, f"reading {self.split} {what}", done, total, unit=what)

    def _tell(self, text: str) -> None:
        self.listen(Event("phase", {"text": f"{self.split} data: {text}"}))


def _which(answer: Any, options: Sequence[str], where: str) -> int:
    """The number of the right choice: its text, its letter or its number, counted from 0."""
    if isinstance(answer, str):
        if answer in options:
            return options.index(answer)
        letter = ord(answer) - ord("A") if len(answer) == 1 else -1
        number = int(answer) if answer.isdecimal() and len(answer) < 4 else letter
    else:
        number = int(answer) if isinstance(answer, (int, np.integer)) and not isinstance(answer, bool) else -1
    if not 0 <= number < len(options):
        expected = f"one of the {len(options)} choices: its text, its letter from A, or its number from 0"
        raise wrong_answer(where, expected, answer)
    return number


def wrong_answer(where: str, expected: str, answer: Any) -> DataError:
    return bad_data(where, expected, repr(answer)[:80], "correct the row")

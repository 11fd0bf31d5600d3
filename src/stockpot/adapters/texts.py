"""From texts to token ids, and which of the tokens a model learns.

Texts become ids once, some at a time, into plain arrays: a list of Python numbers would take nine times the memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.chats import chat_parts, check_columns
from stockpot.adapters.code import said, silent
from stockpot.adapters.labels import read_tags
from stockpot.adapters.models import LoadedModel
from stockpot.adapters.splits import DataSource
from stockpot.adapters.tables import Array, Table, bad_data
from stockpot.events import Event, Listener, progress
from stockpot.task.loss import IGNORED

_AT_ONCE = 512  # texts that become ids before it is told
_MOST_PADDED = 2**31  # tokens of a split: 16 GiB
_PIECE = 1024  # tokens of a piece, where neither the recipe nor the model says less

# Ids, labels of the same length (the id, or IGNORED), and bytes of each token's text or nothing.
Part = tuple[Sequence[int], Sequence[int], Sequence[int]]


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

    def padded(self, fill: int) -> tuple[Tensor, Tensor]:
        """The sequences as (n, T) with `fill` behind them, and a mask of 1 where they are; int64 both."""
        lengths, width = self.lengths, int(self.lengths.max(initial=1))
        if len(lengths) * width > _MOST_PADDED:
            found = f"{len(lengths):,} sequences, the longest of {width:,} tokens, which all are as wide as that"
            fix = "cut or leave out the longest: data.max_length with data.long_texts, or fewer samples"
            raise bad_data("the texts", f"at most {_MOST_PADDED:,} tokens with padding", found, fix)
        mask = np.arange(width) < lengths[:, None]
        table = np.full(mask.shape, fill, np.int64)
        table[mask] = np.frombuffer(self._flat, np.int32) if self._flat else ()
        return torch.from_numpy(table), torch.from_numpy(mask.astype(np.int64))


def learned_after(before: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Labels of a text: its ids behind those that it shares with its beginning, tokenised alone."""
    shared = 0
    while shared < min(len(before), len(ids)) and before[shared] == ids[shared]:
        shared += 1
    return [IGNORED] * shared + [*ids[shared:]]


class TextReader:
    """Reads the texts of one split with a model's tokenizer."""

    def __init__(self, source: DataSource, model: LoadedModel, table: Table, split: str, listen: Listener) -> None:
        key = next((k for k in ("text", "messages", "prompt", "words") if getattr(source.columns, k)), "text")
        self.source, self.columns, self.model, self.table = source, source.columns, model, table
        self.split, self.listen, self.key = split, listen, key
        if model.tokenizer is None:
            fix = "give the model as model.transformers, or the token ids in data.tokens or data.python"
            raise bad_data(f"data.{key}", "a transformers model, which has a tokenizer", "another one", fix)
        self.tokenizer = tokenizer = model.tokenizer()
        size = getattr(tokenizer, "vocab_size", 0)
        if model.vocabulary is not None and size > model.vocabulary:
            expected = f"tokens below {model.vocabulary:,}, as many as the model has embeddings of"
            fix = "set model.tokenizer to the folder of the tokenizer that the model was trained with"
            raise bad_data("tokenizer and model", expected, f"a tokenizer of {size:,} tokens", fix)
        own = getattr(tokenizer, "model_max_length", None)
        if isinstance(own, bool) or not isinstance(own, int | float | None) or (own is not None and not own >= 1):
            fix = "correct model_max_length in tokenizer_config.json, or remove it"
            raise bad_data("the tokenizer", "a positive model_max_length", repr(own)[:80], fix)
        known = [n for n in (model.max_length, own and int(min(own, 2**30))) if n]
        context, given = min(known, default=2**30), source.max_length
        if given is not None and model.max_length is not None and given > model.max_length:
            expected = f"at most {model.max_length:,}, the model's context"
            raise bad_data("data.max_length", expected, f"{given:,}", "ask for fewer tokens")
        self.splits = source.long_texts in ("split", "pack")
        pieces = min(context, _PIECE) if self.splits else context
        self.longest: int = given or pieces
        named = (getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id"))
        fits = (n for n in named if n is not None and n < (model.vocabulary or 2**31))
        self.fill: int = next(fits, 0)

    # Forms of text ------------------------------------------------------------------------------------

    def read(self) -> tuple[dict[str, Tensor], Array]:
        """Columns of a batch, and the row of the table (as it is, or its share) that each sample is from."""
        if self.key == "words":
            return self._tagged()
        if self.model.purpose == "seq2seq" and self.key == "prompt":
            return self._seq2seq()
        if self.model.purpose != "causal":
            return self._inputs()
        if self.key == "text":
            return self._causal((ids, ids, sizes) for ids, sizes in self._sized(self._texts()[0]))
        if self.key == "messages":
            name = str(self.columns.messages)
            chats = list(self.table.column(name, "data.messages"))
            check_columns(self.table)
            tell = self._told("chats", len(chats))
            parts = chat_parts(self.tokenizer, chats, lambda row: self.table.cell(name, "data.messages", row), tell)
            return self._causal((ids, labels, ()) for ids, labels in parts)
        return self._causal(self._completions(*self._pair()))

    def _inputs(self) -> tuple[dict[str, Tensor], Array]:
        """What a classifier is called with."""
        texts = self._texts()
        return self._columns(self._whole(*texts)), np.arange(len(texts[0]))

    def _whole(self, *texts: Sequence[Any], **options: Any) -> Any:
        """What the tokenizer makes of texts, or of pairs of them, with all that it puts around them."""
        with silent():
            whole = self.tokenizer(*texts, **options)
            long = [row for row, ids in enumerate(whole["input_ids"]) if len(ids) > self.longest]
            self._check_long(long, lambda row: len(whole["input_ids"][row]))
            if long:
                whole = self.tokenizer(*texts, truncation=True, max_length=self.longest, **options)
        return whole

    def _columns(self, whole: Any) -> dict[str, Tensor]:
        return {name: Ids(rows).padded(self.fill if name == "input_ids" else 0)[0] for name, rows in whole.items()}

    def _tagged(self) -> tuple[dict[str, Tensor], Array]:
        """Words with tags: each word's first token has the label; sentences without words are left out and counted."""
        if not getattr(self.tokenizer, "is_fast", False):
            fix = "save the tokenizer as tokenizer.json (AutoTokenizer does), or give data.python"
            raise bad_data("data.words", "a fast tokenizer, which says which word a token is of", "a slow one", fix)
        columns = str(self.columns.words), str(self.columns.tags)
        words, tags = read_tags(self.table, *columns, self.source.classes, self.model.class_names, self.model.classes)
        rows = np.array([row for row, sentence in enumerate(words) if sentence], dtype=np.int64)
        if not len(rows):
            raise bad_data(f"{self.split} data, data.words", "sentences with words", "none", "check the column")
        if empty := len(words) - len(rows):
            self._tell(f"{empty:,} without a word, left out")
        try:
            whole = self._whole([words[row] for row in rows], is_split_into_words=True)
        except (AssertionError, ValueError) as error:
            fix = "save it with add_prefix_space=True, if it says so"
            raise bad_data("data.words", "a tokenizer that takes single words", said(error), fix) from error
        made = self._columns(whole)
        labels = torch.full_like(made["input_ids"], IGNORED)
        for place, row in enumerate(rows.tolist()):
            before = None
            for position, word in enumerate(whole.word_ids(place)):
                if word is not None and word != before:
                    labels[place, position] = tags[row][word]
                before = word
        return {**made, "labels": labels}, rows

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
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}, np.arange(len(both))

    def _completions(self, prompts: Sequence[str], completions: Sequence[str]) -> Iterator[Part]:
        """Prompt and completion as one text; learned is what comes after the tokens it shares with the prompt alone.

        A token that joins the end of the prompt to the completion is learned. Then comes the end of text, if any.
        """
        end = getattr(self.tokenizer, "eos_token_id", None)
        whole = [p + c for p, c in zip(prompts, completions, strict=True)]
        for before, (ids, sizes) in zip(self._encoded(prompts), self._sized(whole), strict=True):
            if end is not None and (not ids or ids[-1] != end):
                ids, sizes = [*ids, end], [*sizes, 0] if sizes else sizes
            yield ids, learned_after(before, ids), sizes

    # From sequences to columns ------------------------------------------------------------------------

    def _causal(self, parts: Iterable[Part]) -> tuple[dict[str, Tensor], Array]:
        """Ids and labels of one length; sequences without a label to predict are left out and counted."""
        ids, labels, rows, judged = Ids(), Ids(), array("q"), array("q")
        long, longest, empty = [], {}, 0
        for row, (tokens, target, sizes) in (
            self._packed(parts) if self.source.long_texts == "pack" else enumerate(parts)
        ):
            if len(tokens) > self.longest:
                long.append(row)
                longest[row] = len(tokens)
            stop = len(tokens) if self.splits else self.longest
            learns = False
            for start in range(0, min(stop, len(tokens)), self.longest):
                piece = slice(start, start + self.longest)
                if all(label == IGNORED for label in target[piece][1:]):
                    continue
                learns = True
                ids.add(tokens[piece])
                labels.add(target[piece])
                rows.append(row)
                seen = zip(sizes[piece][1:], target[piece][1:], strict=False)  # the first token is not predicted
                judged.append(sum(size for size, label in seen if label != IGNORED))
            empty += not learns
        self._check_long(long, longest.__getitem__)
        if not len(rows):
            expected, fix = "tokens to learn", "check the columns; chats need messages of the role assistant"
            if long and not self.splits:
                fix += f"; or all that is learned came after {self.longest:,} tokens, where it was truncated"
            raise bad_data(f"{self.split} data, data.{self.key}", expected, "none in any sample", fix)
        if empty:
            self._tell(f"{empty:,} without a token to learn, left out")
        table, mask = ids.padded(self.fill)
        target_table, _ = labels.padded(IGNORED)
        columns = {"input_ids": table, "attention_mask": mask, "labels": target_table}
        if self._wants_bytes:
            columns["bytes"] = torch.from_numpy(np.array(judged, np.int64))
        return columns, np.frombuffer(rows, np.int64)

    def _packed(self, parts: Iterable[Part]) -> Iterator[tuple[int, Part]]:
        """Texts in their order, joined as far as whole ones fit, and the row of the first; what is learned stays.

        So no text is in two sequences, and a sequence is as independent of the others as texts are.
        """
        end = getattr(self.tokenizer, "eos_token_id", None)
        first, texts, sequences = 0, 0, 0
        held: tuple[list[int], list[int], list[int]] = ([], [], [])
        for row, part in enumerate(parts):
            tokens, target, sizes = part
            between = [end] if end is not None and held[0] and held[0][-1] != end else []
            if len(held[0]) + len(between) + len(tokens) > self.longest and held[0]:
                yield first, held
                held, between = ([], [], []), []
            if not held[0]:
                first, sequences = row, sequences + bool(tokens)
            texts += bool(tokens)
            held[0].extend([*between, *tokens])
            held[1].extend([*[IGNORED] * (len(between) + bool(tokens)), *target[1:]])
            held[2].extend([*[0] * len(between), *sizes] if sizes else [])
            if not tokens:
                yield row, part  # to be counted
        if held[0]:
            yield first, held
        self._tell(f"{texts:,} texts joined to {sequences:,} sequences")

    def _check_long(self, long: list[int], size: Callable[[int], int]) -> None:
        if not long or (self.splits and self.model.purpose == "causal"):
            return
        if self.source.long_texts == "truncate":
            self._tell(f"{len(long):,} sequences longer than {self.longest:,} tokens, truncated")
            return
        row = max(long, key=size)
        found = f"{len(long):,} longer ones, the longest with {size(row):,} in row {self.table.number(row)} (from 0)"
        told = "write data.long_texts: truncate to cut them off"
        if self.model.purpose == "causal" and self.key == "text":
            told += ", or split to make several sequences of each, or pack to join short ones as well"
        expected = f"sequences of at most {self.longest:,} tokens"
        raise bad_data(f"{self.split} data, data.{self.key}", expected, found, told)

    # Texts --------------------------------------------------------------------------------------------

    def _texts(self) -> list[list[str]]:
        return [self.table.texts(name, "data.text") for name in self.columns.text or ()]

    def _pair(self) -> tuple[list[str], list[str]]:
        names = str(self.columns.prompt), str(self.columns.completion)
        return self.table.texts(names[0], "data.prompt"), self.table.texts(names[1], "data.completion")

    def _encoded(self, texts: Sequence[str], *, target: bool = False) -> Iterator[list[int]]:
        tell = self._told("texts", len(texts))
        for start in range(0, len(texts), _AT_ONCE):
            some = list(texts[start : start + _AT_ONCE])
            try:
                with silent():  # it warns of long texts, which are counted here
                    found = self.tokenizer(text_target=some) if target else self.tokenizer(some)
            except Exception as error:  # tokenizers raise almost anything on texts they were not made for
                where = f"{self.split} data, rows from {start}"
                raise bad_data(where, "texts that the tokenizer takes", said(error), "check the texts") from error
            yield from found["input_ids"]
            tell(start + len(some))

    @property
    def _wants_bytes(self) -> bool:
        return self.source.metric == "bits_per_byte"

    def _sized(self, texts: Sequence[str]) -> Iterator[tuple[list[int], Sequence[int]]]:
        """Ids of each text and, where they are wanted, how many bytes of it each token adds."""
        if not self._wants_bytes:
            yield from ((ids, ()) for ids in self._encoded(texts))
            return
        if not getattr(self.tokenizer, "is_fast", False):
            fix = "save the tokenizer as tokenizer.json (AutoTokenizer does), or report nats_per_token"
            raise bad_data("metric bits_per_byte", "a fast tokenizer, which says where a token is", "a slow one", fix)
        for text, ids in zip(texts, self._encoded(texts), strict=True):
            with silent():
                places = self.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
            until = np.cumsum([0, *(len(letter.encode("utf-8", "surrogatepass")) for letter in text)])
            ends = np.maximum.accumulate([until[stop] for _, stop in places]) if places else np.zeros(0, np.int64)
            yield ids, np.diff(ends, prepend=0).tolist()

    def _told(self, what: str, total: int) -> Callable[[int], None]:
        return lambda done: progress(self.listen, f"reading {self.split} {what}", done, total, unit=what)

    def _tell(self, text: str) -> None:
        self.listen(Event("phase", {"text": f"{self.split} data: {text}"}))

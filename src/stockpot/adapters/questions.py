"""Questions with options to choose from, and prompts whose answers are generated: what the metrics of both read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stockpot.adapters.chats import last_turns
from stockpot.adapters.tables import Array, as_text, bad_data, is_missing
from stockpot.adapters.texts import Ids, TextReader, learned_after
from stockpot.task.loss import IGNORED

Options = list[str | None]  # of one sample; None where it has none of this number


class QuestionReader(TextReader):
    """Reads prompts with options and the right one of them, or with completions that are to be generated."""

    def read(self) -> tuple[dict[str, Tensor], Array]:
        if self.columns.choices is not None:
            return self._chosen()
        columns, rows = super().read()
        columns |= self._generated(rows)
        if self.split.partition(".")[0] == "report":  # samples that are not judged say nothing there
            judged = (columns["answer_ids"] != IGNORED).any(1)
            columns, rows = {name: column[judged] for name, column in columns.items()}, rows[judged.numpy()]
        return columns, rows

    # Multiple choice ----------------------------------------------------------------------------------

    def _chosen(self) -> tuple[dict[str, Tensor], Array]:
        """The right option is learned behind its prompt; all of them, and which is right, are for the metric."""
        prompts, options = self.table.texts(str(self.columns.prompt), "data.prompt"), self._options()
        answers = self._answers(options)
        each = [(row, n) for row, given in enumerate(options) for n, option in enumerate(given) if option is not None]
        whole = self._without_end([f"{prompts[row]}{options[row][n]}" for row, n in each])
        before = list(self._encoded(prompts))
        ids = dict(zip(each, whole, strict=True))
        sizes = [0] * len(prompts)
        for (row, _), one in ids.items():
            sizes[row] = max(sizes[row], len(one))
        self._check_long([row for row, size in enumerate(sizes) if size > self.longest], sizes.__getitem__)
        labels = {key: learned_after(before[key[0]], one)[-self.longest :] for key, one in ids.items()}
        ids = {key: one[-self.longest :] for key, one in ids.items()}  # where cutting was asked for: the prompt's begin
        n, most = len(prompts), max(map(len, options))
        needed = n * most * (16 * max(map(len, ids.values())) + 200)  # ids and labels, and who has which
        if needed > self.source.memory_limit:
            where, found = f"{self.split} data, data.choices", f"{needed:,}: {most:,} options in some sample"
            fix = "remove samples with so many or such long options, or raise data.memory_limit"
            raise bad_data(where, f"tables of at most {self.source.memory_limit:,} bytes", found, fix)
        every = [(row, number) for row in range(n) for number in range(most)]
        right = list(enumerate(answers))
        made = {
            "options": Ids(ids.get(key, ()) for key in every).padded(self.fill)[0].view(n, most, -1),
            "option_labels": Ids(labels.get(key, ()) for key in every).padded(IGNORED)[0].view(n, most, -1),
            "option_lengths": torch.tensor([[_length(given, number) for number in range(most)] for given in options]),
            "answer": torch.tensor(answers),
        }
        table, mask = Ids(ids[key] for key in right).padded(self.fill)
        learned = Ids(labels[key] for key in right).padded(IGNORED)[0]
        return {"input_ids": table, "attention_mask": mask, "labels": learned, **made}, np.arange(n)

    def _options(self) -> list[Options]:
        names = self.columns.choices or ()
        rows = zip(*(self.table.column(name, "data.choices") for name in names), strict=True)
        found: list[Options] = []
        for row, cells in enumerate(rows):
            where = self.table.cell(", ".join(names), "data.choices", row)
            given = cells
            if len(names) == 1:
                given = cells[0].tolist() if isinstance(cells[0], np.ndarray) else cells[0]
                if not isinstance(given, (list, tuple)):
                    fix = "name a column of lists, or one column for each option: choices: [a, b, c]"
                    raise bad_data(where, "a list of options", repr(given)[:80], fix)
            texts: Options = [None if is_missing(one) or one == "" else as_text(one, where) for one in given]
            if sum(text is not None for text in texts) < 2:
                few = "no options" if not any(texts) else "one"
                raise bad_data(where, "two options or more", few, "correct the sample or remove it")
            found.append(texts)
        return found

    def _answers(self, options: Sequence[Options]) -> list[int]:
        """The right option of each sample; all of them are numbers, or all letters, or all texts."""
        name = str(self.columns.answer)
        cells = [text.strip() for text in self.table.texts(name, "data.answer")]
        readings = {"number": _number, "letter": _letter, "text": _text}
        found = {kind: [read(*one) for one in zip(cells, options, strict=True)] for kind, read in readings.items()}
        whole = {kind: [n for n in numbers if n is not None] for kind, numbers in found.items()}
        fitting = [numbers for numbers in whole.values() if len(numbers) == len(cells)]
        if not fitting:
            kind = max(whole, key=lambda kind: len(whole[kind]))
            row = found[kind].index(None)
            fix = "correct the answer; numbers count from 0"
            expected = "the number (from 0), the letter (from A) or the text of one of the sample's options"
            raise bad_data(self.table.cell(name, "data.answer", row), expected, repr(cells[row])[:80], fix)
        if any(numbers != fitting[0] for numbers in fitting):
            ways = " and as ".join(f"{kind}s" for kind, numbers in whole.items() if numbers in fitting)
            expected, fix = "answers that can be read in one way", "write the letters of the options: A, B, ..."
            raise bad_data(f"data.answer: {name}", expected, f"some that can be read as {ways}", fix)
        return fitting[0]

    # Generation ---------------------------------------------------------------------------------------

    def _generated(self, rows: Array) -> dict[str, Tensor]:
        """Prompts, padded on the left, and answers of the samples that are judged; nothing for the others."""
        n, some = len(rows), self.source.generate
        judged = np.zeros(n, bool)
        judged[np.random.RandomState(self.source.seed).permutation(n)[:some]] = True
        if not judged.all():
            self._tell(f"{int(judged.sum()):,} of {n:,} answers are generated (data.generate)")
        chosen = rows[judged].tolist()
        if self.columns.messages is not None:
            name = self.columns.messages
            chats, where = self.table.column(name, "data.messages"), self.table.cell
            places = [where(name, "data.messages", row) for row in chosen]
            turns = [*last_turns(self.tokenizer, [chats[row] for row in chosen], places.__getitem__)]
            given = [self._bare(before) for before, _ in turns]
            said = [self._bare(answer) for _, answer in turns]
        else:
            prompts, texts = self._pair()
            given = self._without_end([prompts[row] for row in chosen])
            said = [self._bare(texts[row]) for row in chosen]
        prompt_of, answer_of = (dict(zip(np.flatnonzero(judged).tolist(), each, strict=True)) for each in (given, said))
        wanted = Ids(answer_of.get(row, ()) for row in range(n)).padded(IGNORED)[0]
        if self.model.purpose == "seq2seq":
            return {"answer_ids": wanted}
        room = self.longest - wanted.shape[1] - 1
        long = sum(len(ids) > max(room, 0) for ids in given)
        if long:
            if room < 1 or self.source.long_texts != "truncate":
                expected = f"prompts of at most {room:,} tokens: the longest answer of {wanted.shape[1]:,} comes after"
                fix = "leave such samples out, or write data.long_texts: truncate to cut off the beginnings of prompts"
                raise bad_data(f"{self.split} data, data.{self.key}", expected, f"{long:,} longer ones", fix)
            self._tell(f"{long:,} prompts longer than {room:,} tokens, beginnings cut off")
        ids, mask = Ids(prompt_of.get(row, [])[::-1][:room] for row in range(n)).padded(self.fill)
        return {"prompt_ids": ids.flip(1), "prompt_mask": mask.flip(1), "answer_ids": wanted}

    def _bare(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _without_end(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that more may follow: some tokenizers put an end of text behind each."""
        end: Any = getattr(self.tokenizer, "eos_token_id", None)
        return [ids[:-1] if ids and ids[-1] == end else ids for ids in self._encoded(texts)]


def _length(options: Options, number: int) -> int:
    """Characters of an option without blanks around it."""
    return len((options[number] or "").strip()) if number < len(options) else 0


def _number(answer: str, options: Options) -> int | None:
    number = int(answer) if re.fullmatch("[0-9]{1,9}", answer) else len(options)
    return number if number < len(options) and options[number] is not None else None


def _letter(answer: str, options: Options) -> int | None:
    return _number(str(ord(answer) - ord("A")), options) if re.fullmatch("[A-Z]", answer) else None


def _text(answer: str, options: Options) -> int | None:
    same = [number for number, option in enumerate(options) if option is not None and option.strip() == answer]
    return same[0] if len(same) == 1 else None

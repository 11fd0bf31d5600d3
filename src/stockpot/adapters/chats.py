"""Chats through a tokenizer's template: which tokens are the assistant's.

A template that marks them itself (`{% generation %}`) is believed. For any other the assistant's part of a chat is what
a prefix of it gains by one more message of the assistant, and it is refused where prefixes are no prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from stockpot.adapters.extras import said, silent
from stockpot.adapters.tables import bad_data
from stockpot.errors import DataError
from stockpot.task.loss import IGNORED

_MARKED = re.compile(r"\{%-?\s*generation\b")
_AT_ONCE = 128


def chat_parts(
    tokenizer: Any, chats: Sequence[Any], where: Callable[[int], str], tell: Callable[[int], None]
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of every chat, and labels: the id where it is the assistant's, elsewhere IGNORED."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        fix = (
            "add the chat_template.jinja the models were trained with to the tokenizer's folder, or write each chat as"
        )
        fix += " data.prompt and data.completion"
        raise bad_data("data.messages", "a tokenizer with a chat template", "one without", fix)
    for row, chat in enumerate(chats):
        _check(chat, where(row))
    spans = _marked if _MARKED.search(template) else _by_prefixes
    for start in range(0, len(chats), _AT_ONCE):
        some = [list(chat) for chat in chats[start : start + _AT_ONCE]]
        with silent():
            try:
                found = spans(tokenizer, some, lambda row: where(row + start))  # noqa: B023  (used before the next)
            except DataError:
                raise
            except Exception as error:  # templates raise on chats they are not made for
                place = f"{where(start)} or one of the next {len(some) - 1}" if len(some) > 1 else where(start)
                fix = "correct the chat: roles must be those the template knows, in the order it wants"
                raise bad_data(place, "a chat that the template takes", said(error), fix) from error
        for ids, learned in found:
            yield ids, [token if yes else IGNORED for token, yes in zip(ids, learned, strict=True)]
        tell(start + len(some))


def _check(chat: Any, where: str) -> None:
    good = isinstance(chat, (list, tuple)) and len(chat) > 0
    if not good or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in chat):
        expected = "a list of messages, each with role and content"
        fix = "name a column of such lists in data.messages"
        raise bad_data(where, expected, repr(chat)[:80] if not good else f"messages {chat!r}"[:80], fix)


def _marked(
    tokenizer: Any,
    chats: list[list[dict[str, Any]]],
    where: Callable[[int], str],  # noqa: ARG001  (as `_by_prefixes` has it)
) -> list[tuple[list[int], list[Any]]]:
    found = tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return [*zip(found["input_ids"], found["assistant_masks"], strict=True)]


def _by_prefixes(
    tokenizer: Any, chats: list[list[dict[str, Any]]], where: Callable[[int], str]
) -> list[tuple[list[int], list[Any]]]:
    """Of a chat of n messages: it as a whole, and for each message of the assistant the chat before and with it."""
    texts: list[str] = []
    turns: list[list[int]] = []

    def render(messages: list[dict[str, Any]], begin: bool = False) -> None:
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin))

    for chat in chats:
        turns.append([n for n, message in enumerate(chat) if message["role"] == "assistant"])
        render(chat)
        for n in turns[-1]:
            render(chat[:n], True)
            render(chat[: n + 1])
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    made = []
    for row, ends in enumerate(turns):
        whole = next(ids)
        learned = [False] * len(whole)
        for n in ends:
            before, after = next(ids), next(ids)
            if whole[: len(after)] != after or after[: len(before)] != before:
                expected = (
                    "a chat template that marks the assistant's tokens, or renders a chat as its beginning and more"
                )
                found = f"neither: message {n} (from 0) changes what comes before it"
                fix = "put {% generation %} and {% endgeneration %} around the assistant's content in the chat template"
                fix += ", or write each chat as data.prompt and data.completion"
                raise bad_data(where(row), expected, found, fix)
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        made.append((whole, learned))
    return made

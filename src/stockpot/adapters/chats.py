"""Chats through a tokenizer's template: which tokens are the assistant's.

A template that marks them itself (`{% generation %}`) is believed. For any other the assistant's part of a chat is what
a prefix of it gains by one more message of the assistant, and it is refused where prefixes are no prefixes.

A template is a small program of whoever made the tokenizer. The library's sandbox keeps it from files and code, and
`_rendered` from going on for ever.
"""

from __future__ import annotations

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

from stockpot.adapters.code import said, silent
from stockpot.adapters.tables import Table, as_text, bad_data, is_missing
from stockpot.task.loss import IGNORED

_MARKED = re.compile(r"\{%-?\s*generation\b")
_AT_ONCE = 128
_SECONDS, _BYTES = 10, 2**30  # of processor time and memory that a template may take for one chat
_ALSO_READ = ("tools", "documents", "chat_template_kwargs")  # columns that trainers give to a template, too


def chat_parts(
    tokenizer: Any, chats: Sequence[Any], where: Callable[[int], str], tell: Callable[[int], None]
) -> Iterator[tuple[list[int], list[int]]]:
    """Ids of every chat, and labels: the id where it is the assistant's, elsewhere IGNORED."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        fix = "add the chat_template.jinja the models were trained with to the tokenizer's folder, or write each chat "
        fix += "as data.prompt and data.completion"
        raise bad_data("data.messages", "a tokenizer with a chat template", "one without", fix)
    for row, chat in enumerate(chats):
        _check(chat, where(row))
    spans = _marked if _MARKED.search(template) else _by_prefixes
    for start in range(0, len(chats), _AT_ONCE):
        some = [list(chat) for chat in chats[start : start + _AT_ONCE]]
        with silent():
            found = spans(tokenizer, some, lambda row: where(row + start))  # noqa: B023  (used before the next)
        for ids, learned in found:
            yield ids, [token if yes else IGNORED for token, yes in zip(ids, learned, strict=True)]
        tell(start + len(some))


def last_turns(tokenizer: Any, chats: Sequence[Any], where: Callable[[int], str]) -> Iterator[tuple[str, str]]:
    """Of chats that were read before: the text up to the assistant's last message, and what that says."""
    for row, chat in enumerate(chats):
        last = max(n for n, message in enumerate(chat) if message["role"] == "assistant")
        yield _rendered(tokenizer, list(chat[:last]), where(row), True), as_text(chat[last]["content"], where(row))


def check_columns(table: Table) -> None:
    """Refuse what trainers would give to the template beside the messages: without it the text would be another."""
    for name in table.columns.keys() & set(_ALSO_READ):
        rows = table.column(name, "data.messages")
        given = (
            n for n, cell in enumerate(rows) if not (is_missing(cell) or (isinstance(cell, Sized) and not len(cell)))
        )
        if (row := next(given, None)) is not None:
            expected = "nothing that a trainer would give to the chat template beside the messages"
            fix = "write each chat as data.prompt and data.completion, rendered with it, or remove the column"
            raise bad_data(table.cell(name, "data.messages", row), expected, repr(rows[row])[:80], fix)


def _check(chat: Any, where: str) -> None:
    good = isinstance(chat, (list, tuple)) and len(chat) > 0
    if not good or not all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in chat):
        expected, fix = "a list of messages, each with role and content", "name a column of such lists in data.messages"
        raise bad_data(where, expected, repr(chat)[:80] if not good else f"messages {chat!r}"[:80], fix)
    for number, message in enumerate(chat):
        if is_missing(message["content"]) and not message.get("tool_calls"):
            fix = "fill it in or remove the chat"  # a template would write the word None
            raise bad_data(where, f"content in message {number} (from 0)", "nothing", fix)


def _marked(
    tokenizer: Any, chats: list[list[dict[str, Any]]], where: Callable[[int], str]
) -> list[tuple[list[int], list[Any]]]:
    for row, chat in enumerate(chats):
        _rendered(tokenizer, chat, where(row))
    found = tokenizer.apply_chat_template(chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    return [*zip(found["input_ids"], found["assistant_masks"], strict=True)]


def _by_prefixes(
    tokenizer: Any, chats: list[list[dict[str, Any]]], where: Callable[[int], str]
) -> list[tuple[list[int], list[Any]]]:
    """Of a chat of n messages: it as a whole, and for each message of the assistant the chat before and with it."""
    texts: list[str] = []
    turns: list[list[int]] = []
    for row, chat in enumerate(chats):
        turns.append([n for n, message in enumerate(chat) if message["role"] == "assistant"])
        texts.append(_rendered(tokenizer, chat, where(row)))
        for n in turns[-1]:
            if not n:
                expected = "a message of somebody else first, where the chat template does not mark the assistant's"
                fix = "begin the chat with its system or user message"
                raise bad_data(where(row), expected, "one of the assistant", fix)
            texts.append(_rendered(tokenizer, chat[:n], where(row), True))
            texts.append(_rendered(tokenizer, chat[: n + 1], where(row)))
    ids = iter(tokenizer(texts, add_special_tokens=False)["input_ids"])
    made = []
    for row, ends in enumerate(turns):
        whole = next(ids)
        learned = [False] * len(whole)
        for n in ends:
            before, after = next(ids), next(ids)
            if whole[: len(after)] != after or after[: len(before)] != before:
                expected = "a chat template that marks the assistant's tokens, or renders a chat as beginning and more"
                found = f"neither: message {n} (from 0) changes what comes before it"
                fix = "put {% generation %} and {% endgeneration %} around the assistant's content in the chat template"
                fix += ", or write each chat as data.prompt and data.completion"
                raise bad_data(where(row), expected, found, fix)
            learned[len(before) : len(after)] = [True] * (len(after) - len(before))
        made.append((whole, learned))
    return made


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], place: str, begin: bool = False) -> str:
    expected = f"a text within {_SECONDS} s and {_BYTES / 2**30:g} GiB, and of bearable length"
    fix = "read the template: it is a program of whoever made the tokenizer"
    try:
        with _bounded():
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=begin)
    except (_TooLongError, MemoryError) as error:
        raise bad_data("the tokenizer's chat template", expected, "more", fix) from error
    except Exception as error:  # templates raise on chats they are not made for
        fix = "correct the chat: roles must be those the template knows, in the order it wants"
        raise bad_data(place, "a chat that the template takes", said(error), fix) from error
    raw = (str(m["content"]) for m in messages if isinstance(m["content"], (dict, list)))
    if found := next((one for one in raw if one in text), None):
        fix = "write the content as one text, or use the template that the models were trained with"
        raise bad_data(place, "content that the chat template can read", f"it writes {found[:80]}", fix)
    if len(text) > 2**18 + 32 * len(repr(messages)):
        raise bad_data("the tokenizer's chat template", expected, f"{len(text):,} letters", fix)
    return as_text(text, place)


class _TooLongError(Exception):
    pass


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Limits of time and memory, where the system has them: a signal reaches the main thread only."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    import resource

    def stop(number: int, frame: Any) -> None:  # noqa: ARG001  (a handler's shape)
        raise _TooLongError

    usual, limits = signal.signal(signal.SIGPROF, stop), resource.getrlimit(resource.RLIMIT_AS)
    timer, size = signal.setitimer(signal.ITIMER_PROF, _SECONDS, 1), Path("/proc/self/statm")
    try:
        if size.exists():
            most = int(size.read_text().split()[0]) * resource.getpagesize() + _BYTES
            if limits[0] == resource.RLIM_INFINITY or most < limits[0]:
                resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, *timer)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGPROF, usual)

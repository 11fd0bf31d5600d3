"""Film reviews to learn English from, and presidents' speeches to turn to: both as sequences of token numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from convert.parts import Array

LENGTH, VOCABULARY = 128, 4096
END = "<|end|>"  # after every text
SHARES = {"test": 0.25, "fit": 0.15, "dev": 0.1}  # of the speeches; the rest is `train`
HELD_REVIEWS = 3000


def convert(read: Callable[[str], bytes], out: Path) -> None:
    """`out/tokenizer.json`, and `out/tokens/PART.npz`: `x` (n, 128) uint16 and `text` (n,), the text a row begins in.

    `reviews` is for pre-training and `held_reviews` for what is left of it later; `train`, `fit`, `dev` and `test` are
    of different speeches. No text is in two parts.
    """
    folder = out / "tokens"
    folder.mkdir(parents=True, exist_ok=True)
    order = np.random.default_rng(0)
    reviews = [*dict.fromkeys(review["t"].replace("<br />", "\n") for review in json.loads(read("reviews.json")))]
    reviews = [reviews[i] for i in order.permutation(len(reviews))]
    speeches = [json.loads(text)["text"] for text in json.loads(read("*.json")).values()]
    parts = {"held_reviews": reviews[:HELD_REVIEWS], "reviews": reviews[HELD_REVIEWS:], **_divided(speeches, order)}
    tokenizer = trained(parts["reviews"])
    tokenizer.save(str(out / "tokenizer.json"))
    for part, texts in parts.items():
        rows, owners = packed(tokenizer, texts)
        np.savez_compressed(folder / f"{part}.npz", x=rows, text=owners)


def trained(texts: Iterable[str]) -> Tokenizer:
    """Byte pairs of the pre-training text alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def packed(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Array, Array]:
    """All texts one after the other, cut into rows (n, 128); and which text each row begins in, (n,)."""
    end = tokenizer.token_to_id(END)
    numbers = [np.array([*found.ids, end], np.uint16) for found in tokenizer.encode_batch_fast(list(texts))]
    stream = np.concatenate(numbers)
    owners = np.repeat(np.arange(len(numbers), dtype=np.int32), [len(one) for one in numbers])
    n = len(stream) // LENGTH
    return stream[: n * LENGTH].reshape(n, LENGTH), owners[: n * LENGTH : LENGTH]


def _divided(speeches: Sequence[str], order: np.random.Generator) -> dict[str, list[str]]:
    """Whole speeches: sentences of one speech are too much alike to be in two parts."""
    mixed = [speeches[i] for i in order.permutation(len(speeches))]
    ends = np.cumsum([round(share * len(mixed)) for share in SHARES.values()])
    starts = [0, *ends[:-1]]
    parts = {part: mixed[start:end] for part, start, end in zip(SHARES, starts, ends, strict=True)}
    return {**parts, "train": mixed[ends[-1] :]}

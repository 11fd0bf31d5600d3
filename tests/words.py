"""Texts and chats, and a real tokenizer that is trained on them on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = [
    f"the {a} {b} is {c}" for a in ("old", "new", "red") for b in ("cat", "house") for c in ("here", "gone", "big")
]
CHATS = [
    [
        {"role": "user", "content": f"what is {word}?"},
        {"role": "assistant", "content": text},
        {"role": "user", "content": "and then?"},
        {"role": "assistant", "content": word},
    ]
    for word, text in zip(("old", "new", "red") * 6, TEXTS, strict=True)
]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}%s{{ m.content }}<e>%s"
    "{% else %}{{ m.content }}<e>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PLAIN, MARKED = (
    TEMPLATE.replace("%s", ""),
    TEMPLATE.replace("%s", "{% generation %}", 1).replace("%s", "{% endgeneration %}"),
)


def tokenizer(folder: Path, template: str | None = PLAIN, size: int = 300) -> Any:
    """A real byte-level tokenizer, trained on the spot."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<e>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    build: Any = PreTrainedTokenizerFast
    fast = build(tokenizer_object=made, eos_token="<e>", chat_template=template)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    fast.save_pretrained(folder)
    return fast


def write(file: Path, records: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))

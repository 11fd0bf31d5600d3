"""Makes what the example needs: support tickets, and a small BERT trained on a few older ones."""

import csv
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

HERE = Path(__file__).parent
TOPICS = {
    "billing": "invoice charge refund payment card price receipt bank tax discount overdue subscription",
    "delivery": "parcel courier late lost tracking address box arrived shipping customs driver depot",
    "login": "password account reset email locked code phone verify username sign expired browser",
    "product": "broken screen battery noise button scratched overheats manual cable fan buzzing cracked",
}
FILLER = """
the a my your this it is was not please help with and but again since today yesterday order when i you we still
cannot need would like want new old very thanks hello dear team support question problem about
"""
COMMON = FILLER.split()
WORDS = sorted({word for words in TOPICS.values() for word in words.split()} | set(COMMON))


def tickets(n: int, clear: float, seed: int) -> list[tuple[str, str]]:
    """Sentences of twelve words; `clear` is the share that belongs to the topic."""
    chance = random.Random(seed)
    rows = []
    for _ in range(n):
        topic = chance.choice(list(TOPICS))
        other = chance.choice(list(TOPICS))  # people mention other things too
        words = [
            chance.choice(TOPICS[topic].split())
            if chance.random() < clear
            else chance.choice(TOPICS[other].split() if chance.random() < 0.2 else COMMON)
            for _ in range(12)
        ]
        rows.append((" ".join(words), topic))
    return rows


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def main() -> None:
    with (HERE / "tickets.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "topic"])
        writer.writerows(tickets(2400, clear=0.22, seed=0))
    torch.manual_seed(0)
    words, names = tokenizer(), sorted(TOPICS)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )
    model = BertForSequenceClassification(config)
    older = tickets(800, clear=0.4, seed=1)
    batch = words([text for text, _ in older], return_tensors="pt", padding=True)
    labels = torch.tensor([names.index(topic) for _, topic in older])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(5):
        for rows in torch.randperm(len(labels)).split(80):
            optimizer.zero_grad()
            model(**{key: value[rows] for key, value in batch.items()}, labels=labels[rows]).loss.backward()
            optimizer.step()
    model.save_pretrained(HERE / "base")
    words.save_pretrained(HERE / "base")
    print("wrote tickets.csv and base/")


if __name__ == "__main__":
    main()

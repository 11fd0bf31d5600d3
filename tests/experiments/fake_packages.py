"""Tiny packages of the formats that the experiments fetch, with made-up samples whose classes can be learned."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib
import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from scripts import part, script
from torch import Tensor

EACH = 12  # samples in a CIFAR file
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "a", "b", "c", "d")
BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.02,
}


def contents(zoo: str) -> dict[str, bytes]:
    """File name to content, for all packages of a zoo."""
    made = {"cifar10-efficientnet": _cifar, "fashion-vit": _fashion, "imdb-minilm": _imdb, "tiny": _fashion}
    return made[zoo]()


def archives(zoo: str, folder: Path) -> Any:
    """Write the zoo's packages as archives; the zoo with their digests in place of the real ones."""
    files = contents(zoo)
    real = script("fetch").ZOOS[zoo]
    packages = []
    for package in real.packages:
        own = {name: files[name] for name in package.digests}
        path = folder / package.pattern.replace("*", "1.0")
        path.write_bytes(_pack(path.suffix, {f"{package.inside}/{n}": c for n, c in own.items()}))
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in own.items()}
        packages.append(dataclasses.replace(package, digests=digests))
    return dataclasses.replace(real, packages=tuple(packages))


def _pack(suffix: str, files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    if suffix == ".whl":
        with zipfile.ZipFile(out, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w:gz" if suffix == ".tgz" else "w:xz") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    if suffix == ".tgz":
        return out.getvalue()
    members = {"debian-binary": b"2.0\n", "control.tar.xz": b"odd", "data.tar.xz": out.getvalue()}
    return b"!<arch>\n" + b"".join(_ar(name, content) for name, content in members.items())


def _ar(name: str, content: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
    return header + content + b"\n" * (len(content) % 2)


def _cifar() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    labels = {"train": random.permutation(5 * EACH) % 10, "test": random.permutation(EACH) % 10}
    files = {f"{which}_lables.json": json.dumps(y.tolist()).encode() for which, y in labels.items()}
    for number, y in enumerate(np.split(labels["train"], 5), start=1):
        files[f"data_batch_{number}.png"] = _png(y, random)
    files["test_batch.png"] = _png(labels["test"], random)
    weights = part("cifar10-efficientnet/model.py").build(1000).state_dict()
    whole = io.BytesIO()
    torch.save(weights, whole, _use_new_zipfile_serialization=False)  # as old as the real one
    files["efficientnet-lite0-57934424.pth"] = whole.getvalue()
    return files


def _png(labels: Any, random: np.random.Generator) -> bytes:
    pixels = random.integers(0, 256, (len(labels), 1024, 3), dtype=np.uint8)
    pixels[:, 0, 0] = labels  # to be recognised by
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def _fashion() -> dict[str, bytes]:
    random = np.random.default_rng(0)
    files = {}
    for which, count in (("train", 80), ("t10k", 20)):
        labels = (random.permutation(count) % 10).astype(np.uint8)
        images = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        images[:, 0, 0] = labels
        files[f"{which}-images-idx3-ubyte.gz"] = _idx(images)
        files[f"{which}-labels-idx1-ubyte.gz"] = _idx(labels)
    return files


def _idx(values: Any) -> bytes:
    shape = b"".join(n.to_bytes(4, "big") for n in values.shape)
    return gzip.compress(bytes((0, 0, 8, values.ndim)) + shape + values.tobytes(), mtime=0)


def _imdb() -> dict[str, bytes]:
    reviews = [
        {"t": f"{('bad', 'good')[label]} film, {'abcd'[n % 4]} {n}", "s": label} for label in (0, 1) for n in range(40)
    ]
    tokens = {name: number for number, name in enumerate(WORDS)}
    return {
        "reviews.json": json.dumps([*reviews, *reviews[:5]]).encode(),
        "config.json": json.dumps({**BERT, "_name_or_path": "elsewhere"}).encode(),
        "model.safetensors": save(_encoder()),
        "vocab.txt": "".join(f"{word}\n" for word in WORDS).encode(),
        "tokenizer.json": _tokenizer(tokens),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 16}
        ).encode(),
        "special_tokens_map.json": json.dumps(
            {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
        ).encode(),
    }


def _encoder() -> dict[str, Tensor]:
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**BERT))
    positions = torch.arange(BERT["max_position_embeddings"]).unsqueeze(0)
    return {**model.state_dict(), "embeddings.position_ids": positions}


def _tokenizer(tokens: dict[str, int]) -> bytes:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    made = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", tokens["[SEP]"]), ("[CLS]", tokens["[CLS]"]))
    return str(made.to_str()).encode()

"""Weights on disk: one safetensors file, or shards with an index as Hugging Face writes them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from stockpot import atomic
from stockpot.errors import SoupError, describe
from stockpot.pool.source import stays_inside

MAX_SHARD = 5 * 10**9  # bytes; what Hugging Face tools write
# Files beside the weights that make a directory loadable by its library; never weights, never code.
_COMPANIONS = re.compile(
    r"(config|generation_config|preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map"
    r"|added_tokens|vocab|open_clip_config)\.json|merges\.txt|vocab\.txt|spiece\.model|tokenizer\.model|sentencepiece\.bpe\.model"
    r"|chat_template\.(json|jinja)"
)


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard: int = MAX_SHARD
) -> list[Path]:
    """Write tensors as they come, holding at most one shard in memory."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > max_shard:
            shards.append(_write(directory / f"shard-{len(shards)}", shard))
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += nbytes
        total += nbytes
    shards.append(_write(directory / f"shard-{len(shards)}", shard))
    if len(shards) == 1:
        return [(directory / "shard-0").rename(directory / "model.safetensors")]
    weight_map: dict[str, str] = {}
    files = []
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        files.append((directory / f"shard-{number}").rename(directory / file))
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return files


def _write(path: Path, tensors: dict[str, Tensor]) -> list[str]:
    with atomic.writing(path):
        path.touch()  # with the user's own permissions; the library would make it private
        mode = path.stat().st_mode
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod(mode)
    return list(tensors)


def copy_companions(source: Path, directory: Path) -> None:
    """Bring along the config and tokenizer of a Hugging Face directory, so that the soup loads like it.

    Links out of the directory stay behind: a stranger's `config.json` must not carry a file of yours into your soup.
    """
    for file in sorted(source.iterdir()):
        if _COMPANIONS.fullmatch(file.name) and file.is_file() and stays_inside(source, file.name):
            shutil.copyfile(file, directory / file.name)


def parse_size(value: int | str) -> int:
    """Bytes from 2_000_000 or "2GB"."""
    if isinstance(value, int):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", value, re.IGNORECASE)
    if not match:
        raise SoupError(
            describe(
                f"size {value!r}",
                expected="a number of bytes such as 2000000, '500MB' or '5GB'",
                found="neither",
                fix="use GB or MB",
            )
        )
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)

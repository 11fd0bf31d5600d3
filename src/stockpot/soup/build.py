"""(pool, layout, W) -> weights on disk, streaming: each tensor of each ingredient is read once.

The weights are one safetensors file, or shards with an index as Hugging Face writes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from stockpot import files
from stockpot.errors import SoupError
from stockpot.events import Listener, ignore, progress
from stockpot.layout import STATISTIC, Layout
from stockpot.pool import Pool
from stockpot.pool.source import stays_inside
from stockpot.soup.mix import StatisticsRule, check_holds, kept_tensor, mix_tensor

THREADS = 4  # eight were slower on 16 slow cores
MANY = 8  # cores, from which torch's threads do better on one operation than ours on several
AHEAD = 1 << 28  # values mixed and not yet asked for: 1 GiB as fp32
MAX_SHARD = 5 * 10**9  # bytes; what Hugging Face tools write
# Files beside the weights that make a directory loadable by its library; never weights, never code.
_COMPANIONS = re.compile(
    r"(config|generation_config|(video_)?preprocessor_config|processor_config|tokenizer|tokenizer_config|special_tokens_map"
    r"|added_tokens|vocab|open_clip_config)\.json|merges\.txt|vocab\.txt|spiece\.model|tokenizer\.model|sentencepiece\.bpe\.model"
    r"|chat_template\.(json|jinja)"
)


def tensors(
    pool: Pool,
    layout: Layout,
    W: Tensor,
    statistics: Mapping[str, Tensor] | None = None,
    rule: StatisticsRule = "average",
    dtype: torch.dtype | None = None,
    *,
    alone: bool = True,
    listen: Listener = ignore,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the soup under its name, in the pool's order and the ingredients' dtype.

    `alone` says that nothing else keeps the cores busy meanwhile: threads that share an operation wait for the slowest.
    """
    wide = alone and torch.get_num_threads() >= MANY
    columns = W.T.tolist()  # (G, K)

    def value(name: str) -> Tensor:
        if statistics is not None and name in statistics:
            return statistics[name]
        if name not in layout.kept:
            column = columns[layout.group_of[name]]
            used = [k for k, weight in enumerate(column) if weight]  # the others are not read
            made = mix_tensor([pool.tensor(k, name) for k in used], [column[k] for k in used], wide=wide)
        else:
            made = kept_tensor(pool, layout, W, name, rule)
            if layout.kept[name] != STATISTIC or not made.is_floating_point():
                return made
        check_holds(made, name, dtype if dtype is not None else pool.specs[name].dtype)
        return made

    first_of = {name: names[0] for names in layout.tied for name in names}
    tied: dict[str, Tensor] = {}  # made once, under the first name
    names = [name for name in pool.specs if first_of.get(name, name) == name]
    threads = 1 if wide else min(THREADS, os.cpu_count() or 1)
    written = 0
    with closing(_ahead(value, names, lambda name: pool.specs[name].numel, threads)) as values:
        for name, spec in pool.specs.items():
            first = first_of.get(name, name)
            made = next(values) if first == name else tied[first].clone()  # files do not share storage
            if name in first_of and first == name:
                tied[name] = made
            written += spec.nbytes
            progress(listen, "building the soup", written, pool.nbytes)
            yield name, made.to(dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype)


def _ahead(
    function: Callable[[str], Tensor], names: Iterable[str], size: Callable[[str], int], threads: int
) -> Generator[Tensor, None, None]:
    """The function of each name, in order, a few of them computed ahead on other threads."""
    waiting: deque[tuple[Future[Tensor], int]] = deque()
    held = 0
    pool = ThreadPoolExecutor(threads, "stockpot-mix")
    try:
        for name in names:
            while waiting and (len(waiting) > threads or held + size(name) > AHEAD):
                made, values = waiting.popleft()
                held -= values
                yield made.result()
            waiting.append((pool.submit(function, name), size(name)))
            held += size(name)
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)


def write_weights(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard: int = MAX_SHARD) -> None:
    """Write tensors as they come, holding at most one shard in memory."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    storages: set[int] = set()  # of the shard's tensors; the library refuses two tensors in one
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if shard and size + nbytes > max_shard:
            shards.append(_write(directory / f"shard-{len(shards)}", shard))
            shard, storages, size = {}, set(), 0
        tensor = tensor.clone() if tensor.untyped_storage().data_ptr() in storages else tensor
        shard[name] = tensor.contiguous()
        storages.add(shard[name].untyped_storage().data_ptr())
        size += nbytes
        total += nbytes
    shards.append(_write(directory / f"shard-{len(shards)}", shard))
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write(path: Path, tensors: dict[str, Tensor]) -> list[str]:
    with files.writing(path):
        save_file(tensors, path, metadata={"format": "pt"})
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
        expected = "a number of bytes such as 2000000, '500MB' or '5GB'"
        raise SoupError.of(f"size {value!r}", expected=expected, found="neither", fix="use GB or MB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)

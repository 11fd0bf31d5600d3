"""(pool, layout, W) -> weights on disk, streaming: each tensor of each ingredient is read once.

The weights are one safetensors file, or shards with an index as Hugging Face writes them.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from stockpot import files, words
from stockpot.errors import SoupError
from stockpot.events import Listener, ignore, progress
from stockpot.layout import ABSENT, STATISTIC, Layout
from stockpot.pool import Pool, TensorSpec
from stockpot.pool.checkpoint import header_of
from stockpot.pool.scan import raw_bytes
from stockpot.pool.source import spec_of, stays_inside
from stockpot.soup.adapter import Factored
from stockpot.soup.weights import StatisticsRule, check_holds, kept_tensor, mix_tensor

THREADS = 4  # eight were slower on 16 slow cores
MANY = 8  # cores, from which torch's threads do better on one operation than ours on several
AHEAD = 1 << 25  # values mixed and not yet asked for: 128 MiB as fp32
MAX_SHARD = 5 * 10**9  # bytes; what Hugging Face tools write
# Files beside the weights that make a directory loadable by its library; never weights, never code.
_COMPANIONS = re.compile(
    r"(config|generation_config|(video_)?preprocessor_config|processor_config|tokenizer|tokenizer_config"
    r"|special_tokens_map|added_tokens|vocab|normalizer|tekken|open_clip_config)\.json|merges\.txt|vocab\.txt"
    r"|(source|target)\.spm|spiece\.model|tokenizer\.model|sentencepiece\.bpe\.model|chat_template\.(json|jinja)"
)


def tensors(
    pool: Pool,
    layout: Layout,
    W: Tensor,
    statistics: Mapping[str, Tensor] | None = None,
    rule: StatisticsRule = "average",
    dtype: torch.dtype | None = None,
    *,
    factored: Factored | None = None,
    only: Collection[str] | None = None,
    alone: bool = True,
    listen: Listener = ignore,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the soup under its name, in the pool's order and the ingredients' dtype.

    `factored` makes what adapters add to their base, at the cost of one adapter. `only`: these names and no others.
    `alone` says that nothing else keeps the cores busy meanwhile: threads that share an operation wait for the slowest.
    """
    wide = alone and torch.get_num_threads() >= MANY
    columns = W.T.tolist()  # (G, K)

    specs = stored_specs(pool, layout, dtype)

    def value(name: str) -> Tensor:
        return made(name).to(specs[name].dtype)

    def made(name: str) -> Tensor:
        if statistics is not None and name in statistics:
            return statistics[name]
        mixed = None if factored is None else factored.tensor(name)
        if mixed is not None:
            pass
        elif name not in layout.kept:
            column = columns[layout.group_of[name]]
            used = [k for k, weight in enumerate(column) if weight]  # the others are not read
            parts, amounts, stored = [pool.tensor(k, name) for k in used], [column[k] for k in used], specs[name].dtype
            if stored.itemsize == 1:  # float8, whose smallest and largest number torch does not find
                mixed = mix_tensor(parts, amounts, wide=wide)
                check_holds(mixed, name, stored)
                return mixed
            mixed = mix_tensor(parts, amounts, wide=wide, dtype=stored)
            if mixed.numel() and not bool(torch.stack(torch.aminmax(mixed)).isfinite().all()):
                check_holds(mix_tensor(parts, amounts), name, stored)  # the sum itself says why
            return mixed
        else:
            mixed = kept_tensor(pool, layout, W, name, rule)
            if layout.kept[name] != STATISTIC or not mixed.is_floating_point():
                return mixed
        check_holds(mixed, name, specs[name].dtype)
        return mixed

    first_of = {name: names[0] for names in layout.tied for name in names}
    tied: dict[str, Tensor] = {}  # made once, under the first name
    wanted = [name for name in specs if only is None or name in only]
    names = list(dict.fromkeys(first_of.get(name, name) for name in wanted))
    threads = 1 if wide else min(THREADS, os.cpu_count() or 1)
    written, total = 0, sum(specs[name].nbytes for name in wanted)
    with closing(_ahead(value, names, lambda name: pool.specs[name].numel, threads)) as values:
        for name in wanted:
            first = first_of.get(name, name)
            if first in tied:
                found = tied[first]
            else:
                found = next(values)
                if name in first_of:
                    tied[first] = found
            written += specs[name].nbytes
            progress(listen, "building the soup", written, total)
            yield name, found


def stored_specs(pool: Pool, layout: Layout, dtype: torch.dtype | None) -> dict[str, TensorSpec]:
    """What a soup has on disk: the ingredients' tensors, those of real numbers in `dtype` if that is given."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        expected, fix = "a floating-point type", "give one such as torch.bfloat16, or nothing for the ingredients' own"
        raise SoupError.of("dtype of the soup", expected=expected, found=repr(dtype)[:80], fix=fix)
    return {
        name: spec_of(dtype, spec.shape) if dtype is not None and spec.dtype.is_floating_point else spec
        for name, spec in pool.specs.items()
        if layout.kept.get(name) != ABSENT
    }


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


def write_weights(
    directory: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]], max_shard: int = MAX_SHARD
) -> None:
    """Write tensors of these specs, in this order, as they come: each goes to its place in its file at once."""
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_shard:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    names = names if len(names) > 1 else ["model.safetensors"]
    coming = iter(tensors)
    with ThreadPoolExecutor(1, "stockpot-flush") as beside:
        flushed: Future[None] | None = None
        for file, shard in zip(names, shards, strict=True):
            _write_shard(directory / file, shard, coming)
            if flushed is not None:
                flushed.result()
            flushed = beside.submit(files.flush, directory / file)  # the disk is busy while the next one is mixed
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_shard(path: Path, specs: Mapping[str, TensorSpec], coming: Iterator[tuple[str, Tensor]]) -> None:
    """The bytes that safetensors.torch.save_file writes, without all of them in memory."""
    header, places = header_of(specs)
    with path.open("wb") as file:
        file.write(header)
        for _ in specs:
            name, tensor = next(coming)
            assert (tensor.dtype, tuple(tensor.shape)) == (specs[name].dtype, specs[name].shape), name
            file.seek(len(header) + places[name])
            file.write(raw_bytes(tensor).numpy().data)


def copy_companions(source: Path, directory: Path, without: Collection[str] = ()) -> None:
    """Bring along the config and tokenizer of a Hugging Face directory, so that the soup loads like it.

    Links out of the directory stay behind: a stranger's `config.json` must not carry a file of yours into your soup.
    """
    for file in sorted(source.iterdir()):
        if (
            _COMPANIONS.fullmatch(file.name)
            and file.name not in without
            and file.is_file()
            and stays_inside(source, file.name)
        ):
            shutil.copyfile(file, directory / file.name)


def shard_size(given: int | str) -> int:
    """Bytes from 2_000_000 or "2GB"."""
    if (size := words.bytes_of(given)) is None:
        expected = "a number of bytes such as 2000000, '500MB' or '5GB'"
        raise SoupError.of(f"size {given!r}", expected, "none", "use GB or MB")
    return size

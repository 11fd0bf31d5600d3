"""Opens thousands of damaged PEFT folders: `python -m torture.mutated_adapters --count 5000 --seed 0`.

Configuration or weights of one of two adapters are damaged. What must come of it: an error of ours, or for every tensor
what PEFT's rules, written down here a second time without torch and safetensors, make of the bytes; no other exception,
no second over five and no more than a gigabyte.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from stockpot import Pool
from stockpot.errors import StockpotError
from torture import decoders
from torture.mutated_data import MOST_MEMORY, SLOWEST, _peak, mutated, refused
from torture.mutated_runs import SlowError, mutate
from torture.mutations import Original, damage

PREFIX = "base_model.model."
CONFIG, SAFE, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FIELDS: dict[str, Any] = {
    "peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False,
    "target_modules": ["q", "layers.0.k", "layers.1.v", "embed", "conv"],
    "fan_in_fan_out": False, "base_model_name_or_path": "base", "revision": None, "init_lora_weights": True,
    "modules_to_save": ["head"], "lora_bias": True, "bias": "none", "task_type": None,
    "rank_pattern": {"layers.0.q": 3, r".*\.(k|v)": 1}, "alpha_pattern": {"v": 8, "[a-z]+": 4},
}  # fmt: skip
PATTERNS = (
    "q",
    "layers",
    r".*q",
    "(q|k)",
    r"layers\.\d+\.q",
    "a*a*b",
    "[q]",
    "^layers",
    "q$",
    "(a|aa)+",
    "\\",
    "(",
    "l?",
)


def honest(folder: Path) -> list[Path]:
    """A base, and adapters as safetensors and as a pickle."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    base = {f"layers.{n}.{kind}.{what}": some(6, 4) if what == "weight" else some(6)
            for n in range(2) for kind in "qkv" for what in ("weight", "bias")}  # fmt: skip
    base |= {"embed.weight": some(5, 4), "head.weight": some(3, 4), "conv.weight": some(6, 4, 3, 3)}
    (folder / "base").mkdir()
    save_file(base, folder / "base" / "model.safetensors")
    (folder / "base" / "config.json").write_text("{}")
    for name, file in (("a", SAFE), ("b", PICKLED), ("other", SAFE)):
        tensors = {}
        for module, rank in (("layers.0.q", 3), ("layers.1.q", 2), ("layers.0.k", 1), ("layers.1.v", 1)):
            tensors[f"{module}.lora_A.weight"], tensors[f"{module}.lora_B.weight"] = some(rank, 4), some(6, rank)
        tensors |= {"embed.lora_embedding_A": some(2, 5), "embed.lora_embedding_B": some(4, 2)}
        tensors |= {"conv.lora_A.weight": some(2, 4, 3, 3), "conv.lora_B.weight": some(6, 2, 1, 1)}
        tensors |= {"layers.1.q.lora_B.bias": some(6), "head.modules_to_save.weight": some(3, 4)}
        tensors = {PREFIX + key: value for key, value in tensors.items()}
        (folder / name).mkdir()
        (folder / name / CONFIG).write_text(json.dumps(FIELDS))
        if file == SAFE:
            save_file(tensors, folder / name / SAFE)
        else:
            torch.save(tensors, folder / name / PICKLED)
    return [folder / "a", folder / "b"]


def damaged(folder: Path, room: Path, rng: random.Random) -> Path:
    file = SAFE if (folder / SAFE).exists() else PICKLED
    if rng.random() < 0.5:
        return damage(Original("adapter", folder, (file,), lambda path, key: {}), room, rng)[0]
    copy = Path(shutil.copytree(folder, room / folder.name))
    content = (copy / CONFIG).read_bytes()
    fields = json.loads(content)
    if rng.random() < 0.25:
        content = mutated(content, rng)
    else:
        for _ in range(rng.choice((1, 1, 2))):
            if rng.random() < 0.4:
                key = rng.choice(("rank_pattern", "alpha_pattern"))
                pairs = [*fields[key].items()] if isinstance(fields.get(key), dict) else []
                pairs.insert(rng.randrange(len(pairs) + 1), (rng.choice(PATTERNS), rng.choice((1, 2, 3, 4, 8, 0.5))))
                fields[key] = dict(pairs)
            elif rng.random() < 0.5:
                fields[rng.choice(("lora_alpha", "r", "use_rslora"))] = rng.choice(
                    (1, 2, 3.0, 0.5, True, 1e-300, 2**31)
                )
            else:
                mutate(fields, rng)
        content = json.dumps(fields).encode("utf-8", "surrogatepass")
    (copy / CONFIG).write_bytes(content)
    return copy


def expected(base: decoders.Tensors, folder: Path) -> dict[str, Any]:
    """What PEFT's rules make of base and adapter, in double precision."""
    config = json.loads((folder / CONFIG).read_bytes())
    file = SAFE if (folder / SAFE).exists() else PICKLED
    read = decoders.safetensors if file == SAFE else decoders.torch_archive
    given = {name.removeprefix(PREFIX): numbers(value) for name, value in read((folder / file).read_bytes()).items()}
    made = {name: numbers(value) for name, value in base.items()}
    for name, value in given.items():
        if "lora_" not in name and ".original_module." not in name:
            made[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = value
    for name, left in given.items():
        if not (match := re.fullmatch(r"(.+)\.lora_(A\.weight|embedding_A)", name)):
            continue
        module, embedding = match[1], match[2] == "embedding_A"
        right = given[f"{module}.lora_embedding_B" if embedding else f"{module}.lora_B.weight"]
        rank, alpha = (pattern(config.get(f"{key}_pattern"), module, config.get(field))
                       for key, field in (("rank", "r"), ("alpha", "lora_alpha")))  # fmt: skip
        assert rank == len(left), (module, rank, left.shape)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        delta = scale * (right.reshape(len(right), -1) @ left.reshape(len(left), -1))
        flipped = embedding or config.get("fan_in_fan_out")
        made[f"{module}.weight"] = made[f"{module}.weight"] + (
            delta.T if flipped else delta.reshape(-1, *left.shape[1:])
        )
        if (bias := given.get(f"{module}.lora_B.bias")) is not None:
            made[f"{module}.bias"] = made[f"{module}.bias"] + scale * bias
    return made


def pattern(table: Any, module: str, default: Any) -> Any:
    return next((v for key, v in (table or {}).items() if re.match(rf"(.*\.)?({key})$", module)), default)


def numbers(value: tuple[str, tuple[int, ...], bytes]) -> Any:
    dtype, shape, raw = value
    flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)) if raw else torch.zeros(0)
    return flat.double().reshape(shape).numpy()


def one(rng: random.Random, folder: Path, room: Path, base: decoders.Tensors) -> str:
    adapter = damaged(folder, room, rng)
    try:
        pool = Pool.open(adapter, folder.parent / "other", base=folder.parent / "base")
        found = {name: pool.tensor(0, name) for name in pool.specs}
    except StockpotError as error:
        return refused(error)
    wanted = expected(base, adapter)
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    with np.errstate(all="ignore"):
        for name, value in found.items():
            assert tuple(value.shape) == wanted[name].shape == pool.specs[name].shape, name
            right = wanted[name].astype(np.float32)
            assert np.allclose(value.float().numpy(), right, rtol=1e-4, atol=1e-4 * size(right), equal_nan=True), name
    return "right"


def size(value: Any) -> float:
    finite = np.abs(value[np.isfinite(value)])
    return float(finite.max(initial=1.0))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)

    def late(number: int, frame: Any) -> None:
        raise SlowError

    signal.signal(signal.SIGALRM, late)
    counts, failures, began = Counter[tuple[str, str]](), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutated-") as place:
        folders = honest(Path(place))
        base = decoders.safetensors((Path(place) / "base" / "model.safetensors").read_bytes())
        Pool.open(*folders, base=Path(place) / "base")  # undamaged they are taken: else nothing would be tested
        before = _peak()
        for case in range(given.count):
            rng, folder = random.Random(f"{given.seed}/{case}"), folders[case % 2]
            room = Path(tempfile.mkdtemp(dir=place))
            signal.setitimer(signal.ITIMER_REAL, 2 * SLOWEST)
            try:
                happened = one(rng, folder, room, base)
            except (Exception, SlowError) as error:
                happened = "FAILED"
                failures.append(f"case {case}: {type(error).__name__}: {error}"[:300])
            signal.setitimer(signal.ITIMER_REAL, 0)
            if _peak() - before > MOST_MEMORY:
                failures.append(f"case {case}: {_peak() - before:,} bytes")
                before = _peak()
            counts[folder.name, happened] += 1
            shutil.rmtree(room)
    for (name, happened), count in sorted(counts.items()):
        print(f"{name:4} {happened:8} {count:6,}")
    print("\n".join(failures[:50]))
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{given.count:,} damaged adapters, seed {given.seed}, {len(failures)} failures, {seconds}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

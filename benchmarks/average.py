"""`stockpot average` against mergekit's `linear` on four sharded Hugging Face folders, both from start to finish.

    python benchmarks/average.py --peer path/to/mergekit-yaml

Each side runs as its own process (imports included), alternating; both results are compared with float64 arithmetic
before any figure is printed, and a pipeline is run on ours. Peak memory is RssAnon, sampled: memory-mapped files do not
count.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import machine
import torch
from build_uniform import run
from safetensors import safe_open

SHARD = 256 * 10**6
sys.path.remove(str(Path(__file__).parent))  # transformers looks for a package `kernels`, which is not ours


def make(folder: Path, layers: int) -> list[Path]:
    """Four fine-tunes, in bf16, of one small Llama, each in several shards and with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folders = [folder / f"model_{k}" for k in range(4)]
    if all((one / "model.safetensors.index.json").is_file() for one in folders):
        return folders
    words = {"<unk>": 0, **{f"w{n}": n for n in range(1, 32000)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    for k, place in enumerate(folders):
        generator = torch.Generator().manual_seed(k)
        state = {n: v + 1e-3 * torch.randn(v.shape, generator=generator) for n, v in base.items()}
        model.load_state_dict(state)
        model.to(torch.bfloat16).save_pretrained(place, max_shard_size=SHARD)
        model.float()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(place)
        GenerationConfig(max_new_tokens=8).save_pretrained(place)
    return folders


def opened(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, mapped."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        handle = safe_open(file, "pt")
        found |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return found


def agree(folders: list[Path], sides: dict[str, Path]) -> dict[str, float]:
    """Largest difference from the float64 mean, in units of the last place of bf16 there."""
    parts = [opened(folder) for folder in folders]
    worst = {}
    for side, folder in sides.items():
        made = opened(folder)
        assert made.keys() == parts[0].keys(), side
        worst[side] = 0.0
        for name in list(made)[::5]:
            stack = torch.stack([part[name].double() for part in parts])
            exact, room = stack.mean(dim=0), 2.0**-22 * stack.abs().amax(dim=0)  # sums are in fp32
            unit = 2.0 ** (exact.abs().clamp_min(1e-30).log2().floor() - 7)
            off = ((made[name].double() - exact).abs() - room).clamp_min(0.0)
            worst[side] = max(worst[side], float((off / unit).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=shutil.which("mergekit-yaml"), help="mergekit-yaml of mergekit 0.1.4")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "stockpot-bench-average")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "average.json")
    args = parser.parse_args()
    folders = make(args.folder, args.layers)
    shards = [file.stat().st_size for file in folders[0].glob("*.safetensors")]
    ours, theirs, config = args.folder / "ours", args.folder / "theirs", args.folder / "linear.yaml"
    lines = [f"  - model: {folder}\n    parameters:\n      weight: 0.25\n" for folder in folders]
    config.write_text("merge_method: linear\ndtype: bfloat16\nmodels:\n" + "".join(lines))
    size = ["--max-shard", str(SHARD)]
    commands = {
        "stockpot": [
            sys.executable, "-m", "stockpot", "average", *map(str, folders), "--out", str(ours), "--overwrite", *size,
        ]
    }  # fmt: skip
    if args.peer:
        shard = ["--out-shard-size", str(SHARD)]
        commands["mergekit"] = [args.peer, str(config), str(theirs), "--quiet", *shard]
    for folder in folders:  # both sides start with the files in the page cache
        for file in folder.iterdir():
            file.read_bytes()
    figures: dict[str, list[tuple[float, int]]] = {side: [] for side in commands}
    for _ in range(args.repeat):
        for side, command in commands.items():
            shutil.rmtree(theirs, ignore_errors=True)
            os.sync()
            figures[side].append(run(command))
            if side == "mergekit":
                worst = agree(folders, {"ours": ours, "peer": theirs})
    if not args.peer:
        worst = agree(folders, {"ours": ours})
    assert worst["ours"] <= 0.51, worst  # rounded once
    assert worst.get("peer", 0.0) < 4, worst  # summed in bf16
    from transformers import pipeline

    said = pipeline("text-generation", model=str(ours))("w1 w2 w3", max_new_tokens=4)
    assert said[0]["generated_text"].startswith("w1 w2 w3"), said
    result = {
        "what": f"average of four sharded Hugging Face folders in bf16, {len(shards)} shards each,"
        f" {sum(shards) / 1e9:.2f} GB in all; one process from start to finish",
        "machine": machine.describe("transformers"),
        "peer": "mergekit 0.1.4, linear" if args.peer else None,
        "largest_shard_gb": round(max(shards) / 1e9, 3),
        "largest_difference_from_float64_in_last_places": worst,
        "sides": {
            side: {
                "seconds": [round(s, 2) for s, _ in rows],
                "median_seconds": round(statistics.median(s for s, _ in rows), 2),
                "peak_anonymous_gb": round(max(p for _, p in rows) / 1e9, 3),
            }
            for side, rows in figures.items()
        },
        "pipeline_runs_on_ours": True,
    }
    result["peak_over_one_shard_gb"] = round(result["sides"]["stockpot"]["peak_anonymous_gb"] - max(shards) / 1e9, 3)
    if args.peer:
        seconds = {side: figures["median_seconds"] for side, figures in result["sides"].items()}
        result["ratio"] = round(seconds["stockpot"] / seconds["mergekit"], 3)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()

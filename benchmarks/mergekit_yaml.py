"""Does mergekit 0.1.4 itself agree? For configurations out and in, and for methods with a base.

python benchmarks/mergekit_yaml.py --peer path/to/mergekit-yaml
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import machine
import torch

sys.path.remove(str(Path(__file__).parent))  # transformers looks for a package `kernels`, which is not ours


def make(folder: Path) -> tuple[list[Path], Path]:
    """Three fine-tunes of a small Llama in fp32, and what they began as."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    for k in range(3):
        model.load_state_dict({name: value + 0.01 * torch.randn_like(value) for name, value in base.items()})
        model.save_pretrained(folder / f"run_{k}")
    return [folder / f"run_{k}" for k in range(3)], folder / "base"


def run_peer(peer: str, text: str, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    out = folder / "theirs"
    shutil.rmtree(out, ignore_errors=True)
    (folder / "merge.yaml").write_text(text)
    subprocess.run([peer, str(folder / "merge.yaml"), str(out), "--quiet"], check=True, capture_output=True)
    return {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default=shutil.which("mergekit-yaml"), help="mergekit-yaml of mergekit 0.1.4")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mergekit_yaml.json")
    args = parser.parse_args()
    import yaml

    from stockpot import Layout, Pool, Soup, average
    from stockpot.soup.average import from_mergekit, to_mergekit

    def models(weights: list[str]) -> str:
        return "models:\n" + "".join(
            f"- model: {run}\n  parameters: {{weight: {weight}}}\n" for run, weight in zip(runs, weights, strict=True)
        )

    worst: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        runs, base = make(folder)
        pool = Pool.open(runs)
        layout = Layout.of(pool)
        W = torch.randn(3, len(layout), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        soup = Soup(pool, layout, 1 / 3 + W - W.mean(dim=0))
        weights = ["1", "2", "[{filter: mlp, value: 0.5}, {filter: layers.1, value: 3}, {value: 1}]"]
        linear = f"merge_method: linear\ndtype: float32\n{models(weights)}"
        with_base = f"dtype: float32\nbase_model: {base}\n{models(['0.4', '0.5', '-0.2'])}"
        cases = {
            "per-tensor soup, exported": (to_mergekit(soup), soup),
            "linear with filters, read": (linear, from_mergekit(yaml.safe_load(linear))[0]),
            "task arithmetic": (
                f"merge_method: task_arithmetic\n{with_base}",
                average(runs, base=base, weights=[0.4, 0.5, -0.2]),
            ),
            "model stock": (f"merge_method: model_stock\n{with_base}", average(runs, base=base, method="model_stock")),
        }
        for name, (text, ours) in cases.items():
            theirs, state = run_peer(args.peer, text, folder), ours.state_dict()
            assert theirs.keys() == state.keys(), name
            worst[name] = max(float((theirs[one] - state[one]).abs().max()) for one in state)
    result = {
        "what": f"largest difference from mergekit 0.1.4 over all {len(layout.group_of)} tensors of a small fp32 Llama",
        "machine": machine.describe("transformers"),
        "largest_difference": worst,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    assert max(worst.values()) <= 1e-6, worst


if __name__ == "__main__":
    main()

"""The demo as a recipe, so that its reader can change it and run it again."""

from __future__ import annotations

from pathlib import Path

from stockpot import atomic
from stockpot.recipe import Recipe, load_recipe

# The paper's 1000 steps of 128 samples would take minutes and change little here.
STEPS, BATCH, RATE = 48, 64, 0.06

TEXT = """\
# What `stockpot demo` ran. Change something and try: stockpot compare {file} --out another-run
pool:
  path: pool                            # the fine-tuned checkpoints

model:
  python: stockpot.demo.vit:DigitViT    # any function or class that gives an nn.Module

data:
  python: stockpot.demo.digits:digits   # called with train, fit and report
  options: {{seed: {seed}}}

method:
  name: crossfit                        # what `stockpot cook` would use; `compare` runs all
  steps: {steps}
  batch_size: {batch}
  lr: {rate}

output:
  dir: run
  seed: {seed}
"""


def write_recipe(folder: Path, seed: int) -> tuple[Path, Recipe]:
    """recipe.yaml in the demo's folder; one that the reader has changed is used as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    if not path.exists():
        atomic.write_bytes(
            path, TEXT.format(file=path.name, seed=seed, steps=STEPS, batch=BATCH, rate=RATE).encode()
        )
    return path, load_recipe(path)

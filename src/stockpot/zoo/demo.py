"""The demo's pool, made in half a minute: scikit-learn's digits, a small vision transformer, and its fine-tunes.

The model is pre-trained without labels: it learns to tell clusters of similar images apart. The clusters are those of
k-means on pixels. Images are shifted at random while the model looks at them, so it has to learn shapes where k-means
saw pixels. No label of any image is used for this, and no image of the report split.
"""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from stockpot import files
from stockpot.adapters.code import need
from stockpot.errors import DataError, RunError
from stockpot.events import Event, Listener, ignore
from stockpot.task import Task
from stockpot.task.data import generator
from stockpot.zoo.folder import TrialRecord, load_weights, read_file, weights_of, write_file
from stockpot.zoo.plan import Augmentation, Plan, Probe, Space, Trial, draw_trials
from stockpot.zoo.search import finetune
from stockpot.zoo.training import train

TRIALS = 12
SPACES: Mapping[str, Space] = {
    "lr": {"min": 2e-3, "max": 8e-3, "scale": "log"},
    "weight_decay": {"min": 1e-4, "max": 0.3, "scale": "log"},
    "epochs": {"min": 8, "max": 20},
    "label_smoothing": [0.0, 0.05, 0.1, 0.2],
    "augmentation": [0.0, 0.2, 0.4, 0.6],
}
EPOCHS = 20.0  # of pre-training
CLUSTERS, ROUNDS, PATCH = 30, 20, 2
MARKER = ".stockpot-demo"  # stands in every folder that the demo has made, and nowhere else
MARKED = b"The demo of stockpot made recipe.yaml, pretrained.safetensors, pool and run in this folder.\n"
POOL, PRETRAINED, RECIPE = "pool", "pretrained.safetensors", "recipe.yaml"

# The paper's 1000 steps of 128 samples would take minutes and change little here.
STEPS = 48
OWN_STEPS = 32  # of the default, which takes them on each fold
RECIPE_TEXT = """\
# What `stockpot demo` ran. Change something and try: stockpot compare recipe.yaml --out another-run
pool:
  path: pool                            # the fine-tuned checkpoints

model:
  python: stockpot.zoo.demo:DigitViT    # any function or class that gives an nn.Module

data:
  python: stockpot.zoo.demo:digits      # called with train, fit and report
  options: {{seed: {seed}}}

method:
  name: crossfit                        # what `stockpot cook` would use; `compare` runs all
  steps: {steps}
  batch_size: 64
  lr: 0.06
  each:
    crossfit: {{steps: {own}, folds: 2, lr: 0.06}}  # the default takes its schedule from here alone

output:
  dir: run
  seed: {seed}
"""


def demo_recipe(seed: int) -> str:
    """The demo as a recipe, so that its reader can change it and run it again."""
    return RECIPE_TEXT.format(seed=seed, steps=STEPS, own=OWN_STEPS)


# Data and model ---------------------------------------------------------------------------------------

Split = Literal["train", "fit", "report"]
SIZES: dict[Split, int] = {"train": 250, "fit": 650, "report": 897}


def digits(split: Split, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images (n, 1, 8, 8) uint8 with labels (n,); the three splits share no image."""
    if split not in SIZES:
        known, fix = f"one of {', '.join(SIZES)}", "use 'fit' to learn mixing weights on"
        raise DataError.of(f"split {split!r} of the digits", expected=known, found="an unknown one", fix=fix)
    found = need("sklearn.datasets").load_digits()
    images = torch.from_numpy(found.images).unsqueeze(1)  # (1797, 1, 8, 8), 0 to 16
    images, labels = (images * (255 / 16)).round().to(torch.uint8), torch.from_numpy(found.target).long()
    order = torch.randperm(len(labels), generator=generator("digits", seed))
    end = dict(zip(SIZES, itertools.accumulate(SIZES.values()), strict=True))[split]
    rows = order[end - SIZES[split] : end]
    return images[rows], labels[rows]


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, tokens, width = x.shape
        q, k, v = (  # (n, heads, tokens, width / heads) each
            part.view(n, tokens, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(seen.transpose(1, 2).reshape(n, tokens, width))
        changed: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return changed


class DigitViT(nn.Module):
    """Grey images (n, 1, 8, 8), uint8 or in [0, 1], to class logits (n, classes)."""

    def __init__(self, classes: int = 10, size: int = 8, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=PATCH, stride=PATCH)
        # Large: outputs are averaged over patches, which would make it a bag of patches for many epochs.
        self.position = nn.Parameter(0.5 * torch.randn(1, (size // PATCH) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(self.position.dtype)
        if images.dtype == torch.uint8:
            pixels = pixels / 255
        x = self.patches(2 * pixels - 1).flatten(2).transpose(1, 2)  # (n, tokens, width)
        logits: Tensor = self.head(self.norm(self.blocks(x + self.position)).mean(dim=1))
        return logits


# Pre-training -----------------------------------------------------------------------------------------


def pretrain(images: Tensor, *, seed: int = 0, listen: Listener = ignore) -> DigitViT:
    """A digit classifier whose encoder is trained and whose head is blank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitViT(classes=CLUSTERS)
        blank = DigitViT()
    trial = Trial(lr=4e-3, weight_decay=0.05, epochs=EPOCHS, augmentation=1.0, seed=seed)
    plan = Plan((trial,), batch_size=64, augmentation=Augmentation(erase=False, jitter=False))
    task = Task(model.train(), (images, cluster(images, CLUSTERS, seed)))
    train(task, trial, plan, parameters=model.parameters(), about={"trial": "pretraining"}, listen=listen)
    model.head = blank.head
    blank.load_state_dict(model.state_dict())
    for parameter in blank.head.parameters():
        nn.init.zeros_(parameter)
    return blank


def cluster(images: Tensor, count: int, seed: int) -> Tensor:
    """Lloyd's k-means: which of `count` clusters each image is in. (n,)"""
    points = images.flatten(1).double()  # (n, d)
    centres = points[torch.randperm(len(points), generator=generator("clusters", seed))[:count]]
    nearest = torch.cdist(points, centres).argmin(1)
    for _ in range(ROUNDS):
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)  # sums of whole numbers: exact
        sizes = torch.bincount(nearest, minlength=count).unsqueeze(1)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
        nearest = torch.cdist(points, centres).argmin(1)
    return nearest


# The pool ---------------------------------------------------------------------------------------------


def make_demo_pool(
    folder: str | Path, *, seed: int = 0, trials: int = TRIALS, listen: Listener = ignore
) -> list[TrialRecord]:
    """Pre-train once and fine-tune `trials` ingredients into `folder/pool`; continues where a killed one was."""
    folder = Path(folder).absolute()
    files.make_directory(folder)
    drawn, probe = draw_trials(trials, seed=seed, spaces=SPACES), Probe(epochs=20, lr=1e-2, seed=seed)
    plan = Plan(drawn, batch_size=64, probe=probe, head="head")
    with one_thread():
        model = DigitViT()
        load_weights(model, _pretrained(folder, seed, listen))
        return finetune(model, digits("train", seed), digits("fit", seed), folder / POOL, plan, listen=listen)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of the demo are tiny. On a busy machine a second thread makes their work many times slower, not
    faster, and without it the numbers do not depend on how many processors there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _pretrained(folder: Path, seed: int, listen: Listener) -> dict[str, Tensor]:
    path, about = folder / PRETRAINED, {"format": "pt", "seed": str(seed)}
    if path.exists():
        weights, found = read_file(path, folder)
        if found == about:
            return weights
    listen(Event("pretraining", {"seed": seed}))
    # Without labels, the images that the fitting data consists of may be used here too.
    images = torch.cat([digits("train", seed)[0], digits("fit", seed)[0]])
    weights = weights_of(pretrain(images, seed=seed, listen=listen))
    write_file(path, weights, about, folder)
    return weights


def demo_folder(out: Path, seed: int, *, overwrite: bool = False) -> Path:
    """The recipe of a demo in its folder, made where it is not there yet; `overwrite` forgets an earlier demo.

    What no demo made is neither run nor removed.
    """
    made = (RECIPE, PRETRAINED, POOL, "run")
    try:
        ours = files.read_bytes(out / MARKER, root=out) == MARKED
    except (OSError, ValueError):
        ours = False
    theirs = [] if ours else [name for name in made if (out / name).exists() or (out / name).is_symlink()]
    if theirs:
        expected, found = "a new directory, or one of an earlier demo", f"{', '.join(theirs)} that no demo made"
        fix = "choose another directory with --out; nothing was changed"
        raise RunError.of(f"demo directory {out}", expected=expected, found=found, fix=fix)
    for name in made:
        files.check_inside(out, out / name)  # also what is opened by others: a pool and a run may be links elsewhere
    if overwrite and ours:
        clear_demo(out)
    files.make_directory(out)
    files.write_bytes(out / MARKER, MARKED, root=out)
    path, text = out / RECIPE, demo_recipe(seed).encode()
    if not path.exists():
        files.write_bytes(path, text, root=out)
    elif files.read_bytes(path, root=out) != text:
        expected, run = f"the recipe of the demo with seed {seed}", f"stockpot compare {shlex.quote(str(path))}"
        fix = f"run that one with `{run}`, choose another --out, or make the demo anew with --overwrite"
        raise RunError.of(str(path), expected=expected, found="another one", fix=fix)
    return path


def clear_demo(folder: Path) -> None:
    """Remove recipe, pre-trained model and pool of an earlier demo, and nothing that it did not make.

    Refuses, before anything is removed, when the pool holds something else.
    """
    pool = files.check_inside(folder, folder / POOL)
    names = [entry.name for entry in pool.iterdir()] if pool.is_dir() else []
    made = {"search", files.LOCK} | {f"trial_{n:03d}.{kind}" for n in range(TRIALS) for kind in ("json", "safetensors")}
    foreign = [name for name in names if name not in made and not name.endswith((".writing", ".replaced"))]
    if foreign:
        found = f"also {', '.join(sorted(foreign)[:4])}, which no demo made"
        fix = "move that elsewhere, or choose another directory with --out; nothing was removed"
        raise RunError.of(str(pool), expected="the pool of an earlier demo", found=found, fix=fix)
    if pool.is_dir():
        files.clear(pool, names, folder)
    files.clear(folder, [POOL, PRETRAINED, RECIPE], folder)

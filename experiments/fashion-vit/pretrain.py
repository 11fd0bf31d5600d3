"""Pre-trains the vision transformer without labels, as a masked autoencoder (He et al., 2022).

    python experiments/fashion-vit/pretrain.py                     # on one GPU
    python experiments/fashion-vit/pretrain.py --epochs 2 --images 4000 --batch 256    # a trial on a CPU

Three quarters of the patches are hidden; the encoder sees the rest, and a narrow decoder has to paint what is
missing. All of the data set's training images are used, none of their labels, and none of its own test images.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from model import PIXELS, TOKENS, Block, VisionTransformer, build, patches
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

DATA = Path(__file__).parents[1] / "data" / "fashion-vit"
PARTS = ("train", "fit", "dev", "held")  # all 60,000
MEAN, STD = 0.286, 0.353  # as in the recipe
KEPT = TOKENS // 4  # tokens the encoder sees


class Autoencoder(nn.Module):
    def __init__(self, encoder: VisionTransformer, width: int = 96, depth: int = 2, heads: int = 3) -> None:
        super().__init__()
        self.encoder = encoder
        self.narrow = nn.Linear(encoder.head.in_features, width)
        self.missing = nn.Parameter(0.02 * torch.randn(width))
        self.position = nn.Parameter(0.02 * torch.randn(TOKENS, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.paint = nn.Linear(width, PIXELS)

    def forward(self, images: Tensor, order: Tensor) -> Tensor:
        """Mean squared error on hidden patches; `order` (n, 49) is a random order of each image's patches."""
        pixels = patches(images)
        kept, hidden = order[:, :KEPT], order[:, KEPT:]
        seen = self.narrow(self.encoder.encode(pixels, kept))  # (n, 12, width)
        blank = self.missing.to(seen.dtype).expand(len(seen), TOKENS - KEPT, -1)
        place = order.argsort(dim=1).unsqueeze(-1)  # back to the patches' own order
        x = torch.cat((seen, blank), dim=1).gather(1, place.expand(-1, -1, seen.shape[-1]))
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        wanted, painted = (_pick(values, hidden) for values in (pixels, self.paint(self.norm(x))))
        # Patches in units of their own spread: otherwise flat cloth and background decide everything.
        spread = wanted.var(dim=-1, keepdim=True).add(0.05).sqrt()
        wanted = (wanted - wanted.mean(dim=-1, keepdim=True)) / spread
        return functional.mse_loss(painted.float(), wanted.float())


def _pick(values: Tensor, rows: Tensor) -> Tensor:
    return values.gather(1, rows.unsqueeze(-1).expand(-1, -1, values.shape[-1]))


def read_images(folder: Path, parts: Sequence[str] = PARTS) -> Tensor:
    """uint8 (n, 1, 28, 28); labels stay on the disk."""
    found = [torch.from_numpy(np.load(folder / f"{part}.npz")["x"]) for part in parts]
    return torch.cat(found).unsqueeze(1)


def pretrain(
    images: Tensor,
    *,
    epochs: float,
    batch: int,
    lr: float,
    seed: int,
    device: torch.device,
    compiled: bool = False,
    say: Callable[[str], None] = print,
) -> VisionTransformer:
    """An encoder that has learned to complete images; the same seed on the same machine and versions repeats it."""
    torch.manual_seed(seed)
    model = Autoencoder(build()).to(device)
    images = images.to(device)
    batch = min(batch, len(images))
    steps = max(1, math.ceil(epochs * len(images) / batch))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"
    rate = torch.tensor(lr, device=device) if on_gpu else lr  # a graph reads it where it lies
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    loss_of: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if compiled else model

    def learn(pixels: Tensor, order: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = loss_of(pixels, order)
        loss.backward()
        optimizer.step()
        return loss

    learn_from = Captured(learn) if on_gpu else learn
    stream = torch.Generator(device).manual_seed(seed)
    began, every = time.perf_counter(), max(1, steps // 20)
    for step in range(steps):
        chosen = torch.randint(0, len(images), (batch,), generator=stream, device=device)
        pixels = _augmented(images[chosen], stream)
        order = torch.rand(batch, TOKENS, generator=stream, device=device).argsort(dim=1)
        loss = learn_from(pixels, order)
        schedule.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            seconds = time.perf_counter() - began
            say(f"step {step + 1} of {steps}  loss {loss.item():.4f}  {seconds:.0f} s")
    return model.encoder


class Captured:
    """A training step as one CUDA graph, from its fourth call on: small kernels wait for the host otherwise."""

    def __init__(self, learn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._learn = learn
        self._calls = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._inputs: tuple[Tensor, Tensor] | None = None
        self._loss: Tensor | None = None

    def __call__(self, pixels: Tensor, order: Tensor) -> Tensor:
        self._calls += 1
        if self._calls <= 3:  # allocates and compiles what a capture must find ready
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._learn(pixels, order)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if self._inputs is None:
            self._inputs = pixels.clone(), order.clone()
            with torch.cuda.graph(self._graph, stream=self._stream):
                self._loss = self._learn(*self._inputs)
        for place, value in zip(self._inputs, (pixels, order), strict=True):
            place.copy_(value)
        self._graph.replay()
        assert self._loss is not None
        return self._loss


def _augmented(images: Tensor, stream: torch.Generator) -> Tensor:
    """Normalised, and half of them mirrored."""
    pixels = (images.float() / 255 - MEAN) / STD
    turned = torch.rand(len(pixels), 1, 1, 1, generator=stream, device=pixels.device) < 0.5
    return torch.where(turned, pixels.flip(-1), pixels)


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=float, default=200)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--images", type=int, help="take only that many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true", help="where torch.compile does not work")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with images/, and for the result")
    chosen = parser.parse_args(given)
    images = read_images(chosen.data / "images")[: chosen.images]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder = pretrain(
        images,
        epochs=chosen.epochs,
        batch=chosen.batch,
        lr=chosen.lr,
        seed=chosen.seed,
        device=device,
        compiled=device.type == "cuda" and not chosen.no_compile,
    )
    # The head has learned nothing; a recipe starts it anew by its own seed.
    weights = {n: v.cpu().contiguous() for n, v in encoder.state_dict().items() if not n.startswith("head.")}
    save_file(weights, chosen.data / "pretrained.safetensors", {"format": "pt"})
    print(f"written: {chosen.data / 'pretrained.safetensors'}")


if __name__ == "__main__":
    main()

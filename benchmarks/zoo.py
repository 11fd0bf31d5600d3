"""Checkpoints of real shapes with random weights, for measuring; and the model that takes them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn


def Normalised(name: str) -> nn.Module:  # noqa: N802 - stands where a model class would
    """torchvision's model with uint8 images normalised on the device, in the model's dtype."""
    import torchvision

    model = getattr(torchvision.models, name)(weights=None)
    model.register_forward_pre_hook(_normalise)
    return model


def _normalise(model: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,) = args
    dtype = next(model.parameters()).dtype
    return (x.to(dtype).sub_(118.0).div_(58.0),) if x.dtype == torch.uint8 else args


def files_of(folder: Path, name: str, models: int) -> list[Path]:
    return [folder / name / f"model_{k}.safetensors" for k in range(models)]


def make_files(folder: Path, name: str, models: int) -> list[Path]:
    """K safetensors files around one random model; made on the GPU where there is one, kept for the next run."""
    files = files_of(folder, name, models)
    (folder / name).mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    base = {n: p.detach() for n, p in Normalised(name).named_parameters()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = {n: p.to(device) for n, p in base.items()}
    for k, file in enumerate(files):
        if not file.exists():
            generator = torch.Generator(device).manual_seed(k + 1)
            state = {
                n: (p + 1e-3 * torch.randn(p.shape, generator=generator, device=device)).cpu() for n, p in base.items()
            }
            save_file(state, file)
    return files

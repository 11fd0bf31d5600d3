"""Checkpoints of real shapes with random weights, for measuring; and the model that takes them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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


def make_pool(folder: Path, name: str, models: int, images: int) -> tuple[list[Path], Tensor, Tensor]:
    """K files of models that are right on some 70 to 85 % of images, and those images with their labels.

    A random model with spread-out predictions is the truth; a tenth of the labels are drawn by chance. An ingredient is
    that model with noise of its own and some of a direction in which all of them are wrong, the later the more.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    # Patches of one colour: what a random model tells apart.
    patches = torch.randint(0, 256, (images, 3, 7, 7), dtype=torch.uint8, device=device)
    x = torch.cat([part.repeat_interleave(32, 2).repeat_interleave(32, 3).cpu() for part in patches.split(1000)])
    model = Normalised(name).to(device).eval()
    head = model.get_submodule("heads.head")
    assert isinstance(head, nn.Linear)
    nn.init.normal_(head.weight, std=0.05)
    base = {n: p.detach().clone() for n, p in model.named_parameters()}
    common = {n: torch.randn_like(p) for n, p in base.items()}

    def state(k: int, noise: float) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(k + 1)
        made = {}
        for n, p in base.items():
            own = torch.randn(p.shape, generator=generator, device=device)
            made[n] = p + noise * (own + k / models * common[n]) if k >= 0 else p
        return made

    def predicted(state: dict[str, Tensor], few: Tensor) -> Tensor:
        with torch.no_grad():
            model.load_state_dict(state)
            narrow = model.to(torch.bfloat16)
            found = torch.cat([narrow(part.to(device)).float() for part in few.split(500)])
            model.float()
        return found

    logits = predicted(base, x[:1000])
    base["heads.head.bias"] = -logits.mean(0)
    labels = predicted(base, x).argmax(1).cpu()
    # Noise in proportion to nothing: the first power of two at which a model is right on at most 85 %.
    noise = 2.0**-12
    while (
        noise < 1
        and float((predicted(state(0, noise), x[:1000]).argmax(1).cpu() == labels[:1000]).float().mean()) > 0.85
    ):
        noise *= 2**0.5
    wrong = torch.rand(images) < 0.1
    labels[wrong] = torch.randint(0, 1000, (int(wrong.sum()),))

    def write(state: dict[str, Tensor], file: Path) -> None:
        save_file({n: p.cpu() for n, p in state.items()}, file)

    files = files_of(folder, name, models)
    (folder / name).mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(8) as threads:
        written = []
        for k, file in enumerate(files):
            if not file.exists():
                written.append(threads.submit(write, state(k, noise), file))
            if len(written) > 16:
                written.pop(0).result()
        for job in written:
            job.result()
    return files, x, labels

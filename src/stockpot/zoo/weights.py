"""Weights of a live model on their way to and from the disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import files
from stockpot.errors import RunError, TaskError
from stockpot.soup.build import copy_companions


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Everything in the state dict that is a tensor; tied ones under each name."""
    return copied(model.state_dict())


def copied(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Of the tensors among them, copies on the host that share no memory, which safetensors would refuse."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    return {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in tensors.items()}


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], *, subject: str = "starting weights") -> None:
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    fitting = {name for name in own.keys() & weights.keys() if own[name].shape == weights[name].shape}
    if wrong := [name for name in {**own, **weights} if name not in fitting]:
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        expected = f"the {len(own)} tensors of {type(model).__name__}"
        found = f"others, or other shapes, for {', '.join(wrong[:4])}{more}"
        raise TaskError.of(subject, expected=expected, found=found, fix="give the state dict of this very model")
    model.load_state_dict(dict(weights), strict=False)


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], root: Path) -> None:
    """One safetensors file, there whole or not at all."""
    with files.file(path, root) as place:
        save_file(dict(tensors), place, dict(metadata))


def read_file(path: Path, root: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(files.check_inside(root, path), framework="pt") as file:
            names = list(file.keys())
            # Copied: the file is mapped, and may be replaced or removed while its tensors are in use.
            return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        expected, fix = "weights that an earlier run wrote", "remove the folder and start again"
        raise RunError.of(str(path), expected=expected, found=str(error), fix=fix) from error


def write_directory(path: Path, model: nn.Module, companions: Path | None, root: Path) -> None:
    """A model folder in Hugging Face form, with the config and tokenizer found in `companions`."""
    with files.directory(path, overwrite=True, root=root) as folder:
        save_file(weights_of(model), folder / "model.safetensors", {"format": "pt"})
        if companions is not None:
            copy_companions(companions, folder)
        to_json = getattr(getattr(model, "config", None), "to_json_string", None)
        if to_json is not None:
            # The model in memory may have another head than the folder it came from.
            config = {**json.loads(to_json(use_diff=False)), "architectures": [type(model).__name__]}
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

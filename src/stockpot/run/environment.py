"""What a result depends on besides the recipe: versions and hardware."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

# Libraries that may change a result; those that are not installed are not listed.
_LIBRARIES = ("safetensors", "numpy", "transformers", "tokenizers", "timm", "torchvision", "open_clip_torch")


def environment(device: str | None = None) -> dict[str, Any]:
    """Plain JSON values. `device` is what the work runs on, as torch names it."""
    import torch

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _processor(),
        "cores": _cores(),
        "memory": _memory(),
        "device": _device(device),
        "threads": torch.get_num_threads(),
    }
    facts["libraries"] = {name: version for name in _LIBRARIES if (version := installed(name)) is not None}
    return facts


def installed(distribution: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    """Those this process may use, which in a container is fewer than the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _device(device: str | None) -> str:
    import torch

    wanted = torch.device(device) if device is not None else torch.device("cpu")
    if wanted.type == "cuda" and torch.cuda.is_available():
        return f"{wanted} ({torch.cuda.get_device_name(wanted)})"
    return str(wanted)

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

    cuda = device is not None and device.startswith("cuda") and torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cpu": _processor(),
        # Those this process may use, which in a container is fewer than the machine has.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": _memory(),
        "device": f"{device} ({torch.cuda.get_device_name(device)})" if cuda else device or "cpu",
        "threads": torch.get_num_threads(),
        "libraries": {name: version for name in _LIBRARIES if (version := installed(name)) is not None},
    }


def installed(distribution: str) -> str | None:
    """The version of a package, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None

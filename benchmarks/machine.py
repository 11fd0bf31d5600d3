"""What a figure was measured on; every result file carries it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe(*packages: str) -> dict[str, Any]:
    versions = {}
    for package in ("torch", "safetensors", "numpy", *packages):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    info = {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "command": _command(),
    }
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            info["gpu"] = torch.cuda.get_device_name()
    return info


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _command() -> str:
    """The command without where its files went, which is nobody else's business."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if skip or word in ("--out", "--folder", "--peer"):
            skip = not skip
            continue
        words.append(word)
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])

"""Where the time of a job goes: samples of the main thread's stack, and the kernels a GPU ran."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

EACH = 0.01  # seconds between two samples
SHOWN = 0.4  # seconds; less is not printed
OURS = ("stockpot", "benchmarks")


class Sampled:
    """Meanwhile another thread looks at the main thread's stack a hundred times a second."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sampler", daemon=True)
        self.seconds = 0.0

    def __enter__(self) -> Sampled:
        self._began = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        self.seconds = time.perf_counter() - self._began

    def _look(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not self._over.wait(EACH):
            frame: FrameType | None = sys._current_frames().get(main)
            stack: list[str] = []
            while frame is not None:
                path = Path(frame.f_code.co_filename)
                ours = any(part in OURS for part in path.parts)
                if ours or not stack:  # of other libraries the innermost function only
                    stack.append(f"{path.stem}.{frame.f_code.co_name}")
                frame = frame.f_back
            self._counts[tuple(reversed(stack))] += 1

    def lines(self) -> list[str]:
        """Seconds spent in and below every function of ours, as a tree."""
        total = sum(self._counts.values()) or 1
        below: Counter[tuple[str, ...]] = Counter()
        for stack, count in self._counts.items():
            for depth in range(1, len(stack) + 1):
                below[stack[:depth]] += count
        scale = self.seconds / total
        out: list[str] = []

        def show(stack: tuple[str, ...]) -> None:
            out.append(f"{below[stack] * scale:7.2f} s {'  ' * (len(stack) - 1)}{stack[-1]}")
            inner = [other for other in below if other[:-1] == stack and below[other] * scale >= SHOWN]
            for each in sorted(inner, key=lambda one: -below[one]):
                show(each)

        for top in sorted({stack[:1] for stack in below}):
            if below[top] * scale >= SHOWN:
                show(top)
        return out


def kernels(step: Any, repeat: int = 5, most: int = 25) -> list[dict[str, Any]]:
    """The kernels that take most of a step's time on the GPU: name, milliseconds a step, launches a step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(repeat):
            step()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            entry = sums.setdefault(event.name[:110], [0.0, 0.0])
            entry[0] += event.time_range.elapsed_us()
            entry[1] += 1
    rows = [
        {"kernel": name, "ms": round(us / 1000 / repeat, 3), "launches": round(count / repeat, 1)}
        for name, (us, count) in sorted(sums.items(), key=lambda item: -item[1][0])
    ]
    return rows[:most]

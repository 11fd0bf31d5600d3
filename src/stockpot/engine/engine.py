"""What learning runs on: the memory plan, the loader that follows it, and the way a step is taken."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

import torch
from torch import Tensor

from stockpot.engine import ahead, budget, parallel
from stockpot.engine.descent import Choices, Descent
from stockpot.engine.directions import Directions
from stockpot.engine.feed import Feed
from stockpot.engine.graph import GraphDescent
from stockpot.engine.live import Live
from stockpot.engine.loader import Loader, StreamingLoader
from stockpot.engine.low_memory import recomputing
from stockpot.events import Event, Listener, ignore
from stockpot.task import Data


class EngineChoices(Choices, Protocol):
    @property
    def batch_size(self) -> int: ...
    @property
    def directions(self) -> str: ...
    @property
    def memory(self) -> int | None: ...
    @property
    def low_memory(self) -> bool: ...
    @property
    def compile(self) -> bool: ...
    @property
    def graphs(self) -> bool: ...


class Engine:
    """Made once per learning run; `close` it afterwards."""

    def __init__(
        self,
        live: Live,
        choices: EngineChoices,
        data: Data,
        *,
        block_size: int,
        fixed_block: bool = True,
        tracks: int = 1,
        listen: Listener = ignore,
    ) -> None:
        self.live = live
        self.choices = choices
        self.listen = listen
        self._stack = ExitStack()
        self._cuda = live.device.type == "cuda"
        self._feeds: dict[tuple[int, int], Feed] = {}
        self._descent: Descent | None = None
        self._eager = not choices.graphs or not self._cuda or parallel.active()
        self._path_said = ""
        ahead.finish()
        self.plan = self._choose(data, block_size, fixed_block, tracks)
        self.loader = self._loader()
        if choices.compile:
            self._stack.enter_context(live.task.compiled())  # after the trial passes: they have other shapes
        if self.plan.low_memory:
            self._stack.enter_context(recomputing(live.task.model))
        listen(
            Event(
                "plan", {"text": str(self.plan), "forecast": self.plan.total, "parts": dict(self.plan.parts)}
            )
        )

    def _choose(self, data: Data, block_size: int, fixed_block: bool, tracks: int) -> budget.Plan:
        live, c = self.live, self.choices
        width = live.flat.element_size()
        if c.directions != "auto":
            dtypes = [budget.DTYPES[c.directions]]
        else:
            dtypes = (
                [torch.bfloat16, torch.int8] if self._cuda and live.dtype == torch.float32 else [live.dtype]
            )
        step, sample, kept = self._measure(data) if self._cuda else (2 * width * live.plan.size, 0.0, 0)
        resident = self._resident_bytes(data)
        need = budget.Need(
            models=len(live.pool),
            parameters=live.plan.size,
            model_width=width,
            held_models=1
            if self._cuda
            else 3 + tracks,  # on CUDA the mean and the idle folds wait on the host
            batch=min(c.batch_size, len(data)),
            step=step,
            sample=sample,
            data=resident,
            kept=kept,
        )
        limit = c.memory if c.memory is not None else budget.free_memory(live.device)
        if limit is not None and c.memory is None:
            limit = int(0.92 * limit) + torch.cuda.memory_allocated(live.device)
        if limit is None and not fixed_block:
            limit = budget.host_share()
        return budget.choose(
            need,
            wanted_block=block_size,
            fixed_block=fixed_block,
            dtypes=dtypes,
            accumulate=c.accumulate,
            max_accumulate=max(1, min(c.batch_size, len(data)) // 8),
            low_memory=c.low_memory,
            budget=limit,
        )

    def _resident_bytes(self, data: Data) -> int:
        """Data is kept on the device when it takes little of what is free there."""
        free = budget.free_memory(self.live.device)
        if free is None or data.columns is None or self.choices.memory is not None:
            return 0
        return data.nbytes if data.nbytes < free // 8 else 0

    def _measure(self, data: Data) -> tuple[int, float, int]:
        """Peak bytes of a forward and backward pass, as a constant and per sample, and bytes of what is not mixed.

        Measured on parts of a batch, so that it cannot run out of memory itself.
        """
        live, task = self.live, self.live.task
        model = task.model
        total = sum(t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()])
        kept = max(0, total - live.flat.numel() * live.flat.element_size())
        size = min(self.choices.batch_size, len(data))
        peaks = []
        sizes = sorted({max(1, size // 8), max(1, size // 4)})
        for n in sizes:
            batch = task.to_device(data.batch(torch.arange(n)))
            for _ in range(2):  # the first pass also pays for libraries
                torch.cuda.synchronize(live.device)
                torch.cuda.reset_peak_memory_stats(live.device)
                before = torch.cuda.memory_allocated(live.device)
                with task.learning():
                    task.loss(batch).backward()  # type: ignore[no-untyped-call]
                live.clear_gradient()
                peak = torch.cuda.max_memory_allocated(live.device) - before
            peaks.append(peak)
            del batch
        torch.cuda.empty_cache()
        if len(sizes) == 1:
            return peaks[0], 0.0, kept
        slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
        return int(peaks[0] - slope * sizes[0]), slope, kept

    def _loader(self) -> Loader:
        if not self._cuda or self.live.dtype != torch.float32:
            return Loader(self.live, self.plan.dtype)
        return StreamingLoader(self.live, self.plan.dtype, self.plan.block_size)

    def descent(
        self,
        directions: Directions,
        fixed: Tensor,
        raw: Tensor,
        temperature: float | None,
        steps: int,
        data: Data,
    ) -> Descent:
        """Ready to take steps on this block; captured graphs are used again where they fit."""
        live, c, plan = self.live, self.choices, self.plan
        if not self._eager and data.columns is not None:
            feed = self._feed(data)
            old = self._descent
            if isinstance(old, GraphDescent) and old.can_restart(live, directions, fixed, raw, steps, feed):
                old.restart(raw, temperature)
                return old
            self._drop()
            try:
                self._descent = GraphDescent(
                    live, directions, fixed, raw, temperature, c, steps, feed, low_memory=plan.low_memory
                )
                self._say("CUDA graph")
                return self._descent
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a model that cannot be captured: its own code may raise anything
                self._eager = True
                self._say(f"eager, because the step cannot be captured: {str(error).splitlines()[0][:160]}")
        self._drop()
        self._descent = Descent(
            live,
            directions,
            fixed,
            raw,
            temperature,
            c,
            steps,
            accumulate=plan.accumulate,
            low_memory=plan.low_memory,
        )
        self._say("eager")
        return self._descent

    def _feed(self, data: Data) -> Feed:
        """One for all folds of the same samples: they are on the device once, and one graph serves them."""
        size = min(self.choices.batch_size, len(data))
        key = (id(data.columns), size)
        if key not in self._feeds:
            resident = self.plan.parts["data"] > 0
            self._feeds[key] = Feed(data, self.live.device, size, self.plan.accumulate, resident)
        return self._feeds[key]

    def release(self) -> None:
        """Let go of the block just learned, before the next one is loaded; a captured graph is used again."""
        if not isinstance(self._descent, GraphDescent):
            self._drop()

    def _drop(self) -> None:
        if self._descent is not None:
            self._descent.close()
            self._descent = None

    def _say(self, path: str) -> None:
        if not self._path_said:
            self._path_said = path
            self.listen(Event("engine", {"path": path}))

    def close(self) -> None:
        self._drop()
        for feed in self._feeds.values():
            feed.close()
        self._feeds.clear()
        self.loader.close()
        self._stack.close()

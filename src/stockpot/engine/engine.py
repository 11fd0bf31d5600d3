"""What Algorithm 1 runs on: a live model, the loaded block, and the gradient of the coefficients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from stockpot import ranks
from stockpot.engine.directions import Directions
from stockpot.engine.live import Live
from stockpot.engine.loader import LastBlock, Loader, StreamingLoader
from stockpot.engine.low_memory import Projector, recomputing
from stockpot.engine.memory import Options, planned
from stockpot.engine.optimiser import AdamW, CapturedStep, TakeStep
from stockpot.events import Event, Listener, ignore
from stockpot.task import Data
from stockpot.task.captured import Batch, DeviceBatches
from stockpot.task.data import forked_random
from stockpot.task.loss import Loss

BURST = 50  # steps at most between two waits for the device
FP16_SCALES = (4096.0, 1.0)  # on the loss under fp16 autocast, whose smallest number is 6e-8


class Engine:
    """Made for one learning run; `close` it afterwards."""

    def __init__(
        self,
        live: Live,
        options: Options,
        data: Data,
        *,
        block_size: int,
        fixed_block: bool = True,
        theta_bar: Tensor | None = None,  # (P,) where it is known from an earlier run on the same pool
        last: LastBlock | None = None,
        listen: Listener = ignore,
    ) -> None:
        self.live = live
        self.options = options
        self.listen = listen
        self._stack = ExitStack()
        self._cuda = live.device.type == "cuda"
        self._device_batches: dict[tuple[int, int], DeviceBatches] = {}
        self._captured: CapturedStep | None = None
        self._captured_for: tuple[object, ...] = ()
        self._projector: Projector | None = None
        self._eager = (
            not options.graphs
            or not self._cuda
            or ranks.active()
            or live.sharded
            or live.task.autocast == torch.float16  # a step may have to be tried again
        )
        self._told = False
        self._block: tuple[int, ...] = ()
        self._next: tuple[int, ...] = ()
        self._directions: Directions | None = None
        try:
            self.plan = ranks.decided_once(lambda: planned(live, options, data, block_size, fixed_block))
            self.loader = self._loader(last)
            if options.compile:
                # After the trial passes: they have other shapes.
                self._stack.enter_context(live.task.compiled())
            if self.plan.low_memory:
                self._stack.enter_context(recomputing(live.task.model))
            parts = dict(self.plan.parts)
            listen(Event("plan", {"text": str(self.plan), "forecast": self.plan.total, "parts": parts}))
            with self._compiling():
                self.theta_bar = self.loader.mean(listen=listen) if theta_bar is None else theta_bar
            self.fixed = torch.empty(live.plan.size, dtype=live.soup_dtype, device=live.device)  # (P,) theta_fix
            self._fixed_for: Tensor | None = None  # coefficients outside the block that it was made for
        except BaseException:  # such as memory that ran out: the model must not keep what was put around it
            self.close()
            raise

    def _loader(self, last: LastBlock | None) -> Loader:
        if not self._cuda or self.live.dtype != torch.float32 or self.live.factored:
            return Loader(self.live, self.plan.dtype, last)
        return StreamingLoader(self.live, self.plan.dtype, self.plan.block_size)

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Meanwhile the kernels are compiled, where there are any."""
        if not isinstance(self.loader, StreamingLoader):
            yield
            return
        from stockpot.engine import kernels

        thread = kernels.compile_ahead(self.live.device, self.plan.dtype, self.live.flat.dtype, self.live.soup_dtype)
        try:
            yield
        finally:
            thread.join()

    # The block and the soup ---------------------------------------------------------------------------

    def load(self, block: Sequence[int]) -> Directions:
        """The block's directions theta_k - theta_bar; those that are loaded already are used again."""
        if self._directions is None or self._block != tuple(block):
            if self._captured is None:  # a graph keeps what it was captured with: the same places, other values
                self._drop_block()
            self._directions = None  # free the old block before loading the next one
            self._directions = self.loader.load(list(block), self.theta_bar)
            self._block = tuple(block)
            if self._captured is not None and self._captured_for[:2] != _place(self._directions):
                self._drop_block()
                self._block = tuple(block)
            one_by_one = (self.plan.low_memory or self.plan.one_by_one or self.live.sharded) and not self.live.factored
            if one_by_one and self._projector is None:
                self._projector = Projector(self.live, self._directions)
        return self._directions

    def prefetch(self, block: Sequence[int]) -> None:
        """Begin to read the block that comes next while this one learns; asked again, nothing happens."""
        if self._next != tuple(block):
            self._next = tuple(block)
            self.loader.prefetch(list(block), self.theta_bar)

    def theta_fix(self, alpha: Tensor, block: Sequence[int]) -> Tensor:
        """theta_bar + sum over the models that are not in the block of alpha_k d_k, from the files. (P,)"""
        rest = alpha.clone()
        rest[list(block)] = 0.0
        if self._fixed_for is None or not torch.equal(self._fixed_for, rest):  # folds take turns with the same rest
            self._fixed_for = None
            self.fixed.copy_(self.theta_bar)
            self.loader.add(self.fixed, rest, self.theta_bar)
            self._fixed_for = rest
        return self.fixed

    def mix(self, theta_fix: Tensor, c: Tensor) -> None:
        """Make the model theta_fix + sum_k c_k d_k over the loaded block. c: (b, G)"""
        assert self._directions is not None
        with torch.no_grad():
            if self._directions.fast and not self.live.copied:
                self._directions.mix(theta_fix, c, out=self.live.flat)  # rounds to the model's dtype on the way
                self.live.push_copies()
            else:
                self._directions.mix(theta_fix, c, out=self.live.theta)
                self.live.push()

    # The gradient -------------------------------------------------------------------------------------

    def gradient(self, D: Directions, batch: Batch, beta: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The mean loss of the model on a batch, its gradient by the block's coefficients (b, G), and by beta.

        One backward pass through the mixed model and one projection (eq. 6). Losses are sums with weights, so a
        batch in any number of pieces, on any number of ranks, gives the same. Under fp16 autocast the loss is scaled
        up, or small gradients would be zero; where the scaled ones overflow, it is done again without.
        """
        live, dtype = self.live, self.live.dtype
        for scale in FP16_SCALES if live.task.autocast == torch.float16 else (1.0,):
            live.clear_gradient()
            if self._projector is not None:
                self._projector.begin()
            factor = None if beta is None else beta.detach().clone().requires_grad_()
            sums = torch.zeros(2, dtype=dtype, device=live.device)  # of losses and of their weights
            for i, piece in enumerate(batch.pieces):
                loss = live.task.loss(piece, beta=factor)
                if i >= len(batch.pieces) - batch.idle:
                    loss = Loss(loss.total * 0, loss.weight * 0)
                # Divided by the number of samples first: a sum over many might not fit a narrow dtype.
                (loss.total * (scale / batch.size)).backward()  # type: ignore[no-untyped-call]
                sums += torch.stack([loss.total.detach(), loss.weight]).to(dtype)
            with torch.no_grad():
                # Where gradients are taken one by one, backward has projected already.
                projector = self._projector
                slope = D.project(live.collect_gradient()) if projector is None else projector.finish()  # (b, G)
                slope = slope.to(dtype)
                of_beta = [] if factor is None else [torch.zeros_like(factor) if factor.grad is None else factor.grad]
                ranks.add_up([slope, sums, *of_beta])
                # A batch of masked labels alone: a sum of nothing over nothing, from which nothing is learned.
                count = torch.where((sums == 0).all(), 1, sums[1])
                unscale = batch.size / (scale * count)
            if scale == 1.0 or bool(slope.isfinite().all()):
                break
        return sums[0] / count, slope * unscale, of_beta[0] * unscale if of_beta else None

    def loss_on(self, data: Data, beta: float | None) -> float:
        """The mean loss of the model as it is, on all samples of the data, in pieces of equal size.

        A loss that does not add up, such as a contrastive one, is taken at the size of the batches that are learned
        with; samples that fill no batch are left out.
        """
        live, task = self.live, self.live.task
        factor = None if beta is None else torch.tensor(beta, dtype=live.dtype, device=live.device)
        if self._cuda and not ranks.active() and task.loss_adds_up and not task.has_statistics:
            return task.evaluator.mean_loss(data, task.batch_size, factor)
        # In double precision, which Apple's devices do not have.
        sums = torch.zeros(2, dtype=torch.float64, device=live.device if self._cuda else "cpu")
        with torch.no_grad(), forked_random(live.device) as seed:
            seed(0)  # a model that draws numbers draws the same whenever it is judged, after a restart too
            for piece in self._pieces(len(data)):
                mine = ranks.share(piece)
                if task.sharded and not len(mine):
                    task.loss(task.evaluator.batch(data, piece[:1]), beta=factor)  # the others need this rank's part
                if len(mine):
                    loss = task.loss(task.evaluator.batch(data, mine), beta=factor)
                    sums += torch.stack([loss.total, loss.weight.to(loss.total)]).to(sums.device).double()
        ranks.add_up([sums])
        return float(sums[0] / sums[1])

    def _pieces(self, n: int) -> tuple[Tensor, ...]:
        rows = torch.arange(n)
        if self.live.task.loss_adds_up:
            # A last batch of two samples would spoil batch statistics.
            return rows.tensor_split(-(-n // self.live.task.batch_size))
        size = min(self.options.batch_size, n)
        return rows[: n - n % size].tensor_split(n // size)

    # The way steps are taken --------------------------------------------------------------------------

    @property
    def burst(self) -> int:
        """Steps worth taking before the host waits for the device."""
        return 1 if self._captured is None else BURST

    def optimiser(self, alpha: Tensor, beta: float | None, weight_decay: float) -> AdamW:
        """AdamW at these coefficients (b, G); the one that a captured graph changes, where there is one that fits."""
        fresh = AdamW(alpha.to(self.live.device, self.live.dtype), beta, weight_decay)
        if self._captured is None:
            return fresh
        kept = self._captured.optimiser
        if (kept.alpha.shape, kept.beta is None, kept.weight_decay) != (fresh.alpha.shape, beta is None, weight_decay):
            return fresh
        kept.load(fresh.save())
        return kept

    def prepared(self, step: TakeStep, optimiser: AdamW, data: Data, key: object) -> TakeStep:
        """The step as it is, or captured as a CUDA graph; one that was captured before is used again where it fits.

        `key` names everything that the step depends on besides the loaded block, theta_fix and the optimiser.
        """
        assert self._directions is not None
        if self._eager or data.columns is None:
            self._captured = None
            self._tell("eager")
            return step
        batches = self._batches_of(data)
        whole = (*_place(self._directions), key, id(optimiser), id(batches))
        if self._captured is not None and self._captured_for == whole:
            return self._captured
        self._captured = None
        try:
            self._captured = CapturedStep(self.live, step, optimiser, batches)
            self._captured_for = whole
            self._tell("CUDA graph")
            return self._captured
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a model that cannot be captured: its own code may raise anything
            self._eager = True
            self.live.clear_gradient()
            self._tell(f"eager, because the step cannot be captured: {str(error).splitlines()[0][:160]}")
            return step

    def batch(self, data: Data, indices: Tensor) -> Batch:
        """This rank's pieces of a batch of the data, on the device; where a graph reads it, if there is one."""
        if self._captured is not None:
            self._captured.batches.put(data.rows(indices))
            return self._captured.batches.batch
        mine, most = ranks.share(indices), -(-len(indices) // ranks.sharing())  # of any rank
        size = -(-most // min(self.plan.accumulate, most))
        pieces = [piece for piece in mine.split(size) if len(piece)]  # type: ignore[no-untyped-call]
        # Where the model is divided, all must pass through it equally often: with a sample that counts for nothing.
        idle = -(-most // size) - len(pieces) if self.live.sharded else 0
        pieces += [indices[:1]] * idle
        return Batch([self.live.task.to_device(data.batch(piece)) for piece in pieces], len(indices), idle)

    def _batches_of(self, data: Data) -> DeviceBatches:
        """One for all folds of the same samples: they are on the device once, and one graph serves them."""
        size = min(self.options.batch_size, len(data))
        key = (id(data.columns), size)
        if key not in self._device_batches:
            columns = self.live.task.evaluator.columns(data) if self.plan.parts["data"] > 0 else None
            self._device_batches[key] = DeviceBatches(data, self.live.device, size, self.plan.accumulate, columns)
        return self._device_batches[key]

    def _drop_block(self) -> None:
        """Forget the graph and take the hooks that project off the model."""
        self._captured = None
        if self._projector is not None:
            self._projector.close()
            self._projector = None
        self._block = ()

    def _tell(self, path: str) -> None:
        if not self._told:
            self._told = True
            self.listen(Event("engine", {"path": path}))

    def close(self) -> None:
        self._drop_block()
        self._directions = None
        for batches in self._device_batches.values():
            batches.close()
        self._device_batches.clear()
        if hasattr(self, "loader"):
            self.loader.close()
            self.loader.free()  # its rows are most of what was taken; the next engine plans with what is free
            del self.loader
        if hasattr(self, "fixed"):
            self.fixed.untyped_storage().resize_(0)  # a frame that an error keeps alive may still refer to it
            del self.fixed
        self._stack.close()


def _place(directions: Directions) -> tuple[object, object]:
    """Where a block lies: a graph that was captured there can be used again for another block."""
    return directions.rows.data_ptr(), directions.rows.shape

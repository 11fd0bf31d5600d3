"""A soup: pool + layout + W, and the little that W does not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import atomic
from stockpot.disk import require_space
from stockpot.errors import SoupError, describe
from stockpot.events import Listener, ignore, one_at_a_time
from stockpot.layout import Layout
from stockpot.pool import Pool, TensorSpec
from stockpot.soup import build, record, weights
from stockpot.soup.files import MAX_SHARD, copy_companions, parse_size, write_weights


@dataclass(frozen=True, eq=False)
class Soup:
    """`theta[l] = sum_k W[k, group(l)] * theta_k[l]`; nothing is computed before it is asked for."""

    pool: Pool
    layout: Layout
    W: Tensor  # (K, G) float64
    statistics: Mapping[str, Tensor] | None = None  # recalibrated running statistics, by name
    copy_statistics: bool = False  # running statistics of the heaviest ingredient instead of the average
    temperature: float | None = None  # factor on the logits, when one was learned
    free: bool = False  # columns need not sum to one (ablation without decentralisation)
    about: Mapping[str, Any] = field(default_factory=dict)  # method, settings, scores: whatever made it

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", weights.check(self.W, len(self.pool), len(self.layout), free=self.free))

    @classmethod
    def uniform(cls, pool: Pool, layout: Layout | None = None) -> Soup:
        layout = layout or Layout.of(pool, "model")
        return cls(pool, layout, weights.uniform(len(pool), len(layout)), about={"method": "uniform"})

    def state_dict(self, dtype: torch.dtype | None = None, listen: Listener = ignore) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._tensors(dtype, listen)}

    def load_into(self, model: nn.Module) -> None:
        """Put the soup's weights into a model that has the ingredients' tensors."""
        own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        unsaved = dict(model.named_buffers(remove_duplicate=False))  # some of them are never in a state dict
        _check_takes(model, own, unsaved | own, self.pool.specs)
        state = self.state_dict()
        model.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)
        for name in state.keys() - own.keys():
            unsaved[name].copy_(state[name])

    def save(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard: int | str = MAX_SHARD,
        overwrite: bool = False,
        listen: Listener = ignore,
    ) -> Path:
        """Write weights, mixing weights and ingredients' digests into a directory, whole or not at all."""
        path = Path(path)
        shard = parse_size(max_shard)
        listen = one_at_a_time(listen)
        self._check_room(path, dtype)
        with (
            atomic.directory(path, overwrite=overwrite) as folder,
            ThreadPoolExecutor(1, "stockpot-digests") as beside,
        ):
            alone = self.pool.hashed
            known = beside.submit(self.pool.digests, listen)  # hashing and mixing read the same pages
            write_weights(folder, self._tensors(dtype, listen, alone=alone), shard)
            digests = known.result()
            self._copy_companions(folder)
            if self.statistics is not None:
                save_file({k: v.contiguous() for k, v in self.statistics.items()}, folder / record.STATISTICS)
            self.pool.verify_unchanged()
            atomic.write_json(folder / record.RECORD, record.encode(self, digests, dtype, shard))
        return path

    def export(
        self,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_shard: int | str = MAX_SHARD,
        overwrite: bool = False,
        listen: Listener = ignore,
    ) -> Path:
        """Only the weights, for serving: without the record and digests that `save` adds to rebuild the soup."""
        path = Path(path)
        shard = parse_size(max_shard)
        self._check_room(path, dtype)
        with atomic.directory(path, overwrite=overwrite) as folder:
            write_weights(folder, self._tensors(dtype, listen), shard)
            self._copy_companions(folder)
            self.pool.verify_unchanged()
        return path

    def _check_room(self, path: Path, dtype: torch.dtype | None) -> None:
        specs = self.pool.specs.values()
        width = None if dtype is None else dtype.itemsize
        floats = sum(
            spec.numel * (width or spec.dtype.itemsize) for spec in specs if spec.dtype.is_floating_point
        )
        rest = sum(spec.nbytes for spec in specs if not spec.dtype.is_floating_point)
        require_space(path, floats + rest, "the soup")

    def _copy_companions(self, folder: Path) -> None:
        source = self.pool.checkpoints[self.layout.donor].path
        if source.is_dir():
            copy_companions(source, folder)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        ingredients: str | Path | Iterable[str | Path] | None = None,
        listen: Listener = ignore,
    ) -> Soup:
        """Open a saved soup together with its ingredients, refusing ingredients that have changed.

        `ingredients` says where they are now; in any order, they are matched by digest.
        """
        return record.load(Path(path), ingredients, listen)

    def _tensors(
        self, dtype: torch.dtype | None, listen: Listener, alone: bool = True
    ) -> Iterable[tuple[str, Tensor]]:
        return build.tensors(
            self.pool,
            self.layout,
            self.W,
            statistics=self.statistics,
            copy_statistics=self.copy_statistics,
            dtype=dtype,
            free=self.free,
            alone=alone,
            listen=listen,
        )


def _check_takes(
    model: nn.Module,
    own: Mapping[str, Tensor],
    holds: Mapping[str, Tensor],
    specs: Mapping[str, TensorSpec],
) -> None:
    """Before anything is written: a model must not be left half soup."""
    given = {own[name].data_ptr() for name in specs if name in own}
    lacking = [
        name
        for name, value in own.items()
        if name not in specs
        and not name.endswith("num_batches_tracked")  # counts what nothing depends on
        and value.data_ptr() not in given  # one name of a tied tensor is enough
    ]
    unknown = [name for name in specs if name not in holds]
    shapes = [
        name for name, spec in specs.items() if name in holds and tuple(holds[name].shape) != spec.shape
    ]
    if lacking or unknown or shapes:
        raise SoupError(
            describe(
                f"model {type(model).__name__}",
                expected="the tensors of the ingredients",
                found=f"{len(lacking)} without a value {lacking[:3]}, {len(unknown)} unknown {unknown[:3]},"
                f" {len(shapes)} of another shape {shapes[:3]}",
                fix="pass the same architecture that was fine-tuned, or open the pool with rename=",
            )
        )


def rebuild(
    soup: str | Path,
    path: str | Path,
    *,
    ingredients: str | Path | Iterable[str | Path] | None = None,
    overwrite: bool = False,
    listen: Listener = ignore,
) -> Path:
    """Write the same soup again, byte for byte, from its record (`soup.json`) and the ingredients."""
    loaded = Soup.load(soup, ingredients=ingredients, listen=listen)
    saved = record.read(Path(soup))
    return loaded.save(
        path,
        dtype=record.dtype_of(saved.get("dtype")),
        max_shard=record.shard_of(saved.get("max_shard")),
        overwrite=overwrite,
        listen=listen,
    )

"""A soup: pool + layout + W, and the little that W does not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from stockpot import atomic
from stockpot.errors import SoupError, describe
from stockpot.events import Listener, ignore
from stockpot.layout import Layout
from stockpot.pool import Pool
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
        state = self.state_dict()
        missing, unexpected = model.load_state_dict(state, strict=False)
        own = model.state_dict()
        given = {own[name].data_ptr() for name in state if name in own}
        lacking = [name for name in missing if own[name].data_ptr() not in given]  # tied names may be absent
        if lacking or unexpected:
            raise SoupError(
                describe(
                    f"model {type(model).__name__}",
                    expected="the tensors of the ingredients",
                    found=f"{len(lacking)} without a value {lacking[:3]}, {len(unexpected)} unknown {unexpected[:3]}",
                    fix="pass the same architecture that was fine-tuned, or open the pool with rename=",
                )
            )

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
        with atomic.directory(path, overwrite=overwrite) as folder:
            write_weights(folder, self._tensors(dtype, listen), shard)
            digests = self.pool.digests(listen)
            source = self.pool.checkpoints[self.layout.donor].path
            if source.is_dir():
                copy_companions(source, folder)
            if self.statistics is not None:
                save_file({k: v.contiguous() for k, v in self.statistics.items()}, folder / record.STATISTICS)
            atomic.write_json(folder / record.RECORD, record.encode(self, digests, dtype, shard))
        return path

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

    def _tensors(self, dtype: torch.dtype | None, listen: Listener) -> Iterable[tuple[str, Tensor]]:
        return build.tensors(
            self.pool,
            self.layout,
            self.W,
            statistics=self.statistics,
            copy_statistics=self.copy_statistics,
            dtype=dtype,
            free=self.free,
            listen=listen,
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
        dtype=record.dtype_of(saved["dtype"]),
        max_shard=int(saved["max_shard"]),
        overwrite=overwrite,
        listen=listen,
    )

"""A soup: pool + layout + W, and the little that W does not say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stockpot import files
from stockpot.errors import SoupError
from stockpot.events import Listener, ignore, one_at_a_time
from stockpot.layout import Layout
from stockpot.pool import Pool, TensorSpec
from stockpot.soup import build, card, record, weights
from stockpot.soup.build import MAX_SHARD, parse_size
from stockpot.soup.mix import StatisticsRule


@dataclass(frozen=True, eq=False)
class Soup:
    """`theta[l] = sum_k W[k, group(l)] * theta_k[l]`; nothing is computed before it is asked for."""

    pool: Pool
    layout: Layout
    W: Tensor  # (K, G) float64
    statistics: Mapping[str, Tensor] | None = None  # recalibrated running statistics, by name
    statistics_rule: StatisticsRule = field(default="average", kw_only=True)  # for those that are not given
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # method, settings: whatever made it

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", weights.check(self.W, len(self.pool), len(self.layout)))

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
        _check_takes(model, own, unsaved | own, self.pool.specs)  # first: a model must not be left half soup
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
        root: Path | None = None,
    ) -> Path:
        """Write weights, mixing weights and ingredients' digests into a directory, whole or not at all.

        `root`: the directory that the user named, below which no link is followed.
        """
        path, shard, listen = Path(path), parse_size(max_shard), one_at_a_time(listen)
        with self._writing(path, dtype, overwrite, root) as folder:
            with ThreadPoolExecutor(1, "stockpot-digests") as beside:
                alone = self.pool.hashed
                hashing = beside.submit(self.pool.digests, listen)  # reads the same pages as mixing does
                build.write_weights(folder, self._tensors(dtype, listen, alone=alone), shard)
                hashing.result()
            record.write(folder, self, shard, dtype)
            bases, made = card.base_models(self.pool), card.ingredients_of(self.pool, self.W)
            card.write_card(folder, made, base_models=bases, recipe=self.about)
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
        path, shard = Path(path), parse_size(max_shard)
        with self._writing(path, dtype, overwrite, None) as folder:
            build.write_weights(folder, self._tensors(dtype, listen), shard)
        return path

    @contextmanager
    def _writing(self, path: Path, dtype: torch.dtype | None, overwrite: bool, root: Path | None) -> Iterator[Path]:
        """A directory that becomes `path` if there is room for it and no ingredient changes meanwhile."""
        needed = sum(
            spec.numel * (dtype if dtype is not None and spec.dtype.is_floating_point else spec.dtype).itemsize
            for spec in self.pool.specs.values()
        )
        files.require_space(path, needed, "the soup")
        with files.directory(path, overwrite=overwrite, root=root) as folder:
            adapters = self.pool.adapters
            source = self.pool.checkpoints[self.layout.donor].path if adapters is None else adapters.base.path
            if source.is_dir():
                build.copy_companions(source, folder)
            yield folder
            self.pool.verify_unchanged()

    @classmethod
    def load(cls, path: str | Path, *, ingredients: record.Ingredients = None, listen: Listener = ignore) -> Soup:
        """Open a saved soup together with its ingredients, refusing ingredients that have changed.

        `ingredients` says where they are now, or is the opened pool; in any order, they are matched by digest.
        """
        return record.load(Path(path), ingredients, listen)

    def _tensors(self, dtype: torch.dtype | None, listen: Listener, alone: bool = True) -> Iterable[tuple[str, Tensor]]:
        given, rule = self.statistics, self.statistics_rule
        return build.tensors(self.pool, self.layout, self.W, given, rule, dtype, alone=alone, listen=listen)


def _check_takes(
    model: nn.Module, own: Mapping[str, Tensor], holds: Mapping[str, Tensor], specs: Mapping[str, TensorSpec]
) -> None:
    given = {own[name].data_ptr() for name in specs if name in own}
    # One name of a tied tensor is enough, and nothing depends on the number of batches.
    others = [name for name in own if name not in specs and not name.endswith("num_batches_tracked")]
    lacking = [name for name in others if own[name].data_ptr() not in given]
    unknown = [name for name in specs if name not in holds]
    shapes = [name for name, spec in specs.items() if name in holds and tuple(holds[name].shape) != spec.shape]
    if lacking or unknown or shapes:
        sorts = {"without a value": lacking, "unknown": unknown, "of another shape": shapes}
        found = ", ".join(f"{len(names)} {what} {names[:3]}" for what, names in sorts.items())
        subject, expected = f"model {type(model).__name__}", "the tensors of the ingredients"
        fix = "pass the same architecture that was fine-tuned, or open the pool with rename="
        raise SoupError.of(subject, expected=expected, found=found, fix=fix)


def rebuild(
    soup: str | Path,
    path: str | Path,
    *,
    ingredients: record.Ingredients = None,
    overwrite: bool = False,
    listen: Listener = ignore,
) -> Path:
    """Write the same soup again, byte for byte, from its record (`soup.json`) and the ingredients."""
    loaded = Soup.load(soup, ingredients=ingredients, listen=listen)
    dtype, max_shard = record.saved_as(Path(soup))
    return loaded.save(path, dtype=dtype, max_shard=max_shard, overwrite=overwrite, listen=listen)

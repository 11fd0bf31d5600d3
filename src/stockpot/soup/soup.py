"""A soup: pool + layout + W, and the little that W does not say."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stockpot import files
from stockpot.errors import SoupError
from stockpot.events import Listener, ignore, one_at_a_time
from stockpot.layout import Layout
from stockpot.names import differences, fill
from stockpot.pool import Pool
from stockpot.soup import build, card, record, weights
from stockpot.soup.adapter import Factored, Form, resolve
from stockpot.soup.build import MAX_SHARD, parse_size
from stockpot.soup.weights import StatisticsRule


@dataclass(frozen=True, eq=False)
class Soup:
    """`theta[l] = sum_k W[k, group(l)] * theta_k[l]`; nothing is computed before it is asked for."""

    pool: Pool
    layout: Layout
    W: Tensor  # (K, G) float64
    statistics: Mapping[str, Tensor] | None = None  # recalibrated running statistics, by name
    statistics_rule: StatisticsRule = field(default="average", kw_only=True)  # for those that are not given
    about: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # method, settings: whatever made it
    form: Form = field(default="auto", kw_only=True)  # of adapters: an exact adapter, one of at most a rank, or merged

    def __post_init__(self) -> None:
        object.__setattr__(self, "W", weights.check(self.W, len(self.pool), len(self.layout)))
        self.written_as  # noqa: B018  (refuses a form that this soup cannot have)

    @classmethod
    def uniform(cls, pool: Pool, layout: Layout | None = None) -> Soup:
        layout = layout or Layout.of(pool, "model")
        return cls(pool, layout, weights.uniform(len(pool), len(layout)), about={"method": "uniform"})

    @cached_property
    def written_as(self) -> Literal["merged", "adapter"] | int:
        """What `form` means for this soup."""
        rank = None if self._exact is None else self._exact.exact_rank
        return resolve(self.form, rank, statistics=self.statistics is not None)

    @cached_property
    def _exact(self) -> Factored | None:
        return None if self.pool.adapters is None else Factored(self.pool, self.layout, self.W, None)

    @cached_property
    def factored(self) -> Factored | None:
        """Of adapters: the deltas as they are written, their ranks and relative errors."""
        rank = self.written_as
        return Factored(self.pool, self.layout, self.W, rank) if isinstance(rank, int) else self._exact

    def as_form(self, form: Form) -> Soup:
        """The same soup, to be written in another form."""
        return self if form == self.form else replace(self, form=form)

    def state_dict(self, dtype: torch.dtype | None = None, listen: Listener = ignore) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self._tensors(dtype, listen)}

    def load_into(self, model: nn.Module) -> None:
        """Put the soup's weights into a model that has the ingredients' tensors."""
        # First: a model must not be left half soup.
        if found := differences(model, self.pool.specs, spare=self.pool.spare):
            subject, expected = f"model {type(model).__name__}", "the tensors of the ingredients"
            raise SoupError.of(subject, expected=expected, found=";\n  ".join(found.sentences()), fix=found.fix())
        fill(model, self.pool.specs, self._tensors(None, ignore))

    def save(
        self,
        path: str | Path,
        *,
        form: Form | None = None,
        dtype: torch.dtype | None = None,
        max_shard: int | str = MAX_SHARD,
        overwrite: bool = False,
        listen: Listener = ignore,
        root: Path | None = None,
    ) -> Path:
        """Write weights, mixing weights and ingredients' digests into a directory, whole or not at all.

        `form` of a soup of adapters: `adapter` is exact, a number is the highest rank that it may have, `merged` is a
        full model; `auto`, the default, is the exact adapter where servers take its rank, and otherwise merged.
        `root`: the directory that the user named, below which no link is followed.
        """
        path, shard, listen = Path(path), parse_size(max_shard), one_at_a_time(listen)
        soup = self if form is None else self.as_form(form)
        with soup._writing(path, dtype, overwrite, root) as folder:
            with ThreadPoolExecutor(1, "stockpot-digests") as beside:
                alone = self.pool.hashed
                hashing = beside.submit(self.pool.digests, listen)  # reads the same pages as mixing does
                soup._write_weights(folder, dtype, shard, listen, alone=alone)
                hashing.result()
            record.write(folder, soup, shard, dtype)
            bases, made = card.base_models(self.pool), card.ingredients_of(self.pool, self.W)
            relation, what = ("merge", "model soup") if soup.written_as == "merged" else ("adapter", "soup of adapters")
            card.write_card(folder, made, base_models=bases, relation=relation, what=what, recipe=self.about)
        return path

    def export(
        self,
        path: str | Path,
        *,
        form: Form | None = None,
        dtype: torch.dtype | None = None,
        max_shard: int | str = MAX_SHARD,
        overwrite: bool = False,
        listen: Listener = ignore,
    ) -> Path:
        """Only the weights, for serving: without the record and digests that `save` adds to rebuild the soup."""
        path, shard = Path(path), parse_size(max_shard)
        soup = self if form is None else self.as_form(form)
        with soup._writing(path, dtype, overwrite, None) as folder:
            soup._write_weights(folder, dtype, shard, listen)
        return path

    def _write_weights(
        self, folder: Path, dtype: torch.dtype | None, shard: int, listen: Listener, alone: bool = True
    ) -> None:
        if self.written_as == "merged" or self.factored is None:
            coming = self._tensors(dtype, listen, alone=alone)
            build.write_weights(folder, build.stored_specs(self.pool, self.layout, dtype), coming, shard)
        else:
            whole = dict(self._tensors(dtype, listen, only=self.factored.dense, alone=alone))
            self.factored.write(folder, whole, dtype)

    @contextmanager
    def _writing(self, path: Path, dtype: torch.dtype | None, overwrite: bool, root: Path | None) -> Iterator[Path]:
        """A directory that becomes `path` if there is room for it and no ingredient changes meanwhile."""
        needed = sum(spec.nbytes for spec in build.stored_specs(self.pool, self.layout, dtype).values())
        if self.written_as != "merged" and self.factored is not None:
            needed = self.factored.nbytes(dtype)
        if overwrite:
            self._check_may_replace(path)
        files.require_space(path, needed, "the soup")
        with files.directory(path, overwrite=overwrite, root=root) as folder:
            donor, adapters = self.pool.checkpoints[self.layout.donor], self.pool.adapters
            for source in (donor.path,) if adapters is None else (adapters.base.path, donor.path):
                if source.is_dir():  # an adapter's own tokenizer and chat template go before those of its base
                    # With a config.json transformers takes an adapter's folder for a full model, and fails.
                    without = () if self.written_as == "merged" else ("config.json",)
                    build.copy_companions(source, folder, without)
            stored = build.stored_specs(self.pool, self.layout, dtype)
            card.restate(folder, donor.specs, stored, adapters if self.written_as == "merged" else None)
            yield folder
            self.pool.verify_unchanged()

    def _check_may_replace(self, path: Path) -> None:
        """`overwrite` removes an earlier soup or model, never what it is made of, nor folders in it."""
        if not path.is_dir() or path.is_symlink():
            return
        made_of = [one.path for one in self.pool.checkpoints]
        if self.pool.adapters is not None:
            made_of.append(self.pool.adapters.base.path)
        inside = [one for one in made_of if one.resolve().is_relative_to(path.resolve())]
        found = [f"{one}, which this soup is made of" for one in inside]
        found += [f"a folder in it, {entry.name}" for entry in sorted(path.iterdir()) if entry.is_dir()]
        if found:
            expected, fix = "an earlier soup, which may be removed", "choose another path, or remove it yourself"
            raise SoupError.of(str(path), expected=expected, found=found[0], fix=fix)

    @classmethod
    def load(cls, path: str | Path, *, ingredients: record.Ingredients = None, listen: Listener = ignore) -> Soup:
        """Open a saved soup together with its ingredients, refusing ingredients that have changed.

        `ingredients` says where they are now, or is the opened pool; in any order, they are matched by digest.
        """
        return record.load(Path(path), ingredients, listen)

    def _tensors(
        self, dtype: torch.dtype | None, listen: Listener, only: Collection[str] | None = None, alone: bool = True
    ) -> Iterable[tuple[str, Tensor]]:
        given, rule = self.statistics, self.statistics_rule
        options: dict[str, Any] = {"factored": self.factored, "only": only, "alone": alone, "listen": listen}
        return build.tensors(self.pool, self.layout, self.W, given, rule, dtype, **options)


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

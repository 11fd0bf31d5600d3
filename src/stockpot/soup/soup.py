"""A soup: pool + layout + W, and the little that W does not say; and the small file that rebuilds it."""

from __future__ import annotations

import glob
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from stockpot import files
from stockpot._version import __version__
from stockpot.errors import CheckpointError, DigestError, PoolError, SoupError
from stockpot.events import Listener, ignore, one_at_a_time
from stockpot.layout import ABSENT, Layout
from stockpot.names import differences, fill
from stockpot.pool import Pool
from stockpot.pool.checkpoint import open_safetensors
from stockpot.pool.source import dtype_name, listed
from stockpot.soup import card, contents, weights
from stockpot.soup.adapter import Factored, Form, resolve
from stockpot.soup.contents import MAX_SHARD, shard_size
from stockpot.soup.weights import StatisticsRule

Ingredients = Pool | str | Path | Iterable[str | Path] | None  # where they are now; None: where they were
RECORD = "soup.json"
STATISTICS = "statistics.safetensors"
FORMAT = 1
# What a record says of running statistics, and the rule that makes them again.
_RULES: Mapping[str, StatisticsRule] = {"recalibrated": "recalibrate", "averaged": "average", "donor": "copy"}


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
        path, shard, listen = Path(path), shard_size(max_shard), one_at_a_time(listen)
        soup = self if form is None else self.as_form(form)
        with soup._writing(path, dtype, overwrite, root) as folder:
            with ThreadPoolExecutor(1, "stockpot-digests") as beside:
                alone = self.pool.hashed
                hashing = beside.submit(self.pool.digests, listen)  # reads the same pages as mixing does
                soup._write_weights(folder, dtype, shard, listen, alone=alone)
                hashing.result()
            soup.write_record(folder, shard, dtype)
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
        path, shard = Path(path), shard_size(max_shard)
        soup = self if form is None else self.as_form(form)
        with soup._writing(path, dtype, overwrite, None) as folder:
            soup._write_weights(folder, dtype, shard, listen)
        return path

    def _write_weights(
        self, folder: Path, dtype: torch.dtype | None, shard: int, listen: Listener, alone: bool = True
    ) -> None:
        if self.written_as == "merged" or self.factored is None:
            coming = self._tensors(dtype, listen, alone=alone)
            contents.write_weights(folder, contents.stored_specs(self.pool, self.layout, dtype), coming, shard)
        else:
            whole = dict(self._tensors(dtype, listen, only=self.factored.dense, alone=alone))
            self.factored.write(folder, whole, dtype)

    @contextmanager
    def _writing(self, path: Path, dtype: torch.dtype | None, overwrite: bool, root: Path | None) -> Iterator[Path]:
        """A directory that becomes `path` if there is room for it and no ingredient changes meanwhile."""
        needed = sum(spec.nbytes for spec in contents.stored_specs(self.pool, self.layout, dtype).values())
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
                    contents.copy_companions(source, folder, without)
            stored = contents.stored_specs(self.pool, self.layout, dtype)
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
    def load(cls, path: str | Path, *, ingredients: Ingredients = None, listen: Listener = ignore) -> Soup:
        """Open a saved soup together with its ingredients, refusing ingredients that have changed.

        `ingredients` says where they are now, or is the opened pool; in any order, they are matched by digest.
        """
        path = Path(path)
        value = _record(path)
        try:
            said = value["statistics"]
            if said not in _RULES or value.get("free"):
                old = "weights that need not sum to one" if value.get("free") else f"the statistics {said!r:.80}"
                raise _damaged(str(path), "a soup as this version makes them", old)
            layout, W = Layout.from_json(value["layout"]), torch.tensor(value["W"], dtype=torch.float64)
            pool = ingredients if isinstance(ingredients, Pool) else _opened(value, ingredients)
            pool = _matched(pool, value["ingredients"], listen)
            _check_layout(layout, pool)
            statistics = _statistics(path if path.is_dir() else path.parent, pool) if said == "recalibrated" else None
            form, about = value.get("form", "merged"), dict(value["about"])  # a soup without one is a full model
            return cls(pool, layout, W, statistics, statistics_rule=_RULES[said], about=about, form=form)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, OSError) as error:
            raise _damaged(str(path), "a complete soup record", f"{type(error).__name__}: {error}") from error

    def write_record(
        self, folder: Path, max_shard: int, dtype: torch.dtype | None = None, root: Path | None = None
    ) -> None:
        """The file from which the soup can be made again, and its statistics where they were measured again."""
        pool, statistics = self.pool, "donor" if self.statistics_rule == "copy" else "averaged"
        if self.statistics is not None:
            statistics = "recalibrated"
            data = save({name: tensor.contiguous() for name, tensor in self.statistics.items()})
            files.write_bytes(folder / STATISTICS, data, root)
        value = {
            "format": FORMAT,
            "stockpot": __version__,
            "about": dict(self.about),
            "ingredients": [
                {"name": name, "path": str(checkpoint.path.resolve()), "digest": digest}
                for name, checkpoint, digest in zip(pool.names, pool.checkpoints, pool.digests(), strict=True)
            ],
            "opened_with": pool.opened_with,
            "dtype": None if dtype is None else dtype_name(dtype),
            "max_shard": max_shard,
            **({} if self.pool.adapters is None else {"form": self.written_as}),
            "statistics": statistics,
            "layout": self.layout.to_json(),
            "W": self.W.tolist(),
        }
        files.write_json(folder / RECORD, value, root)

    def _tensors(
        self, dtype: torch.dtype | None, listen: Listener, only: Collection[str] | None = None, alone: bool = True
    ) -> Iterable[tuple[str, Tensor]]:
        given, rule = self.statistics, self.statistics_rule
        options: dict[str, Any] = {"factored": self.factored, "only": only, "alone": alone, "listen": listen}
        return contents.tensors(self.pool, self.layout, self.W, given, rule, dtype, **options)


# ---- the record


def _record(path: Path) -> dict[str, Any]:
    """The record in a soup's directory, or given as the file itself. No link in the directory is followed."""
    file = path / RECORD if path.is_dir() else path
    try:
        value = files.read_json(file)
    except FileNotFoundError:
        fix = "pass the directory of a soup, as Soup.save writes it (RUN/methods/NAME/soup of a run)"
        raise SoupError.of(str(path), expected=f"a saved soup with a {RECORD}", found="none", fix=fix) from None
    except (ValueError, OSError) as error:
        raise _damaged(str(file), "a readable soup record", str(error)) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise SoupError.of(str(file), f"a soup record of format {FORMAT}", repr(found)[:80], "update stockpot")
    return value


def _damaged(subject: str, expected: str, found: str) -> SoupError:
    return SoupError.of(subject, expected, found, "restore the file from a copy, or cook again")


def _opened(value: Mapping[str, Any], ingredients: Any) -> Pool:
    options = dict(value["opened_with"])
    if options.keys() - {"base"} != {"key", "rename", "mixed_dtypes"}:
        raise ValueError("opened_with has other options than a pool is opened with")
    if options["rename"] == "custom":
        fix = "open the pool yourself and pass it as ingredients="
        raise SoupError.of("soup record", "renaming by a prefix map", "a Python function, which is not stored", fix)
    if ingredients is not None:
        return Pool.open(ingredients, **options)
    # A record names files; a stranger's pattern such as /**/* would search the whole disk, and hf:// would go online.
    paths = [str(Path(entry["path"])) for entry in value["ingredients"]]
    try:
        return Pool.open([path if os.path.lexists(path) else glob.escape(path) for path in paths], **options)
    except PoolError as error:
        where = "If the ingredients have moved, say where they are now: --pool, or ingredients= in Python."
        raise PoolError(f"{error}\n{where}") from error


def _check_layout(layout: Layout, pool: Pool) -> None:
    """A record can be edited or damaged: it must speak of exactly the tensors that the ingredients have."""
    places = {*layout.group_of, *layout.kept}
    groups = set(layout.group_of.values())
    tied = [name for names in layout.tied for name in names]
    wrong = None
    if places != set(pool.specs) or layout.group_of.keys() & layout.kept.keys() or not set(tied) <= places:
        wrong = "other tensors than the ingredients have"
    elif any(reason == ABSENT and name not in pool.spare for name, reason in layout.kept.items()):
        wrong = "tensors that are left out, although ingredients change them"
    elif not all(0 <= group < len(layout.groups) for group in groups):
        wrong = f"groups outside of its {len(layout.groups)}"
    elif not 0 <= layout.donor < len(pool):
        wrong = f"ingredient {layout.donor} as donor, of {len(pool)}"
    elif any(pool.specs[name] != pool.specs[names[0]] for names in layout.tied for name in names):
        wrong = "tied tensors of different shapes"
    if wrong is not None:
        raise _damaged("layout of the soup record", "a group or a reason for each tensor of the ingredients", wrong)


def _statistics(folder: Path, pool: Pool) -> dict[str, torch.Tensor]:
    """Recalibrated running statistics, which must be those that the ingredients have, in their shapes."""
    try:
        file = open_safetensors(files.check_inside(folder, folder / STATISTICS))
    except CheckpointError as error:
        raise SoupError(str(error)) from error
    shapes = {name: spec.shape for name, spec in file.specs.items()}
    odd = [name for name in shapes if name not in pool.statistics or shapes[name] != pool.specs[name].shape]
    if odd:
        expected = "running statistics in the shapes that the ingredients have"
        texts = listed([f"{name} {list(shapes[name])}" for name in odd])
        raise _damaged(str(folder / STATISTICS), expected, f"others: {texts}")
    return {name: file.read(name) for name in file.specs}


def _matched(pool: Pool, entries: list[Mapping[str, str]], listen: Listener) -> Pool:
    """The pool in the record's order; each ingredient must be, byte for byte, what the soup was made of."""
    found: dict[str, list[int]] = {}
    for k, digest in enumerate(pool.digests(listen)):
        found.setdefault(digest, []).append(k)
    if lacking := [entry for entry in entries if entry["digest"] not in found]:
        lines = "\n".join(f"    {one['name']} ({one['path']}): sha256 {one['digest'][:16]}..." for one in lacking)
        raise DigestError.of(
            f"{len(lacking)} of {len(entries)} ingredients",
            expected="the content the soup was made of",
            found=f"other content or no file:\n{lines}\n  so it cannot be made again",
            fix="restore the original checkpoints, or say where they are now: --pool, or ingredients= in Python",
        )
    # Of ingredients with the same content the last one serves as often as the record asks for it.
    places = (found[entry["digest"]] for entry in entries)
    return pool.subset([alike.pop(0) if len(alike) > 1 else alike[0] for alike in places])


def saved_as(path: Path) -> tuple[torch.dtype | None, int]:
    """The dtype that a soup was saved in (None: the ingredients' own), and the bytes of its shards at most."""
    value = _record(path)
    name, size = value.get("dtype"), value.get("max_shard")
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise _damaged("dtype of the soup record", "a floating-point type such as 'bfloat16'", repr(name)[:80])
    if type(size) is not int or size <= 0:
        raise _damaged("max_shard of the soup record", "a number of bytes", repr(size)[:80])
    return dtype, size


def rebuild(
    soup: str | Path,
    path: str | Path,
    *,
    ingredients: Ingredients = None,
    overwrite: bool = False,
    listen: Listener = ignore,
) -> Path:
    """Write the same soup again, byte for byte, from its record (`soup.json`) and the ingredients."""
    loaded = Soup.load(soup, ingredients=ingredients, listen=listen)
    dtype, max_shard = saved_as(Path(soup))
    return loaded.save(path, dtype=dtype, max_shard=max_shard, overwrite=overwrite, listen=listen)

"""Averages that need neither model nor data: each is a matrix W of mixing weights, so each is a soup.

Methods that are not of this form (spherical interpolation, TIES, DARE) are not here: docs/decisions.md. Of mergekit's,
`linear` of whole models is: a soup as its configuration, and such a configuration as a soup. Its rule for the weight
of a tensor is the first entry whose `filter` is a part of the tensor's name (or that has none, or `*`). So every tensor
has an entry of its own, and longer names come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import SoupError
from stockpot.events import Event, Listener, ignore
from stockpot.layout import EXCLUDED, FROZEN, STATISTIC, Layout
from stockpot.pool import Pool
from stockpot.pool.discover import find_checkpoints, hub_id
from stockpot.pool.facts import strangers_of
from stockpot.pool.peft_folders import adapter_folder
from stockpot.pool.source import dtype_name
from stockpot.progress import shown
from stockpot.soup.adapter import Form
from stockpot.soup.contents import MAX_SHARD
from stockpot.soup.soup import Soup
from stockpot.soup.weights import CHUNK, SUM_TOLERANCE, heaviest, statistics_weights

AVERAGES = ("uniform", "weighted", "ema", "model_stock")
_NO_MEAN = "use mergekit itself: what it does is no weighted mean of the models"
_ELSEWHERE = {  # mergekit's names, and what to do about them
    "linear": "leave the method out; with weights, they are divided by their sum",
    "task_arithmetic": "give weights and a base, and no method",
    "slerp": "use weighted: fine-tunes of one model are so close that mergekit's slerp of them is the same average",
    **dict.fromkeys(("ties", "dare_ties", "dare_linear", "della", "breadcrumbs", "sce"), _NO_MEAN),
}
_KNOWN = {"merge_method", "models", "parameters", "dtype", "out_dtype", "base_model"}
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def average(
    models: str | Path | Iterable[Any] | Pool,
    out: str | Path | None = None,
    *,
    weights: Sequence[float] | None = None,
    method: str | None = None,
    decay: float | None = None,
    base: str | Path | Mapping[str, Tensor] | None = None,
    form: Form = "auto",
    dtype: torch.dtype | None = None,
    max_shard: int | str = MAX_SHARD,
    overwrite: bool = False,
    progress: bool | None = None,
    listen: Listener = ignore,
    **opening: Any,
) -> Soup:
    """A soup of models without any data, written to `out` if that is given.

    `models`: paths, patterns, folders, state dicts, or a pool; `opening` are options of `Pool.open`. Methods are
    `uniform`; `weighted` by `weights`, which are divided by their sum; `ema`, the moving average over models in their
    order, of which each step keeps `decay`; `model_stock`. With a `base`, weights are taken as they are and the base
    has what they leave to one, so that base + sum of w_k (model_k - base) comes out: task arithmetic. Of LoRA adapters
    `base` is the model they were trained on, and `form` what is written, as for `Soup.save`. More than two seconds of
    work show a bar in a terminal or a notebook; `progress=True` shows it anywhere, `progress=False` nowhere.
    """
    sources = [models] if isinstance(models, (str, Path, Mapping, Pool)) else list(models)
    if not isinstance(models, Pool) and any(map(adapter_folder, find_checkpoints(sources)[0])):
        opening, base = {**opening, "base": base}, None
    weights = None if weights is None else _numbers("weights", weights)
    decay = None if decay is None else _numbers("decay", [decay])[0]
    method = method or ("uniform" if weights is None else "weighted")
    _check(method, weights, decay, base)
    with shown(progress, listen) as tell:
        if not isinstance(models, Pool):
            # The base comes last.
            models = Pool.open(sources, *([] if base is None else [base]), listen=tell, **opening)
        elif base is not None:
            fix = "give the paths of the models, or open the base with them and give all weights"
            raise SoupError.of("average with a base", expected="paths of models", found="an opened pool", fix=fix)
        if strange := strangers_of(models.checkpoints, models.specs):
            tell(Event("strangers", {"names": [models.names[k] for k in strange]}))
        soup = _soup(models, method, weights, decay, base is not None)
        if out is not None:
            soup.save(out, form=form, dtype=dtype, max_shard=max_shard, overwrite=overwrite, listen=tell)
    return soup


def _soup(pool: Pool, method: str, weights: Sequence[float] | None, decay: float | None, with_base: bool) -> Soup:
    layout = Layout.of(pool, "tensor" if method == "model_stock" else "model")
    W = _weights(pool, layout, method, weights, decay, with_base)
    base = pool.names[-1] if with_base else None
    about = {"method": method, "weights": weights, "decay": decay, "base": base}
    return Soup(pool, layout, W, about={key: value for key, value in about.items() if value is not None})


def _numbers(what: str, given: Iterable[Any]) -> list[float]:
    """Plain numbers, which a record can hold, of whatever library's."""
    values = [given] if isinstance(given, str) else list(given)
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        expected, fix = "plain numbers", "give them as in [0.2, 0.8]; a decay is one number"
        raise SoupError.of(what, expected=expected, found=repr(values)[:80], fix=fix) from None


def _check(method: str, weights: Sequence[float] | None, decay: float | None, base: object) -> None:
    subject = f"method {method!r} of average"
    if method not in AVERAGES:
        expected, fix = f"one of {', '.join(AVERAGES)}", _ELSEWHERE.get(method, "mix by one of these")
        raise SoupError.of("method of average", expected=expected, found=repr(method)[:80], fix=fix)
    if (method == "weighted") != (weights is not None):
        found = "none" if weights is None else "some"
        expected = "weights, one for each model" if weights is None else "no weights"
        raise SoupError.of(subject, expected=expected, found=found, fix="give weights to method weighted, and no other")
    if (method == "ema") != (decay is not None):
        expected, found = ("a decay", "none") if decay is None else ("no decay", str(decay))
        fix = "give a decay to method ema, and to no other; with 0.5 each model counts half as much as the one after it"
        raise SoupError.of(subject, expected=expected, found=found, fix=fix)
    if decay is not None and not 0 < decay < 1:
        raise SoupError.of("decay", expected="a number between 0 and 1", found=str(decay), fix="use for example 0.5")
    if method == "model_stock" and base is None:
        raise SoupError.of(subject, "a base", "none", "say which model the others were fine-tuned from: base=")
    if base is not None and method not in ("weighted", "model_stock"):
        fix = "give weights (task arithmetic) or method model_stock, or leave the base out"
        raise SoupError.of(subject, expected="no base", found="one", fix=fix)


def _weights(
    pool: Pool, layout: Layout, method: str, weights: Sequence[float] | None, decay: float | None, with_base: bool
) -> Tensor:
    """W (K, G), the base in the last row."""
    n = len(pool) - with_base
    if method == "model_stock":
        return model_stock(pool, layout)
    if decay is not None:
        column = [decay ** (n - 1), *((1 - decay) * decay ** (n - 1 - k) for k in range(1, n))]
    elif weights is None:
        column = [1.0] * n
    else:
        column = [*weights]
    total = sum(column)  # not fsum, which raises where this overflows
    if len(column) != n or not math.isfinite(total):
        found = f"{len(column)}: {', '.join(f'{weight:g}' for weight in column)}"
        fix = f"give one for each, in this order: {', '.join(pool.names[:n])}"
        raise SoupError.of("weights", expected=f"{n} numbers with a finite sum", found=found, fix=fix)
    if with_base:
        column.append(1.0 - total)
    elif abs(total) < 1e-6:
        fix = "give weights with a positive sum, or base= to add differences to it"
        raise SoupError.of("weights", expected="numbers that do not cancel", found=f"a sum of {total:g}", fix=fix)
    else:
        column = [weight / total for weight in column]
    return torch.tensor(column, dtype=torch.float64)[:, None]  # (K, 1)


def model_stock(pool: Pool, layout: Layout) -> Tensor:
    """W (K, G) of Model Stock (Jang et al., ECCV 2024): theta = t mean + (1 - t) base, the base last.

    For each tensor t = n c / (1 + (n - 1) c), c the mean cosine between the n models as seen from the base.
    """
    n = len(pool) - 1
    if n < 2:
        fix = "give two or more models besides the base"
        raise SoupError.of("method 'model_stock'", expected="at least two models", found=str(n), fix=fix)
    W = torch.zeros(n + 1, len(layout), dtype=torch.float64)
    pairs = torch.triu_indices(n, n, 1)
    for name, group in layout.group_of.items():
        parts = [torch.split(pool.tensor(k, name).reshape(-1), CHUNK) for k in range(n + 1)]
        gram = torch.zeros(n, n, dtype=torch.float64)
        for *chunks, start in zip(*parts, strict=True):
            offsets = torch.stack([chunk.double() - start.double() for chunk in chunks])  # (n, width)
            gram += offsets @ offsets.T
        if not bool(gram.isfinite().all()):
            pool.verify_finite()  # names the models to blame
        lengths = gram.diagonal().sqrt().clamp_min(torch.finfo(gram.dtype).tiny)  # of a tensor that did not move: 0
        cosines = gram / lengths[:, None] / lengths
        c = float(cosines[pairs[0], pairs[1]].clamp(-1, 1).mean())
        t = n * c / (1 + (n - 1) * c) if 1 + (n - 1) * c else 0.0
        W[:n, group], W[n, group] = t / n, 1 - t
    return W


# ---- mergekit


def to_mergekit(soup: Soup, dtype: torch.dtype | None = None) -> str:
    """YAML with which `mergekit-yaml` gives the same weights; mixed in fp32, and rounded as the soup is (`dtype`)."""
    pool = soup.pool
    files = [checkpoint.path for checkpoint in pool.checkpoints if not checkpoint.path.is_dir()]
    wrong = {
        "recalibrated running statistics, which a configuration cannot hold": soup.statistics is not None,
        "adapters": pool.adapters is not None,
        f"single files, such as {files[0].name}" if files else "": bool(files),
    }
    if found := [what for what, there in wrong.items() if there]:
        expected, fix = "a soup of Hugging Face folders", "give the folder of the soup itself to whoever needs it"
        raise SoupError.of("mergekit configuration", expected=expected, found=found[0], fix=fix)
    own = {spec.dtype for spec in pool.specs.values() if spec.dtype.is_floating_point}
    mixed = "float64" if torch.float64 in own else "float32"
    stored = dtype_name(dtype) if dtype is not None else dtype_name(own.pop()) if len(own) == 1 else mixed
    rows = {name: _row(soup, name) for name in sorted(pool.specs, key=lambda name: (-len(name), name))}
    several = len(set(rows.values())) > 1
    lines = ["merge_method: linear", f"dtype: {mixed}", f"out_dtype: {stored}", "parameters:", "  normalize: false"]
    lines.append("models:")
    for k, checkpoint in enumerate(pool.checkpoints):
        name = hub_id(checkpoint.path)
        place = f"{name}@{checkpoint.path.name}" if name else str(checkpoint.path.resolve())
        lines.append(f"- model: {json.dumps(place)}")
        lines.append("  parameters:")
        if several:
            lines.append("    weight:")
            lines += [f"    - {{filter: {json.dumps(name)}, value: {row[k]!r}}}" for name, row in rows.items()]
            lines.append(f"    - {{value: {1.0 if k == soup.layout.donor else 0.0}}}")
        else:
            lines.append(f"    weight: {next(iter(rows.values()))[k]!r}")
    return "\n".join(lines) + "\n"


def _row(soup: Soup, name: str) -> tuple[float, ...]:
    """How much of each ingredient is in this tensor."""
    layout, W = soup.layout, soup.W
    if name in layout.group_of:
        return tuple(W[:, layout.group_of[name]].tolist())
    reason = layout.kept[name]
    if reason == STATISTIC and soup.statistics_rule != "copy":
        return tuple(statistics_weights(W))
    chosen = layout.donor if reason in (FROZEN, EXCLUDED, STATISTIC) else heaviest(W)
    return tuple(float(k == chosen) for k in range(len(W)))


def from_mergekit(config: Any, listen: Listener = ignore, **opening: Any) -> tuple[Soup, torch.dtype | None]:
    """The soup that a configuration describes, and the type it is to be stored in; `opening` is for `Pool.open`."""
    if not isinstance(config, Mapping) or config.get("merge_method") != "linear":
        found = config.get("merge_method") if isinstance(config, Mapping) else type(config).__name__
        raise _refused("merge_method: linear", repr(found)[:80], "run it with mergekit itself")
    if unknown := sorted(map(str, config.keys() - _KNOWN)):
        fix = "leave it out if you can do without, or run it with mergekit itself"
        raise _refused(f"no other keys than {', '.join(sorted(_KNOWN))}", unknown[0][:80], fix)
    models, common = config.get("models"), _parameters(config)
    if not isinstance(models, list) or not all(map(_is_whole_model, models)):
        fix = "write `- model: FOLDER` for each, with `parameters: {weight: ...}` and nothing else"
        raise _refused("a list of whole models", "another form of `models`", fix)
    paths = [one["model"] for one in models]
    base = config.get("base_model", paths[0] if paths else None)
    if base not in paths:
        fix = "leave `base_model` out, or write it under `models` with a weight, as mergekit does by itself"
        raise _refused("a base_model that is one of `models`", repr(base)[:80], fix)
    normalize = common.get("normalize", True)
    if not isinstance(normalize, bool):
        raise _refused("`normalize` to be true or false", repr(normalize)[:80], "write one for all tensors")
    settings = [(_parameters(one).get("weight"), common.get("weight")) for one in models]
    pool = Pool.open(paths, listen=listen, **opening)
    if len(pool) != len(paths):
        fix = "write the checkpoints themselves, one for each weight"
        raise _refused(f"{len(paths)} models", f"{len(pool)}: patterns or folders of several", fix)
    columns: dict[tuple[float, ...], str] = {}
    group_of: dict[str, str] = {}
    for name in pool.specs:
        row = [_weight(name, *either) for either in settings]
        total = sum(row)
        if not math.isfinite(total):
            raise _refused(f"weights with a finite sum for {name}", f"{total:g}", "write smaller ones")
        if normalize and abs(total) > SUM_TOLERANCE:
            row = [weight / total for weight in row]
        elif abs(total - 1) > SUM_TOLERANCE:
            fix = "make them sum to one, or let `normalize` do it"
            raise _refused("weights that sum to one", f"a sum of {total:g} for {name}", fix)
        group_of[name] = columns.setdefault(tuple(row), f"weights {len(columns) + 1}")
    layout = Layout.of(pool, group_of.__getitem__, donor=paths.index(base))
    by_group = {group: row for row, group in columns.items()}
    W = torch.tensor([by_group[group] for group in layout.groups], dtype=torch.float64).T  # (K, G)
    stored = config.get("out_dtype") or config.get("dtype")
    if stored is not None and stored not in _DTYPES:
        raise _refused(f"a dtype among {', '.join(_DTYPES)}", repr(stored)[:80], "use one of these")
    soup = Soup(pool, layout, W / W.sum(dim=0), about={"method": "mergekit linear"})
    return soup, None if stored is None else getattr(torch, stored)


def _parameters(section: Mapping[str, Any]) -> Mapping[str, Any]:
    found = section.get("parameters") or {}
    if not isinstance(found, Mapping):
        raise _refused("parameters with names", repr(found)[:80], "write `parameters: {weight: 0.5}`")
    return found


def _is_whole_model(one: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(one.get("model"), str) and one.keys() <= {"model", "parameters"}


def _weight(name: str, own: Any, common: Any) -> float:
    """mergekit's rule for one tensor: what the model says of it, else what all do."""
    for value in chain(_matching(name, own), _matching(name, common)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            what = "a gradient over layers" if isinstance(value, list) else repr(value)[:80]
            raise _refused(f"a number as the weight of {name}", what, "write a number, or filters with numbers")
        return float(value)
    raise _refused(f"a weight for {name}", "none", "add an entry without a filter, such as `- value: 0`")


def _matching(name: str, setting: Any) -> Iterator[Any]:
    conditions: Sequence[Any] = setting if isinstance(setting, list) else [setting]
    if not all(isinstance(one, Mapping) for one in conditions):
        yield from () if setting is None else [setting]
        return
    for one in conditions:
        part = one.get("filter")
        if part is None or part == "*" or str(part) in name:
            yield one.get("value")


def _refused(expected: str, found: str, fix: str) -> SoupError:
    return SoupError.of("mergekit configuration", expected=expected, found=found, fix=fix)

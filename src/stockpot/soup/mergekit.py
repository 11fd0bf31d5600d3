"""A soup as a mergekit configuration, and a mergekit configuration as a soup: method `linear`, whole models.

mergekit's rule for the weight of a tensor: the first entry whose `filter` is a part of the tensor's name (or that has
none, or `*`). So every tensor has an entry of its own, and longer names come first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from stockpot.errors import SoupError
from stockpot.events import Listener, ignore
from stockpot.layout import EXCLUDED, FROZEN, STATISTIC, Layout
from stockpot.pool import Pool
from stockpot.pool.discover import hub_id
from stockpot.pool.source import dtype_name
from stockpot.soup.soup import Soup
from stockpot.soup.weights import SUM_TOLERANCE, heaviest, statistics_weights

_KNOWN = {"merge_method", "models", "parameters", "dtype", "out_dtype", "base_model"}
_DTYPES = ("float32", "float64", "bfloat16", "float16")


def configuration(soup: Soup, dtype: torch.dtype | None = None) -> str:
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
        lines.append(
            f"- model: {json.dumps(f'{name}@{checkpoint.path.name}' if name else str(checkpoint.path.resolve()))}"
        )
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


def soup_of(config: Any, listen: Listener = ignore, **opening: Any) -> tuple[Soup, torch.dtype | None]:
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

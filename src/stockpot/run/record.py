"""The files of a run: the one module that writes and reads them. docs/architecture.md says what stands where.

A method's files are written when its decisions are made, and again when the report data has been scored; result.json
is written last, so that it exists only when everything beside it is whole. Scores are written with their value and
interval: a reader needs neither the samples nor the function of the metric.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stockpot import files
from stockpot.errors import RunError, SoupError
from stockpot.run import shapes
from stockpot.run.shapes import cleaned, plain, read_json, readable
from stockpot.soups.registry import METHODS as REGISTRY

if TYPE_CHECKING:
    from stockpot.pool import Pool, PoolFacts
    from stockpot.soups.result import Result
    from stockpot.soups.settings import Settings
    from stockpot.task import Metric, Scores, Task

FORMAT = 3
RUN, RECIPE, POOL, RESULTS, EVENTS = "run.json", "recipe.yaml", "pool.json", "results.json", "events.jsonl"
METHODS, SOUP = "methods", "soup"
RESULT, WEIGHTS, SCORES = "result.json", "weights.safetensors", "ingredients.safetensors"
KINDS = ("report", "held_out", "fit")  # of data, most honest first
OWN = KINDS[1:]  # what a method scores itself on
PARTS = ("table", "units")  # of scores, sample by sample
VALUES = "values.json"  # the tensor that holds JSON: a safetensors header is for names and is kept small
COSTS = ("seconds", "peak_host", "peak_device", "models_used")
BLOCKS = 10**5  # each is a place on a chart's axis, so that a damaged number must not decide how many there are
POINTS = 200  # of one curve, per fold and block


def slug(method: str) -> str:
    return method.replace("+", "-plus")


# ---- one method


def write_method(root: Path, folder: Path, result: Result, max_shard: int) -> None:
    """The decisions of a method, before the report data is touched."""
    from stockpot.soups.settings import as_json

    files.make_directory(folder, root)
    own = {kind: getattr(result, kind) for kind in OWN}
    arrays = _tables({**result.reports, **own})
    if result.soup is not None:
        arrays["W"] = result.soup.W.numpy()
        result.soup.write_record(folder, max_shard, root=root)
    guard = next((entry for entry in result.history if entry["kind"] == "guard"), None)
    value = {
        "method": result.method,
        "settings": as_json(result.settings),
        **{name: getattr(result, name) for name in (*COSTS, "notes")},
        **{kind: encode(scores) for kind, scores in own.items()},
        "reports": {name: encode(scores) for name, scores in result.reports.items()},
        "groups": [] if result.soup is None else list(result.soup.layout.groups),
        "curves": curves(result.history),
        "greedy": [entry for entry in result.history if entry["kind"] == "greedy"] or None,
        "guard": guard and {key: guard[key] for key in shapes.GUARD_SHAPE},
    }
    _write(root, folder, value, arrays)


def write_report_scores(root: Path, folder: Path, reports: Mapping[str, Scores]) -> None:
    """Add the scores on all sets of report data to a method's files."""
    value = read_json(folder / RESULT, root, shapes.RESULT_SHAPE)
    arrays = _read_arrays(folder / WEIGHTS, root, {"W": 2, **_parts(OWN)})
    encoded = {name: encode(scores) for name, scores in reports.items()}
    _write(root, folder, {**value, "reports": encoded}, {**arrays, **_tables(reports)})


def _tables(scored: Mapping[str, Scores | None]) -> dict[str, Any]:
    """Scores sample by sample, and the unit of each sample where samples have groups."""
    known = {name: scores for name, scores in scored.items() if scores is not None}
    tables = {f"{name}_table": scores.table.numpy() for name, scores in known.items()}
    units = {name: scores.units for name, scores in known.items()}
    return tables | {f"{name}_units": one[:, None].numpy() for name, one in units.items() if one is not None}


def _parts(names: Iterable[str]) -> dict[str, int]:
    return {f"{name}_{part}": 2 for name in names for part in PARTS}


def _write(root: Path, folder: Path, value: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    from safetensors.numpy import save

    data = save({name: np.ascontiguousarray(array, dtype=np.float64) for name, array in arrays.items()})
    files.write_bytes(folder / WEIGHTS, data, root)
    files.write_json(folder / RESULT, plain(value), root)


@dataclass(frozen=True, eq=False)
class MethodRecord:
    """What the files of one method say."""

    name: str
    folder: Path
    result: Mapping[str, Any]  # result.json
    W: NDArray[np.float64] | None  # (K, G); None for the ensemble
    scores: Mapping[str, Mapping[str, Any]]  # by set of data: those of report data, held_out, fit
    tables: Mapping[str, NDArray[np.float64]]  # the same sample by sample, where they were asked for
    units: Mapping[str, NDArray[np.float64]]  # (N, 1) the unit of each sample, where samples have groups


def read_method(root: Path, folder: Path, name: str, *, tables: bool = False) -> MethodRecord | None:
    result = read_json(folder / RESULT, root, shapes.RESULT_SHAPE)
    if result is None:
        return None
    with readable(folder / RESULT):
        if result["method"] != name:
            raise ValueError(f"it is of method {result['method'][:60]!r}")
        if any(len(curve["x"]) != len(curve["loss"]) for every in result["curves"].values() for curve in every):
            raise ValueError("a curve has more places than losses, or fewer")
        if any(curve["block"] > BLOCKS for every in result["curves"].values() for curve in every):
            raise ValueError(f"a curve of a block beyond {BLOCKS:,}")
    # A table without a score is that of a process that was killed between the two files; it is made again.
    scores = {**result["reports"], **{kind: result[kind] for kind in OWN if result[kind] is not None}}
    known = list(scores) if tables else []
    found = _read_arrays(folder / WEIGHTS, root, {"W": 2, **_parts(known)})
    W = found.pop("W", None)
    with readable(folder / WEIGHTS):
        if (W is not None) != REGISTRY[name].soup or (W is not None and W.shape[1] != len(result["groups"])):
            raise ValueError(f"no W with a column for each of the {len(result['groups'])} groups")
        if W is not None and not np.isfinite(W).all():
            raise ValueError("mixing weights that are not finite")
        if any(len(array) != scores[key.rpartition("_")[0]]["n"] for key, array in found.items()):
            raise ValueError(f"more samples than in {RESULT}, or fewer")
    tables_, units = ({one: found[key] for one in known if (key := f"{one}_{part}") in found} for part in PARTS)
    return MethodRecord(name, folder, result, W, scores, tables_, units)


def read_result(root: Path, folder: Path, name: str, pool: Pool, settings: Settings, task: Task) -> Result | None:
    """What an earlier process found, as cooking gave it back; every step of its history stays in events.jsonl."""
    from stockpot.soup import Soup
    from stockpot.soups.result import Result
    from stockpot.soups.settings import as_json

    record = read_method(root, folder, name, tables=True)
    if record is None:
        return None
    value, soup = record.result, None
    if record.W is not None:
        try:
            soup = Soup.load(files.check_inside(root, folder), ingredients=pool)
        except SoupError as error:  # of the record, not of a method that is cooked now
            raise RunError(str(error)) from error
        with readable(folder / WEIGHTS):
            if not np.array_equal(soup.W.numpy(), record.W):
                raise ValueError("other mixing weights than in soup.json")
            if (soup.about.get("method"), soup.about.get("settings")) != (name, as_json(settings)):
                raise ValueError("another method or other settings in soup.json")
    known = {
        kind: _scores(
            table, task.report_metrics.get(kind, task.metric), record.scores[kind]["loss"], record.units.get(kind)
        )
        for kind, table in record.tables.items()
    }
    reports = {one: known[one] for one in value["reports"] if one in known}
    fit, held_out = known.get("fit"), known.get("held_out")
    guard = [] if value["guard"] is None else [{"kind": "guard", **value["guard"]}]
    history, costs = (*(value["greedy"] or ()), *guard), {key: value[key] for key in COSTS}
    return Result(name, settings, soup, fit, held_out, reports, history, notes=tuple(value["notes"]), **costs)


def _scores(
    table: NDArray[np.float64], metric: Metric, loss: float | None, units: NDArray[np.float64] | None
) -> Scores:
    import torch

    from stockpot.task import Scores

    own = None if units is None else torch.from_numpy(units)[:, 0].long()
    return Scores(torch.from_numpy(table), metric, math.nan if loss is None else loss, units=own)


def encode(scores: Scores | None) -> dict[str, Any] | None:
    if scores is None:
        return None
    low, high = scores.interval()
    found = {"value": scores.value, "low": low, "high": high, "n": scores.n, "loss": scores.loss}
    return {key: plain(value) for key, value in found.items()}


def curves(history: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """`fit` (means over stretches of steps) and `held_out` (as judged), one curve per fold and block.

    Every loss is in events.jsonl; a chart needs a few hundred points.
    """
    found: dict[str, dict[tuple[int, int], list[tuple[int, float | None]]]] = {"fit": {}, "held_out": {}}
    sorts = {"step": ("fit", 1), "held_out": ("held_out", 0)}  # a loss of fitting counts after its step
    for entry in history:
        if entry["kind"] in sorts:
            which, after = sorts[entry["kind"]]
            points = found[which].setdefault((entry["fold"], entry["block"]), [])
            points.append((entry["step"] + after, entry["loss"]))
    return {
        which: [
            {"fold": fold, "block": block, "x": [x for x, _ in points], "loss": [y for _, y in points]}
            for (fold, block), every in lines.items()
            for points in [_thinned(every) if which == "fit" else every]
        ]
        for which, lines in found.items()
    }


def _thinned(points: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    width = -(-len(points) // POINTS)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    losses = [[loss for _, loss in part if loss is not None] for part in parts]
    return [(part[-1][0], sum(x) / len(x) if x else None) for part, x in zip(parts, losses, strict=True)]


# ---- the pool


def describe_pool(pool: Pool, facts: PoolFacts) -> dict[str, Any]:
    """pool.json, before anything is scored."""
    measured = facts.distances
    dtypes = Counter(str(spec.dtype).removeprefix("torch.") for spec in pool.specs.values())
    ingredients = []
    for name, one, digest in zip(pool.names, pool.checkpoints, facts.digests, strict=True):
        file = {"name": name, "path": str(one.path), "format": one.format, "bytes": one.nbytes, "digest": digest}
        ingredients.append({**file, "fit": None, "trial": trial_settings(one.path)})
    return {
        "ingredients": ingredients,
        "parameters": count_parameters(pool, facts),
        "tensors": len(pool.specs),
        "dtypes": dict(dtypes.most_common()),
        "frozen": sorted(facts.frozen),
        "tied": [list(names) for names in facts.tied],
        "duplicates": [list(group) for group in facts.duplicates],
        "distances": plain(measured.pairs.tolist()),
        "to_mean": plain(measured.to_mean.tolist()),
        "norms": plain(measured.norms.tolist()),
        "outlier": measured.outlier(),
        "base": pool.adapters and {"path": str(pool.adapters.base.path), "digest": pool.base_digest},
    }


def count_parameters(pool: Pool, facts: PoolFacts) -> int:
    """What is learned: no running statistics, no counters, and tied tensors once."""
    again = {name for names in facts.tied for name in names[1:]}
    return sum(
        spec.numel
        for name, spec in pool.specs.items()
        if name not in again and name not in pool.statistics and (spec.dtype.is_floating_point or spec.dtype.is_complex)
    )


def trial_settings(path: Path) -> dict[str, Any] | None:
    """What `stockpot finetune` wrote beside a checkpoint about its training."""
    beside = path.with_name(f"{path.name}.json") if path.is_dir() else path.with_suffix(".json")
    try:
        value = files.read_json(beside, 2**20, follow=True)
    except (OSError, ValueError):
        return None
    settings = value.get("settings") if isinstance(value, dict) else None
    return plain(settings) if isinstance(settings, dict) else None


def write_ingredient_scores(root: Path, known: Sequence[Scores], seconds: float) -> None:
    """Once somebody has scored the ingredients: into pool.json for readers, and sample by sample for ourselves."""
    from safetensors.numpy import save

    if os.path.lexists(root / SCORES):
        return
    pool = read_json(root / POOL, root, shapes.POOL_SHAPE)
    for entry, scores in zip(pool["ingredients"], known, strict=True):
        entry["fit"] = encode(scores)
    files.write_json(root / POOL, pool, root)
    values = as_array({"seconds": seconds, "losses": [plain(scores.loss) for scores in known]})
    tables = np.stack([scores.table.numpy() for scores in known])  # (K, N, m)
    units = {} if known[0].units is None else {"units": known[0].units[:, None].double().numpy()}
    # Last: once it is there, nobody looks at the other file again.
    files.write_bytes(root / SCORES, save({"tables": tables, VALUES: values, **units}), root)


def read_ingredient_scores(root: Path, metric: Metric, models: int) -> tuple[list[Scores], float] | None:
    """The scores of the ingredients on the fitting data, and the seconds that they took."""
    if not os.path.lexists(root / SCORES):
        return None
    found = _read_arrays(root / SCORES, root, {"tables": 3, "units": 2, VALUES: 1})
    with readable(root / SCORES):
        values = as_values(found[VALUES])
        shapes.check(values, {"seconds": shapes.NUMBER, "losses": [shapes.MAYBE]})
        if not len(found["tables"]) == len(values["losses"]) == models:
            raise ValueError(f"scores of {len(found['tables'])} ingredients, of {models}")
        units = found.get("units")
        pairs = zip(found["tables"], values["losses"], strict=True)
        known = [_scores(table, metric, loss, units) for table, loss in pairs]
        return known, values["seconds"]


def as_array(values: Any) -> NDArray[np.uint8]:
    """JSON as bytes of an array."""
    return np.frombuffer(json.dumps(values, allow_nan=False).encode(), dtype=np.uint8)


def as_values(array: Any) -> Any:
    return files.parse_json(bytes(array))


# ---- the whole run


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run directory says. Parts that are not there (it was stopped, or cooked one soup only) are empty."""

    path: Path
    about: Mapping[str, Any]  # run.json
    pool: Mapping[str, Any]  # pool.json
    results: Mapping[str, Any]  # results.json
    recipe: str
    methods: tuple[MethodRecord, ...]  # in the order of the table


def read_run(path: Path, *, tables: bool = False) -> RunRecord:
    """A run, to be looked at; `tables`: sample by sample too. A file that cannot be understood is an error."""
    about = read_about(path)
    pool = read_json(path / POOL, path, shapes.POOL_SHAPE) or {}
    results = read_json(path / RESULTS, path, shapes.RESULTS_SHAPE) or {}
    recipe = b""
    with readable(path / RECIPE), suppress(FileNotFoundError):
        recipe = files.read_bytes(path / RECIPE, root=path)
    order = [name for name in results.get("methods", ()) if name in REGISTRY]
    names = dict.fromkeys([*order, *REGISTRY])
    found = [read_method(path, path / METHODS / slug(name), name, tables=tables) for name in names]
    methods = tuple(
        replace(one, result=cleaned(one.result), scores=cleaned(one.scores)) for one in found if one is not None
    )
    _check_sizes(path, pool, methods)
    text = recipe.decode("utf-8", "replace")
    return RunRecord(path, cleaned(about), cleaned(pool), cleaned(results), cleaned(text), methods)


def read_about(path: Path) -> dict[str, Any]:
    """run.json of a run of this format."""
    found = format_of(path)
    if found is None:
        what = "a directory without one" if path.is_dir() else "no such directory"
        fix = "give the directory that `stockpot cook`, `compare` or `demo` wrote"
        raise RunError.of(f"run directory {path}", expected=f"a run with its {RUN}", found=what, fix=fix)
    if found != FORMAT:
        fix = "use the version of stockpot that wrote this run"
        raise RunError.of(str(path / RUN), expected=f"a run of format {FORMAT}", found=f"format {found}", fix=fix)
    about: dict[str, Any] = read_json(path / RUN, path, shapes.RUN_SHAPE)
    return about


def format_of(path: Path) -> int | None:
    """The format of the run that lies here; None where there is none, and an error where run.json is no run's."""
    about = read_json(path / RUN, path, {"*": shapes.ANY}) if path.is_dir() else None
    if about is None:
        return None
    with readable(path / RUN):
        found = about.get("format")
        if type(found) is not int or not isinstance(about.get("stockpot"), str):
            raise ValueError("a file that no run of stockpot wrote")
        return found


def _check_sizes(path: Path, pool: Mapping[str, Any], methods: Sequence[MethodRecord]) -> None:
    K = len(pool["ingredients"]) if pool else None
    if pool:
        with readable(path / POOL):
            rows = [pool["distances"], *pool["distances"], pool["to_mean"], pool["norms"]]
            doubles = [k for group in pool["duplicates"] for k in group]
            if any(len(row) != K for row in rows) or any(k >= K for k in (*doubles, pool["outlier"] or 0)):
                raise ValueError(f"distances of more or fewer than its {K} ingredients")
    for method in methods:
        with readable(method.folder / WEIGHTS):
            if method.W is not None and K is not None and len(method.W) != K:
                raise ValueError(f"W of shape {method.W.shape}, and {K} ingredients in {POOL}")


def _read_arrays(path: Path, root: Path, wanted: Mapping[str, int]) -> dict[str, Any]:
    """The arrays of these names, with as many dimensions, as far as they are there."""
    from safetensors import safe_open

    with readable(path):
        if not os.path.lexists(path):
            raise ValueError("nothing at this path")
        found = {}
        with safe_open(files.check_inside(root, path), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118  (no mapping)
                if name in wanted:
                    part = opened.get_slice(name)
                    dtype = "U8" if name == VALUES else "F64"
                    if part.get_dtype() != dtype or len(part.get_shape()) != wanted[name]:
                        raise ValueError(f"{name} is {part.get_dtype()} of shape {part.get_shape()}")
                    found[name] = opened.get_tensor(name)
        return found

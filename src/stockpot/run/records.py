"""One method's files: written when its decisions are made, and again when the report data has been scored.

result.json is written last, so that it exists only when everything beside it is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from stockpot import atomic
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.run import scores as score_json
from stockpot.run.curves import curves
from stockpot.run.reading import read_json, readable
from stockpot.soup import Soup
from stockpot.soup import record as soup_record
from stockpot.soups.result import Result
from stockpot.soups.settings_before import Settings
from stockpot.task import Scores

RESULT, WEIGHTS = "result.json", "weights.safetensors"


@dataclass(frozen=True, eq=False)
class MethodRecord:
    """What the files of one method say."""

    folder: Path
    value: Mapping[str, Any]  # result.json
    tensors: Mapping[str, Tensor]  # weights.safetensors

    @property
    def name(self) -> str:
        return str(self.value["method"])

    def scores(self, which: str) -> Scores | None:
        """`fit` or `report`, sample by sample."""
        value = self.value[which]
        return None if value is None else score_json.decode(value, self.tensors[f"{which}_values"])

    @property
    def reported(self) -> bool:
        return self.value["report"] is not None


def read(folder: Path) -> MethodRecord | None:
    value = read_json(folder / RESULT)
    if value is None:
        return None
    with readable(folder / WEIGHTS):
        return MethodRecord(folder, value, load_file(folder / WEIGHTS))


def write(folder: Path, result: Result, max_shard: int) -> MethodRecord:
    """The decisions of a method, before the report data is touched."""
    assert result.fit is not None
    atomic.make_directory(folder)
    tensors = {"fit_values": result.fit.values}
    groups: list[str] = []
    if result.soup is not None:
        tensors["W"] = result.soup.W
        groups = list(result.soup.layout.groups)
        _write_soup(folder, result.soup, max_shard)
    value = {
        "method": result.method,
        "settings": settings_json(result.settings),
        "seconds": result.seconds,
        "peak_host": result.peak_host,
        "peak_device": result.peak_device,
        "models_used": result.models_used,
        "notes": list(result.notes),
        "fit": score_json.encode(result.fit),
        "held_out": score_json.encode(result.held_out),
        "report": None,
        "groups": groups,
        "curves": curves(result.history),
        "greedy": [dict(h) for h in result.history if h["kind"] == "greedy"] or None,
        "guard": _guard(result),
    }
    return _write(folder, value, tensors)


def write_report(record: MethodRecord, report: Scores) -> MethodRecord:
    """The same record with its score on the report data."""
    value = {**record.value, "report": score_json.encode(report)}
    return _write(record.folder, value, {**record.tensors, "report_values": report.values})


def restore_soup(record: MethodRecord, pool: Pool) -> Soup | None:
    """The soup these files describe, on a pool whose digests were already found to be the same."""
    if "W" not in record.tensors:
        return None
    saved = soup_record.read(record.folder)
    statistics = record.folder / soup_record.STATISTICS
    return Soup(
        pool,
        Layout.from_json(saved["layout"]),
        record.tensors["W"],
        statistics=load_file(statistics) if saved["statistics"] == "recalibrated" else None,
        copy_statistics=saved["statistics"] == "copied",
        temperature=saved["temperature"],
        free=saved["free"],
        about=saved["about"],
    )


def settings_json(settings: Settings) -> dict[str, Any]:
    value = dataclasses.asdict(settings)
    if callable(value["granularity"]):
        value["granularity"] = "custom"
    return value


def _write(folder: Path, value: dict[str, Any], tensors: Mapping[str, Tensor]) -> MethodRecord:
    data = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    atomic.write_bytes(folder / WEIGHTS, data)
    atomic.write_json(folder / RESULT, value)
    return MethodRecord(folder, value, tensors)


def _write_soup(folder: Path, soup: Soup, max_shard: int) -> None:
    """The small record from which any method's soup can be rebuilt, not only the recommended one's."""
    if soup.statistics is not None:
        data = save({name: tensor.contiguous() for name, tensor in soup.statistics.items()})
        atomic.write_bytes(folder / soup_record.STATISTICS, data)
    atomic.write_json(
        folder / soup_record.RECORD, soup_record.encode(soup, soup.pool.digests(), None, max_shard)
    )


def _guard(result: Result) -> dict[str, Any] | None:
    for entry in result.history:
        if entry["kind"] == "guard":
            return {key: value for key, value in entry.items() if key != "kind"}
    return None

"""Claims: the table says what the record says, differences are paired, and scores on different data are not mixed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from stockpot.report import summary_rows
from stockpot.table import headings

from .records import edit, write_record


def test_rows_are_the_record_in_the_tables_order(complete: Path) -> None:
    rows = summary_rows(complete)
    results = json.loads((complete / "results.json").read_text())
    assert [row.method for row in rows] == results["methods"]
    assert [row.method for row in rows if row.recommended] == [results["recommended"]]
    assert [row.method for row in rows if row.baseline] == ["best"]
    assert [row.method for row in rows if not row.servable] == ["ensemble"]
    for row in rows:
        record = json.loads((complete / "methods" / row.method.replace("+", "-plus") / "result.json").read_text())
        assert row.first.score is not None
        assert (row.first.score.value, row.first.score.low, row.first.score.n) == tuple(
            record["reports"]["report"][k] for k in ("value", "low", "n")
        )
        assert (row.seconds, row.peak, row.models_used) == (
            record["seconds"],
            record["peak_host"],
            record["models_used"],
        )
        assert len(row.cells()) == len(headings(rows))


def test_the_difference_is_the_records(complete: Path) -> None:
    row = summary_rows(complete)[-1]
    found = json.loads((complete / "results.json").read_text())["differences"][row.method]["report"]
    assert row.first.difference == tuple(found)
    mean, low, high = found
    assert row.cells()[3] == f"{100 * mean:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"


def test_equal_scores_of_another_soup_are_not_called_the_same_model(complete: Path) -> None:
    row = summary_rows(complete)[-1]
    sets = {name: replace(cell, difference=(0.0, 0.0, 0.0)) for name, cell in row.sets.items()}
    assert "no difference" in replace(row, sets=sets, models_used=3).cells()
    assert "the same model" in replace(row, sets=sets, models_used=1).cells()


def test_a_difference_on_other_data_than_the_scores_is_not_shown(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best", "uniform"])
    assert summary_rows(folder)[1].first.difference is not None
    edit(folder / "results.json", compared_on="fit")
    assert summary_rows(folder)[1].first.difference is None


def test_the_reference_has_no_difference_to_itself(complete: Path) -> None:
    assert summary_rows(complete)[0].first.difference is None
    assert summary_rows(complete)[0].cells()[3] == "–"


def test_one_method_without_report_score_moves_all_to_the_fitting_data(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best", "uniform", "crossfit"])
    edit(folder / "methods" / "uniform" / "result.json", reports={})
    rows = summary_rows(folder)
    assert {row.kind for row in rows} == {"fit"}
    fit = json.loads((folder / "methods" / "best" / "result.json").read_text())["fit"]
    assert rows[0].first.score is not None
    assert rows[0].first.score.value == fit["value"]


def test_a_single_soup_without_report_data_shows_its_held_out_score(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["crossfit"], sets=(), kind="cook")
    (row,) = summary_rows(folder)
    assert row.kind == "held_out"
    assert row.first.difference is None


def test_device_memory_counts_where_there_is_a_device(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best"])
    edit(folder / "methods" / "best" / "result.json", peak_device=3 * 2**30)
    assert summary_rows(folder)[0].cells()[5] == "3.0 GiB"


def test_a_real_record_reads(real: Path) -> None:
    rows = summary_rows(real)
    assert len(rows) == 7
    assert all(row.kind == "report" and row.first.score is not None and row.first.score.n == 64 for row in rows)
    assert all((row.first.difference is None) == (row.method == "best") for row in rows)

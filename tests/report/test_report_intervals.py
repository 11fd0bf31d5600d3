"""No accuracy is shown without its uncertainty: in the verdict, the table, the tiles, the guard and the ingredients."""

from __future__ import annotations

import re
from pathlib import Path

from stockpot import compare
from stockpot.report.page import markdown, page_of
from stockpot.report.reading import Run
from zoo import samples, zoo

NUMBER = r"\d+\.\d\d"
WITH = re.compile(rf"{NUMBER} %,? ?\((95 % interval |95 %: )?{NUMBER} to {NUMBER}")


def test_every_accuracy_has_its_interval(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", report=samples(60, seed=5))
    few = {"crossfit": {"steps": 3, "batch_size": 16}}
    compared = compare(pool, task, ["best", "uniform", "crossfit"], run=tmp_path / "run", each=few)
    page = page_of(Run(tmp_path / "run"))
    assert compared.verdict == f"{page['decision']}\n{page['why']}"
    assert len(WITH.findall(compared.verdict)) == len(re.findall(rf"{NUMBER} %", compared.verdict)) > 0
    assert re.search(rf"\(95 %: {NUMBER} to {NUMBER}\)", page["tiles"][0][1])
    assert {row[0].split(" (")[0] for row in page["guard"]} == {"learned", "best", "uniform"}
    assert all(WITH.fullmatch(row[1].rstrip(")")) for row in page["guard"])
    assert all(WITH.match(line["own score"]) for line in page["ingredients"])
    for row in page["rows"]:
        assert re.fullmatch(rf"{NUMBER} to {NUMBER}", row.cells()[2])


def test_notes_reach_the_short_report_and_shared_ones_once(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool")
    pool.dropped = ("model_9",)
    compare(pool, task, ["best", "uniform"], run=tmp_path / "run")
    page = page_of(Run(tmp_path / "run"))
    shared = ("every method", "left out, because their weights are not finite: model_9")
    assert page["notes"].count(shared) == 1
    assert [name for name, _ in page["notes"]] == ["every method", "best"]
    assert "- every method: left out, because their weights are not finite: model\\_9" in markdown(page)

"""No accuracy is shown without its uncertainty: in the verdict, the table, the tiles, the guard and the ingredients."""

from __future__ import annotations

import re
from pathlib import Path

from stockpot.report.markdown import markdown
from stockpot.report.page import page_of
from stockpot.report.record import read
from stockpot.run import Identity, Job, RunDirectory, run_job
from stockpot.soups.settings import settings_for
from zoo import samples, zoo

NUMBER = r"\d+\.\d\d"
WITH = re.compile(rf"{NUMBER} %,? ?\((95 % interval |95 %: )?{NUMBER} to {NUMBER}")


def test_every_accuracy_has_its_interval(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool", report=samples(60, seed=5))
    settings = {name: settings_for(name, steps=3, batch_size=16) for name in ("best", "uniform", "crossfit")}
    with RunDirectory.create(tmp_path / "run", Identity("compare", "toy")) as place:
        outcome = run_job(place, Job(pool, task, settings))
    page = page_of(read(tmp_path / "run"))
    assert outcome.verdict == page.verdict
    assert len(WITH.findall(page.verdict)) == len(re.findall(rf"{NUMBER} %", page.verdict)) > 0
    assert re.search(rf"\(95 %: {NUMBER} to {NUMBER}\)", page.tiles[0].text)
    assert {name.split(" (")[0] for name, _, _ in page.guard} == {"learned", "best", "uniform", "greedy"}
    assert all(WITH.fullmatch(score.rstrip(")")) for _, score, _ in page.guard)
    assert all(WITH.match(line["own score"]) for line in page.ingredients)
    for row in page.rows:
        assert re.fullmatch(rf"{NUMBER} to {NUMBER}", row.cells()[2])


def test_notes_reach_the_short_report_and_shared_ones_once(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path / "pool")
    pool.dropped = ("model_9",)
    settings = {name: settings_for(name) for name in ("best", "uniform")}
    with RunDirectory.create(tmp_path / "run", Identity("compare", "toy")) as place:
        run_job(place, Job(pool, task, settings))
    page = page_of(read(tmp_path / "run"))
    shared = ("every method", "left out, because their weights are not finite: model_9")
    assert page.notes.count(shared) == 1
    assert [name for name, _ in page.notes] == ["every method", "best"]
    assert "- every method: left out, because their weights are not finite: model\\_9" in markdown(page)

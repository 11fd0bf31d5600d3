"""Results and comparisons as people and programs read them: one table, as text, HTML and numbers."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest
import torch
from torch import nn

from stockpot import Comparison, Pool, Result, Soup, Task, compare, cook
from stockpot.errors import RunError, SoupError
from stockpot.report import summary_rows

X = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] * X[:, 1] > 0).long()


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def pool() -> Pool:
    return Pool.open([net(seed).state_dict() for seed in range(3)])


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    task = Task(net(0), (X[:100], Y[:100]), (X[100:], Y[100:]))
    run = tmp_path_factory.mktemp("shown") / "run"
    return compare(pool(), task, ["best", "uniform", "crossfit"], run=run, each={"crossfit": {"steps": 4, "folds": 2}})


@pytest.fixture(scope="module")
def cooked() -> Result:
    report = {"test": (X[100:200], Y[100:200]), "b": (X[200:], Y[200:])}
    return cook(pool(), Task(net(0), (X[:100], Y[:100]), report), "uniform")


def test_a_comparison_is_a_table_with_the_verdict_under_it(compared: Comparison) -> None:
    lines = repr(compared).splitlines()
    assert lines[0].split() == [
        "method",
        "accuracy",
        "95",
        "%",
        "CI",
        "vs.",
        "best",
        "single",
        "time",
        "memory",
        "models",
    ]
    assert [line.strip("* ").split()[0] for line in lines[1:4]] == list(compared)
    chosen = [line for line in lines if line.startswith("*")]
    assert [line.split()[1] for line in chosen] == [compared.recommended]
    assert f"{100 * compared['uniform'].score.value:.2f} %" in lines[2]
    assert lines[4] == ""
    assert lines[5:] == compared.verdict.splitlines()


def test_rows_are_those_of_the_record(compared: Comparison) -> None:
    assert compared.path is not None
    assert compared.rows() == summary_rows(compared.path)


def test_numbers_are_one_dict_per_method_and_set(compared: Comparison, cooked: Result) -> None:
    found = {one["method"]: one for one in compared.table()}
    uniform = compared["uniform"]
    assert found["best"]["difference"] is None
    assert found["uniform"]["score"] == uniform.score.value
    assert (found["uniform"]["low"], found["uniform"]["high"]) == uniform.score.interval()
    gap = uniform.score.difference(compared["best"].score)
    assert (found["uniform"]["difference"], found["uniform"]["difference_low"]) == pytest.approx(gap[:2])
    assert [one["set"] for one in cooked.table()] == ["test", "b"]
    assert [one["score"] for one in cooked.table()] == [scores.value for scores in cooked.reports.values()]
    assert {one["data"] for one in cooked.table()} == {"report"}


def test_notebooks_get_html_in_which_names_are_text(compared: Comparison, cooked: Result) -> None:
    page = compared._repr_html_()
    assert page.count("<tr>") == 4
    assert f"<th>{compared.recommended}</th>" in page
    assert compared.verdict.splitlines()[0].replace(">", "&gt;") in page
    assert "95 % interval" in cooked._repr_html_()
    strange = Comparison({"uniform": cooked})
    strange.failed = {"greedy": "<script>\x1b[31m"}
    assert "&lt;script&gt;\\x1b[31m" in strange._repr_html_()
    assert "\x1b" not in repr(strange)


def test_one_result_is_one_row_and_its_notes(cooked: Result, compared: Comparison) -> None:
    first, second, *notes = repr(cooked).splitlines()
    assert first.split() == ["method", "test", "vs.", "best", "single", "b", "vs.", "best", "single"]
    assert second.split()[0] == "uniform"
    assert notes == list(cooked.notes)
    assert str(cooked).startswith("uniform: ")
    assert repr(compared["best"]).splitlines()[1].split()[0] == "best"


def test_the_best_is_the_recommended_one(compared: Comparison) -> None:
    assert compared.recommended is not None
    assert compared.best is compared[compared.recommended]
    assert Comparison().best is None
    assert repr(Comparison()) == "{}"


def test_the_report_is_written_and_opened(compared: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = compared.report()
    assert page == Path(compared.path or "") / "report.html"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert opened == []
    compared.report(show=True)
    assert opened == [page.as_uri()]


def test_without_a_run_there_is_no_report() -> None:
    with pytest.raises(RunError, match=r"report of a comparison: expected a run directory, found none") as error:
        Comparison().report()
    assert 'compare(..., run="run")' in str(error.value)


def test_a_result_is_saved_with_its_scores_in_its_card(cooked: Result, tmp_path: Path) -> None:
    place = cooked.save(tmp_path / "soup", dtype=torch.bfloat16)
    assert cooked.soup is not None
    assert torch.equal(Soup.load(place, ingredients=cooked.soup.pool).W, cooked.soup.W)
    card = (place / "README.md").read_text().splitlines()
    at = card.index("## Results")
    assert card[at + 2].startswith("| method | test | 95 % interval | vs. best single model | b |")
    assert card[at + 4].startswith(f"| uniform | {100 * cooked.score.value:.2f} % |")
    assert card[at + 6] == "Scores are accuracy (%) on report data."  # nothing is paired where one is alone


def test_the_ensemble_is_no_soup_to_save(tmp_path: Path) -> None:
    found = compare(pool(), Task(net(0), (X[:100], Y[:100])), ["ensemble"])["ensemble"]
    with pytest.raises(SoupError, match="result of ensemble: expected a soup, found the ensemble") as caught:
        found.save(tmp_path / "soup")
    assert "comparison.best" in str(caught.value)
    assert not (tmp_path / "soup").exists()

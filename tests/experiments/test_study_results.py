"""docs/results.md from gathered results: yes and no, sections without data, and the committed page."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import results as script
from studies.claims import claims
from studies.loaded import Results, read_all
from studies.page import SECTIONS, read_notes, update_project, update_zoo, write
from study_zoo import method, results, run, summary

from stockpot.errors import RunError

ROOT = Path(__file__).parents[2]
RATES = (0.005, 0.02, 0.05)
ABSOLUTE = re.compile(r"(?<![\w.*)\]])/[\w.-]+/[\w.-]+")


def whole(accuracy: dict[str, float], minus: dict[str, tuple[float, float, float]]) -> dict[str, Any]:
    """A main run with these accuracies, and the default's lead over others."""
    main = run({name: method(name, mean) for name, mean in accuracy.items()})
    return results({"main-0": main}, {name: summary(mean, minus.get(name)) for name, mean in accuracy.items()})


def sweep(value: dict[str, Any], name: str, accuracies: dict[float, float], key: str = "lr") -> None:
    for x, mean in accuracies.items():
        changed = {name: method(name, mean, to_main=[mean - 0.9, mean - 0.91, mean - 0.89], **{key: x})}
        value["runs"][f"{key}-{name}-{x}"] = run(changed)


def found(value: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {claim.asked: (claim.measured, claim.word) for claim in claims(Results(value))}


def test_beating_means_more_and_for_greedy_and_uniform_beyond_chance() -> None:
    value = whole(
        {"crossfit": 0.9, "greedy": 0.89, "uniform": 0.88, "learned+": 0.897, "best": 0.91, "ensemble": 0.91},
        {
            "greedy": (0.01, -0.001, 0.021),
            "uniform": (0.02, 0.01, 0.03),
            "learned+": (0.003, -0.01, 0.02),
            "best": (-0.01, -0.02, 0.001),
            "ensemble": (-0.01, -0.02, -0.001),
        },
    )
    told = found(value)
    assert told["the default beats greedy, the interval above zero"] == ("+1.00 [−0.10, +2.10]", "**no**")
    assert told["the default beats uniform, the interval above zero"] == ("+2.00 [+1.00, +3.00]", "yes")
    assert told["the default beats learned+"][1] == "yes"
    assert told["the default beats best"][1] == "**no**"
    assert told["the default is within noise of the ensemble, or above it"][1] == "**no**"
    value["over_seeds"]["ensemble"]["default_minus"] = [-0.01, -0.02, 0.001]
    assert found(value)["the default is within noise of the ensemble, or above it"][1] == "yes"


def test_a_range_needs_all_its_points_and_its_limit_is_three_tenths_of_a_point() -> None:
    value = whole({"crossfit": 0.9, "mehl+": 0.9}, {})
    asked = "the default varies by less than 0.3 points over learning rates 0.005 to 0.05"
    sweep(value, "crossfit", dict.fromkeys(RATES[:2], 0.9))
    assert found(value)[asked] == ("not measured yet", "–")
    sweep(value, "crossfit", {0.05: 0.8972})
    sweep(value, "mehl+", {0.005: 0.9, 0.02: 0.89, 0.05: 0.87})
    four = "over 0.005, 0.01, 0.02, 0.05"
    assert found(value)[asked] == (f"0.280 points {four}; mehl+ beside it: 3.000", "yes")
    sweep(value, "crossfit", {0.05: 0.89695})
    assert found(value)[asked] == (f"0.305 points {four}; mehl+ beside it: 3.000", "**no**")


@pytest.mark.parametrize(
    ("at_the_end", "words"),
    [
        (0.9, ("not measured yet", "–")),
        (0.89, ("at least 1.000 points over 0.005, 0.01, 0.05; mehl+ beside it: at least 10.000", "**no**")),
    ],
)
def test_without_a_value_a_range_can_be_too_large_but_not_small_enough(
    at_the_end: float, words: tuple[str, str]
) -> None:
    value = whole({"crossfit": 0.9, "mehl+": 0.9}, {})
    sweep(value, "crossfit", {0.005: 0.9, 0.05: at_the_end})
    sweep(value, "mehl+", {0.005: 0.9, 0.05: 0.8})
    asked = "the default varies by less than 0.3 points over learning rates 0.005 to 0.05"
    assert found(value)[asked] == words


def test_a_range_is_that_of_the_means_over_the_seeds_that_have_every_value() -> None:
    value = whole({"crossfit": 0.9, "mehl+": 0.9}, {})
    sweep(value, "crossfit", {0.005: 0.9, 0.02: 0.91, 0.05: 0.9})
    asked = "the default varies by less than 0.3 points over learning rates 0.005 to 0.05"
    assert found(value)[asked][0].startswith("1.000 points over")
    value["runs"]["main-1"] = run({"crossfit": method("crossfit", 0.91, seed=1)}, seed=1)
    for rate, mean in {0.005: 0.91, 0.02: 0.9}.items():
        value["runs"][f"rates-{rate}-1"] = run({"crossfit": method("crossfit", mean, lr=rate, seed=1)}, seed=1)
    assert found(value)[asked][0].startswith("1.000 points over"), "seed 1 lacks a value"
    value["runs"]["rates-0.05-1"] = run({"crossfit": method("crossfit", 0.91, lr=0.05, seed=1)}, seed=1)
    assert found(value)[asked] == (
        "0.000 points over 0.005, 0.01, 0.02, 0.05, mean of 2 seeds; mehl+ beside it: not measured yet",
        "yes",
    )


def test_half_to_double_the_steps_leaves_a_quarter_out() -> None:
    value = whole({"crossfit": 0.9, "mehl+": 0.9}, {})
    sweep(value, "crossfit", {250: 0.85, 500: 0.899, 2000: 0.901}, "steps")
    told = found(value)
    asked = "the default varies by less than 0.3 points over half to double the steps"
    assert told[asked] == ("0.200 points over 500, 1000, 2000; mehl+ beside it: not measured yet", "yes")


@pytest.mark.parametrize(
    ("steps", "minus", "text", "word"),
    [
        (
            100,
            (-0.001, -0.003, 0.001),
            "400 steps on average instead of 2,000, 5.0x fewer: −0.10 [−0.30, +0.10]",
            "yes",
        ),
        (
            100,
            (-0.01, -0.02, -0.001),
            "400 steps on average instead of 2,000, 5.0x fewer: −1.00 [−2.00, −0.10]",
            "**no**",
        ),
        (
            200,
            (0.01, 0.005, 0.015),
            "800 steps on average instead of 2,000, 2.5x fewer: +1.00 [+0.50, +1.50]",
            "**no**",
        ),
    ],
)
def test_a_cheaper_learner_is_not_below_the_papers(
    steps: int, minus: tuple[float, float, float], text: str, word: str
) -> None:
    value = whole({"crossfit": 0.9, "mehl+": 0.9}, {"mehl+": minus})
    value["runs"]["main-0"]["methods"] = {
        "crossfit": method("crossfit", 0.9, steps=steps),
        "mehl+": method("mehl+", 0.9, steps=2000),
    }
    asked = "at most a third of mehl+'s gradient steps at the same accuracy or above"
    assert found(value)[asked] == (text, word)


def test_points_are_those_that_differ_in_nothing_else() -> None:
    value = whole({"crossfit": 0.9}, {})
    sweep(value, "crossfit", {0.02: 0.91})
    value["runs"]["other-weight"] = run({"crossfit": method("crossfit", 0.5, lr=0.05, weight_decay=0.5)})
    value["runs"]["other-pool"] = run({"crossfit": method("crossfit", 0.5, lr=0.05)}, models=4)
    value["runs"]["other-data"] = {**run({"crossfit": method("crossfit", 0.5, lr=0.05)}), "data": "dev"}
    value["runs"]["try-it"] = run({"crossfit": method("crossfit", 0.5, lr=0.05)})
    points = Results(value).rates("crossfit")
    assert [(point.x, point.accuracy) for point in points] == [(0.01, 0.9), (0.02, 0.91)]


def test_three_seeds_of_every_learned_method() -> None:
    names = ("learned", "learned+", "hl", "hl+", "mehl", "mehl+", "crossfit")
    value = whole(dict.fromkeys(names, 0.9), {})
    asked = "at least three seeds of every learned method"
    assert found(value)[asked] == ("3 or more of 7 methods", "yes")
    value["over_seeds"]["hl"]["seeds"] = [0, 1]
    assert found(value)[asked] == ("2 or more of 7 methods; fewer than three: hl", "**no**")


def test_sections_without_data_say_so_and_nothing_else(tmp_path: Path) -> None:
    write([], {}, tmp_path / "results.md")
    parts = (tmp_path / "results.md").read_text().split("\n## ")[1:]
    assert len(parts) == 2 + len(SECTIONS)
    assert {part.split("\n", 1)[1].strip() for part in parts} == {"Not measured yet."}
    assert not (tmp_path / "results").exists()


def test_a_zoo_with_the_main_study_only_has_one_table(tmp_path: Path) -> None:
    value = whole({"crossfit": 0.9, "greedy": 0.89}, {"greedy": (0.01, 0.001, 0.02)})
    value["zoo"] = "fashion-vit"
    value["runs"]["main-0"]["methods"]["crossfit"]["guard"] = "greedy"
    value["runs"]["main-0"]["failed"] = {"hl": "out of memory"}
    write([Results(value)], {"methods": {"fashion-vit": "A sentence."}}, tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    table = parts["Tables 1 and 2: every method"]
    assert "| greedy | 89.00 | 88.00 to 90.00 | – | +1.00 [+0.10, +2.00] | 5.0 x 400 ms | 2.0 s |" in table
    assert "fashion-vit, seed 0: crossfit's guard returned the greedy soup. fashion-vit, seed 0: hl failed." in table
    assert "81.03 (24 s x 143, 3501 s, 3 GB)" in table  # the paper's row beside it
    assert "A sentence." in table
    assert "a processor" in parts["Machines"]
    assert "2026-01-02" in parts["Machines"]
    assert "cifar10-efficientnet, imdb-minilm: not measured yet." in table
    assert (tmp_path / "results" / "methods.svg").is_file()
    assert parts["Table 3: the best ingredients left out"].strip() == "Not measured yet."
    assert parts["Ablations: b, T and J"].strip() == "Not measured yet."


def test_studies_that_were_not_repeated_are_shown_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    accuracy = {"best": 0.8, "uniform": 0.8, "greedy": 0.85, "mehl+": 0.86}
    # Of the times that have a study, the latest counts; 10 is later than 9.
    for place, default in (
        (folder, 0.91),
        (folder / "earlier" / "9", 0.84),
        (folder / "earlier" / "10", 0.88),
        (folder / "earlier" / "11", 0.83),
    ):
        place.mkdir(parents=True, exist_ok=True)
        value = whole({**accuracy, "crossfit": default}, {})
        if place.name in ("9", "10"):
            smaller = {name: method(name, mean - 0.01) for name, mean in accuracy.items()}
            value["runs"]["removed-2"] = run({**smaller, "crossfit": method("crossfit", 0.87)}, models=6)
            sweep(value, "crossfit", {0.005: 0.7, 0.02: 0.71, 0.05: 0.72})
        (place / "tiny.json").write_text(json.dumps(value))
    (zoo,) = read_all(folder)
    write([zoo], {}, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text("utf-8")
    removed = text[text.index("## Table 3") : text.index("## Mixing weights")]
    assert "| tiny (earlier) | 0 | 80.00 | 80.00 | 85.00 | 86.00 | 88.00 |" in removed
    assert "| tiny (earlier) | 2 | 79.00 | 79.00 | 84.00 | 85.00 | 87.00 |" in removed
    assert text.count("tiny (earlier)") == 2
    assert "| **crossfit** | 91.00 |" in text
    assert "72.00" not in text  # of the present default there are no rates, and another one's are not shown
    newest = json.loads((folder / "tiny.json").read_text())
    newest["runs"]["removed-2"] = run({"crossfit": method("crossfit", 0.9)}, models=6)
    (folder / "tiny.json").write_text(json.dumps(newest))
    write(read_all(folder), {}, tmp_path / "page.md")
    assert "tiny (earlier)" not in (tmp_path / "page.md").read_text("utf-8")


def test_the_papers_curve_of_an_earlier_time_stands_beside_ours_of_now(tmp_path: Path) -> None:
    """Its method has not changed; ours may have."""
    folder, accuracy = tmp_path / "results", {"mehl+": 0.9, "crossfit": 0.9}
    asked = "the default varies by less than 0.3 points over learning rates 0.005 to 0.05"
    for place, mean in ((folder / "earlier" / "1", 0.88), (folder, 0.9)):
        place.mkdir(parents=True, exist_ok=True)
        value = whole(accuracy, {})
        sweep(value, "crossfit", {0.005: mean, 0.02: mean, 0.05: mean})
        if place != folder:
            sweep(value, "mehl+", {0.005: 0.9, 0.02: 0.89, 0.05: 0.87})
        (place / "tiny.json").write_text(json.dumps(value))
    (zoo,) = read_all(folder)
    told = {claim.asked: claim.measured for claim in claims(zoo)}
    assert told[asked].endswith("mehl+ beside it: 3.000, of an earlier time")
    write([zoo], {}, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text("utf-8")
    shown = text[text.index("## Sensitivity") :]
    assert "| tiny (earlier) | learning rate | mehl+ | 3.00 | **0.005**: 90.00 (" in shown
    assert "**0.01**: 90.00 (main); **0.02**: 89.00 (" in shown
    assert "| tiny | learning rate | crossfit | 0.00 | **0.005**: 90.00 (" in shown
    sweep(value, "mehl+", {0.005: 0.91, 0.02: 0.9, 0.05: 0.9})
    (folder / "tiny.json").write_text(json.dumps(value))
    (zoo,) = read_all(folder)
    told = {claim.asked: claim.measured for claim in claims(zoo)}
    assert told[asked].endswith("mehl+ beside it: 1.000")


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    value = whole({"crossfit": 0.9, "greedy": 0.89, "mehl+": 0.9}, {})
    sweep(value, "crossfit", {0.02: 0.91})
    for name in ("one", "two"):
        write([Results(value)], {}, tmp_path / name / "results.md")
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert Path("results/sensitivity.svg") in files
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_notes_that_belong_nowhere_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "notes.yaml"
    assert read_notes(file) == {}
    file.write_text("methods: {all: Good.}\n")
    assert read_notes(file) == {"methods": {"all": "Good."}}
    file.write_text("method: {all: Good.}\n")
    with pytest.raises(RunError, match=r"notes\.yaml: method"):
        read_notes(file)


def test_the_committed_page_is_made_of_the_committed_results(tmp_path: Path) -> None:
    readmes = list((ROOT / "experiments").glob("*/README.md"))
    home = tmp_path / "experiments"
    for path in readmes:
        (home / path.parent.name).mkdir(parents=True)
        shutil.copy(path, home / path.parent.name)
    shutil.copy(ROOT / "README.md", tmp_path)
    assert script.main(["--out", str(tmp_path / "results.md"), "--home", str(home)]) == 0
    for path in [*readmes, ROOT / "README.md"]:
        assert (tmp_path / path.relative_to(ROOT)).read_text() == path.read_text(), "run `make results`"
    # Nobody else shows results: a table that no committed result stands behind is not one.
    shown = {path.parent.name for path in readmes if "Results: written" in path.read_text()}
    assert shown == {path.stem for path in (ROOT / "experiments" / "results").glob("*.json")}
    made = (tmp_path / "results.md").read_text()
    assert made == (ROOT / "docs" / "results.md").read_text(), "run `make results`"
    pictures = {path.name for path in (tmp_path / "results").glob("*.svg")}
    assert pictures == {path.name for path in (ROOT / "docs" / "results").glob("*.svg")}


def test_a_zoos_readme_keeps_what_people_wrote(tmp_path: Path) -> None:
    value = whole({"crossfit": 0.9, "greedy": 0.89}, {"greedy": (0.01, 0.001, 0.02)})
    readme = tmp_path / "README.md"
    update_zoo(Results(value), readme)
    assert not readme.exists()
    readme.write_text("# A zoo\n\nBefore.\n")
    update_zoo(Results(value), readme)
    first = readme.read_text()
    assert first.startswith("# A zoo\n\nBefore.\n\n<!-- Results")
    assert "| greedy | 89.00 | 88.00 to 90.00 | +1.00 [+0.10, +2.00] |" in first
    readme.write_text(first + "After.\n")
    value["over_seeds"]["greedy"]["report"][0] = 0.5
    update_zoo(Results(value), readme)
    assert readme.read_text() == first.replace("| 89.00 |", "| 50.00 |") + "After.\n"


def test_the_projects_readme_has_one_line_per_measured_zoo(tmp_path: Path) -> None:
    value = whole({"crossfit": 0.9, "greedy": 0.89}, {"greedy": (0.01, 0.001, 0.02)})
    readme = tmp_path / "README.md"
    update_project([Results(value)], readme)
    assert not readme.exists()
    readme.write_text("# Without marks\n")
    update_project([Results(value)], readme)
    assert readme.read_text() == "# Without marks\n"
    readme.write_text(
        "# Stock\n\nBefore.\n\n<!-- Results: written by `make results`. -->\n<!-- End of results. -->\n\nAfter.\n"
    )
    update_project([Results(value), Results(results({}, {}, "unmeasured"))], readme)
    first = readme.read_text()
    assert first.startswith("# Stock\n\nBefore.\n\n<!-- Results")
    assert first.endswith("<!-- End of results. -->\n\nAfter.\n")
    assert "| – | – | 89.00 | – | – | 90.00 | – | – | +1.00 [+0.10, +2.00] |" in first
    assert "unmeasured" not in first
    update_project([Results(value)], readme)
    assert readme.read_text() == first


def test_committed_results_are_small_and_name_no_machine_path() -> None:
    folder = ROOT / "experiments" / "results"
    for path in folder.rglob("*.json"):
        text = path.read_text()
        assert len(text) < 2_000_000
        assert ABSOLUTE.search(text) is None, path.name
    assert all(json.dumps(zoo.value) for zoo in read_all(folder))


def test_absolute_paths_are_seen() -> None:
    assert ABSOLUTE.search('["--out","/home/someone/runs/tiny"]')
    assert ABSOLUTE.search('"pool.path=[\\"/data/pool\\"]"')
    assert ABSOLUTE.search('["experiments/tiny/recipe.yaml","--set","a/b","9/10"]') is None

"""A study of a tiny zoo for real: runs of the command line, gathered, and the page made of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import collect
import numpy as np
import pytest
import results
import study
from safetensors.numpy import load_file, save_file
from scripts import part
from studies import page, tables
from studies.gather import OWN_TEST, gather
from studies.loaded import Results
from study_zoo import make

SOURCE = Path(__file__).parents[2] / "src"
RUNS = ("main-0", "main-1", "seeds-3", "rates-mehl-plus-0.02", "directions-fp32-0", "directions-int8-0")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make(tmp_path_factory.mktemp("whole") / "experiments")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep))
    patch.setenv("OMP_NUM_THREADS", "1")
    try:
        code = study.main(["tiny", "--home", str(home), "--jobs", "2", "--only", *RUNS])
    finally:
        patch.undo()
    logs = [path.read_text() for path in (home / "runs" / "tiny").glob("*.log")]
    assert code == 0, "\n".join(logs)
    return home


def test_runs_become_one_file_and_a_page(home: Path, tmp_path: Path) -> None:
    assert collect.main(["tiny", "--home", str(home)]) == 0
    file = home / "results" / "tiny.json"
    value = json.loads(file.read_text())
    assert set(value["runs"]) == set(RUNS)
    assert str(home.parent) not in file.read_text()
    readme, others = home / "tiny" / "README.md", SOURCE.parent / "experiments" / "tiny" / "README.md"
    readme.write_text("A zoo.\n")
    before = others.read_text()  # the repository has a zoo of this name, too
    assert results.main(["--results", str(home / "results"), "--out", str(tmp_path / "results.md")]) == 0
    assert "## Results" in readme.read_text()
    assert "mean of 2 seeds (3 of crossfit)" in readme.read_text()
    assert others.read_text() == before
    text = (tmp_path / "results.md").read_text()
    assert "| **crossfit** |" in text
    assert "| tiny | learning rate | mehl+ |" in text
    drawn = {path.stem for path in (tmp_path / "results").glob("*.svg")}
    assert drawn == {"methods", "coefficients", "sensitivity"}


def test_the_check_of_the_small_zoo_reads_a_run(home: Path) -> None:
    run = home / "runs" / "tiny" / "main-0"
    check = part("small/check.py")
    records = {name: json.loads((run / f"methods/{name}/result.json").read_text()) for name in check.scores(run)}
    assert set(records) == {"crossfit", "greedy", "uniform", "best"}
    assert check.scores(run) == {name: one["reports"]["report"]["value"] for name, one in records.items()}


def test_rounding_is_compared_with_models_kept_exactly(home: Path) -> None:
    value = gather(home / "runs" / "tiny", "tiny")
    rounding = value["rounding"]
    assert set(rounding["mehl+"]) == {"main", "int8"}
    assert set(rounding["hl+"]) == {"int8"}  # which this zoo's `main` has not
    plain = rounding["mehl+"]["main"]
    assert (plain["seeds"], plain["difference"], plain["error"]) == ([0], [0, 0, 0], 0)  # exact on a CPU
    scores = {kind: value["runs"][f"directions-{kind}-0"]["methods"] for kind in ("fp32", "int8")}
    for name, found in rounding.items():
        one, two = (scores[kind][name]["report"]["mean"] for kind in ("int8", "fp32"))
        assert found["int8"]["difference"][0] == pytest.approx(one - two, abs=1e-5)
        assert found["int8"]["exact"] == pytest.approx(two, abs=1e-5)
    lines = tables.directions([Results(value)])
    assert lines[0] == "| zoo | method | fp32 (%) | rounded minus fp32 |"
    row = next(line for line in lines if line.startswith("| tiny | mehl+ "))
    assert "bf16 0.00 [0.00, 0.00], within one standard error (0.000; 1 seed)" in row
    assert [line.split("|")[4].split()[0] for line in lines if line.startswith("| tiny | hl+ ")] == ["int8"]


def test_rounding_is_the_rounded_minus_the_exact_of_the_same_pool(home: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    file = runs / "directions-int8-0" / "methods" / "mehl-plus" / "weights.safetensors"
    content = load_file(file)
    content["report_table"] = np.ones_like(content["report_table"])
    save_file(content, file)
    found = gather(runs, "tiny")["rounding"]["mehl+"]["int8"]
    assert found["exact"] < 0.99
    assert found["difference"][0] == pytest.approx(1 - found["exact"], abs=1e-5)
    assert found["error"] > 0
    recipe = runs / "directions-int8-0" / "recipe.yaml"
    assert recipe.read_text().count('"of": "test"') == 1
    recipe.write_text(recipe.read_text().replace('"of": "test"', '"of": "dev"'))  # results on other data
    assert "int8" not in gather(runs, "tiny")["rounding"]["mehl+"]


@pytest.mark.parametrize(("mean", "word"), [(0.0009, "within"), (0.0011, "beyond"), (-0.0011, "beyond")])
def test_beyond_one_standard_error_is_said(mean: float, word: str) -> None:
    found = {"seeds": [0, 1], "exact": 0.9, "difference": [mean, -0.01, 0.01], "error": 0.001}
    line = tables.directions([Results({"zoo": "tiny", "runs": {}, "rounding": {"hl+": {"int8": found}}})])[2]
    assert f"{word} one standard error (0.100; 2 seeds)" in line


def test_gathered_numbers_are_those_of_the_runs(home: Path) -> None:
    value = gather(home / "runs" / "tiny", "tiny")

    def scores(run: str, method: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        file = home / "runs" / "tiny" / run / "methods" / method.replace("+", "-plus") / "weights.safetensors"
        return np.asarray(load_file(file)["report_table"][:, 0])

    main = value["runs"]["main-0"]
    ours, greedy = main["methods"]["crossfit"], main["methods"]["greedy"]
    assert ours["report"]["mean"] == pytest.approx(scores("main-0", "crossfit").mean(), rel=1e-5)
    assert (ours["steps"], ours["b"], ours["T"], ours["J"]) == (4 * 8, 5, 1, 8)
    assert ours["epochs"] == pytest.approx(32 * 16 / 60, rel=1e-5)
    tried = json.loads((home / "runs/tiny/main-0/methods/greedy/result.json").read_text())["greedy"]
    assert len(tried) == 5  # the best, which was evaluated with the other ingredients, and four candidates
    assert greedy["epochs"] == pytest.approx(5 + sum(one["evaluated"] for one in tried[1:]) / 60, rel=1e-5)
    delta = np.stack([scores(f"main-{s}", "crossfit") - scores(f"main-{s}", "mehl+") for s in (0, 1)])
    lead = value["over_seeds"]["mehl+"]["default_minus"]
    assert lead[0] == pytest.approx(delta.mean(), abs=1e-6)
    assert main["differences"]["crossfit"]["mehl+"][0] == pytest.approx(delta[0].mean(), abs=1e-6)
    slower = value["runs"]["rates-mehl-plus-0.02"]
    change = scores("rates-mehl-plus-0.02", "mehl+") - scores("main-0", "mehl+")
    assert slower["methods"]["mehl+"]["to_main"][0] == pytest.approx(change.mean(), abs=1e-6)
    assert slower["methods"]["mehl+"]["settings"]["lr"] == 0.02
    assert slower["jobs"] == 2
    weights = value["coefficients"]["mehl+"]
    assert sum(weights["counts"]) == weights["models"] * weights["groups"] == 5 * 4
    assert sum(weights["by_ingredient"]) == pytest.approx(1, abs=1e-4)


def test_what_no_seed_changes_is_run_once_and_compared_with_every_seed(home: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    assert not (runs / "main-1" / "methods" / "greedy").exists()
    file = runs / "main-1" / "methods" / "crossfit" / "weights.safetensors"
    content = load_file(file)
    content["report_table"] = np.ones_like(content["report_table"])  # seed 1 of ours gets everything right
    save_file(content, file)
    found = gather(runs, "tiny")["over_seeds"]
    assert found["greedy"]["seeds"] == [0]
    ours = found["crossfit"]["by_seed"]
    assert ours[1] == 1 > ours[0]
    lead = found["greedy"]["default_minus"][0]
    assert lead == pytest.approx(sum(ours) / 3 - found["greedy"]["by_seed"][0], abs=1e-5)


def test_more_seeds_of_the_default_count_where_the_other_has_none(home: Path) -> None:
    found = gather(home / "runs" / "tiny", "tiny")
    assert found["over_seeds"]["crossfit"]["seeds"] == [0, 1, 3]
    ours, greedy = (found["over_seeds"][name]["by_seed"] for name in ("crossfit", "greedy"))
    lead = found["over_seeds"]["greedy"]["default_minus"][0]
    assert lead == pytest.approx(sum(ours) / 3 - greedy[0], abs=1e-5)
    mehl = found["over_seeds"]["mehl+"]  # has no seed 3, so ours of seed 3 does not count against it
    assert mehl["default_minus"][0] == pytest.approx(sum(ours[:2]) / 2 - sum(mehl["by_seed"]) / 2, abs=1e-5)
    assert found["variants"] == {}  # the same again is no variant
    assert found["runs"]["seeds-3"]["methods"]["crossfit"]["to_main"] is None


def test_a_data_sets_own_test_samples_are_counted_by_themselves(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    for name, method in [("main-0", "greedy"), *((f, "crossfit") for f in ("main-0", "main-1", "seeds-3"))]:
        file = runs / name / "methods" / method / "weights.safetensors"
        content = load_file(file)
        values = np.zeros_like(content["report_table"])
        values[: 2 if method == "crossfit" else 1] = 1
        values[10:] = method == "greedy"  # beyond them greedy is always right
        save_file({**content, "report_table": values}, file)
    monkeypatch.setitem(OWN_TEST, "tiny", 10)
    value = gather(runs, "tiny")
    assert value["own_test"]["greedy"]["n"] == 10
    assert value["own_test"]["crossfit"]["report"][0] == pytest.approx(0.2)
    assert value["own_test"]["greedy"]["default_minus"][0] == pytest.approx(0.1)
    assert value["over_seeds"]["greedy"]["default_minus"][0] < 0
    page.write([Results(value)], {}, tmp_path / "results.md")
    text = (tmp_path / "results.md").read_text()
    assert "| the default minus greedy on the data set's own 10 test samples alone | +10.00 [" in text
    page.write([Results(gather(runs, "another"))], {}, tmp_path / "results.md")
    assert "test samples alone" not in (tmp_path / "results.md").read_text()


def test_nothing_is_gathered_of_a_run_that_is_not_done(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny" / "main-0"
    folder.mkdir(parents=True)
    about = json.loads((home / "runs" / "tiny" / "main-0" / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "status": "interrupted"}))
    assert gather(tmp_path / "runs" / "tiny", "tiny")["runs"] == {}
    assert collect.main(["tiny", "--home", str(tmp_path)]) == 1


def test_seeds_of_a_variant_are_taken_together(home: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    shutil.copytree(runs / "rates-mehl-plus-0.02", runs / "presets-authors-0")  # differs from main-0
    shutil.copytree(runs / "main-1", runs / "presets-authors-1")  # does not differ from main-1
    value = gather(runs, "tiny")
    change = value["runs"]["presets-authors-0"]["methods"]["mehl+"]["to_main"]
    whole = value["variants"]["presets-authors"]["mehl+"]
    assert change[0] != 0
    assert whole["to_main"][0] == pytest.approx(change[0] / 2, abs=1e-5)
    assert set(value["variants"]["presets-authors"]) == {"mehl+"}


def test_seeds_on_other_data_are_not_taken_in(home: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    file = runs / "seeds-3" / "recipe.yaml"
    text = file.read_text()
    assert text.count('"split_seed": 0') == 1
    file.write_text(text.replace('"split_seed": 0', '"split_seed": 1'))
    assert gather(runs, "tiny")["over_seeds"]["crossfit"]["seeds"] == [0, 1]


def test_a_guard_that_stepped_in_is_told_of_every_seed(home: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(home / "runs" / "tiny", runs)
    value = gather(runs, "tiny")
    value["runs"]["seeds-3"]["methods"]["crossfit"]["guard"] = "uniform"
    assert "tiny, seed 3: crossfit's guard returned the uniform soup." in "\n".join(tables.methods([Results(value)]))

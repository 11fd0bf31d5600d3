"""The commands on a toy pool: what they print, for people and for programs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cli.conftest import Answer, Stockpot, lines

METHODS = ["best", "uniform", "greedy", "hl+", "crossfit"]


def test_compare_prints_the_table_the_verdict_and_what_is_next(shared: Path, compared: Answer) -> None:
    assert compared.code == 0
    table = [line.lstrip("* ").split()[0] for line in lines(compared.out) if "%" in line][1:6]
    assert table == METHODS
    assert "* crossfit" in compared.out
    assert "crossfit mixes" in compared.out
    assert "report.html" in compared.out
    assert "stockpot evaluate" in compared.out
    assert (shared / "run" / "report.html").stat().st_size > 10_000
    assert "crossfit: cooked in" in compared.err
    for text in (compared.out, compared.err):
        assert not any(ord(char) < 32 and char != "\n" for char in text), "control characters in plain output"


def test_compare_again_repeats_nothing(shared: Path, compared: Answer, stockpot: Stockpot) -> None:
    again = stockpot("compare", shared / "recipe.yaml")
    assert again.out == compared.out
    assert list(lines(again.err)) == [f"{name}: finished earlier, not repeated" for name in METHODS]


def test_what_is_next_scores_the_same_data_as_the_run(
    shared: Path, tmp_path: Path, compared: Answer, stockpot: Stockpot
) -> None:
    """What --set changed belongs to the command that comes next."""
    assert f"{shared / 'recipe.yaml'}" in next(line for line in lines(compared.out) if "stockpot evaluate" in line)
    out = tmp_path / "other"
    changed = ["--set", "data.metric=loss", "--set", "method.name=greedy"]
    answer = stockpot("cook", shared / "recipe.yaml", *changed, "--out", out)
    assert answer.code == 0, answer.err
    line = next(line for line in lines(answer.out) if "stockpot evaluate" in line)
    assert line.split()[-1] == str(out / "recipe.yaml")
    again = json.loads(stockpot(*line.split()[1:], "--json").out)
    assert again["score"] == json.loads((out / "methods" / "greedy" / "result.json").read_text())["reports"]["report"]


def test_other_code_is_another_run(folder: Path, stockpot: Stockpot) -> None:
    recipe, code = folder / "recipe.yaml", folder / "toy.py"
    assert stockpot("cook", recipe).code == 0
    text = code.read_text()
    code.write_text("# nothing new\n\n" + text)
    assert stockpot("cook", recipe).code == 0
    code.write_text(text.replace("nn.Tanh()", "nn.ReLU()"))
    refused = stockpot("cook", recipe)
    assert refused.code == 1
    assert "expected the code this run was started with, found other code" in refused.err
    assert "What differs:\n    what toy.py does" in refused.err
    code.write_text(text)
    assert stockpot("cook", recipe).code == 0


def test_json_is_one_document_with_the_same_numbers(shared: Path, compared: Answer, stockpot: Stockpot) -> None:
    answer = stockpot("compare", shared / "recipe.yaml", "--json")
    value = json.loads(answer.out)
    assert [row["method"] for row in value["methods"]] == METHODS
    crossfit = value["methods"][-1]
    assert f"{100 * crossfit['score']['value']:.2f} %" in compared.out
    assert crossfit["score"]["n"] == 80
    assert crossfit["difference"][1] <= crossfit["difference"][0] <= crossfit["difference"][2]
    assert crossfit["sets"] == {"report": {"score": crossfit["score"], "difference": crossfit["difference"]}}


def test_evaluate_refuses_weights_that_are_not_finite(folder: Path, stockpot: Stockpot) -> None:
    file = folder / "pool" / "model_1.safetensors"
    state = load_file(file)
    state["0.bias"][0] = float("nan")
    save_file(state, file)
    refused = stockpot("evaluate", file, folder / "recipe.yaml")
    assert (refused.code, refused.out) == (1, "")
    assert "not finite" in refused.err
    assert "0.bias" in refused.err


def test_evaluate_uses_the_pools_buffers_that_the_model_never_saves(folder: Path, stockpot: Stockpot) -> None:
    """Cooking did, and evaluating did not: 31 % there and 64 % here, for one soup."""
    for file in (folder / "pool").glob("*.safetensors"):
        save_file({**load_file(file), "0.sign": torch.tensor([1.0, -1, 1, -1, 1, -1])}, file)
    (folder / "toy.py").write_text((folder / "toy.py").read_text() + """
class Signed(nn.Linear):
    def __init__(self):
        super().__init__(6, 8)
        self.register_buffer("sign", torch.ones(6), persistent=False)

    def forward(self, x):
        return super().forward(x * self.sign)

def model():
    return nn.Sequential(Signed(), nn.Tanh(), nn.Linear(8, 3))
""")  # fmt: skip
    recipe = folder / "recipe.yaml"
    cooked = stockpot("cook", recipe, "--set", "method.name=uniform")
    assert cooked.code == 0, cooked.err
    result = json.loads((folder / "run" / "methods" / "uniform" / "result.json").read_text())
    soup = folder / "run" / "methods" / "uniform" / "soup"
    found = json.loads(stockpot("evaluate", soup, recipe, "--json").out)
    assert found["score"] == result["reports"]["report"]


def test_evaluate_agrees_with_the_table(shared: Path, compared: Answer, stockpot: Stockpot) -> None:
    soup = shared / "run" / "methods" / "crossfit" / "soup"
    recorded = json.loads((shared / "run" / "methods" / "crossfit" / "result.json").read_text())
    by_soup = json.loads(stockpot("evaluate", soup, shared / "recipe.yaml", "--json").out)
    by_run = json.loads(stockpot("evaluate", shared / "run", shared / "recipe.yaml", "--json").out)
    assert by_soup == by_run
    assert by_soup["score"] == recorded["reports"]["report"]
    fit = json.loads(stockpot("evaluate", soup, shared / "recipe.yaml", "--on", "fit", "--json").out)
    assert fit["score"] == recorded["fit"]
    text = stockpot("evaluate", shared / "pool" / "model_0.safetensors", shared / "recipe.yaml").out
    assert "on report data (95 % interval" in text


def test_evaluating_a_soup_that_was_not_written_says_how_to_write_it(folder: Path, stockpot: Stockpot) -> None:
    recipe, run = folder / "recipe.yaml", folder / "two of them"
    methods = "method.methods=[best, uniform, ensemble]"
    answer = stockpot("compare", recipe, "--set", methods, "--out", run)
    assert answer.code == 0
    assert "No method is recommended" in answer.out  # neither was scored on samples that it was not chosen on
    assert "stockpot rebuild" in answer.out
    missing = next(name for name in ("best", "uniform") if not (run / "methods" / name / "soup").exists())
    soup = run / "methods" / missing / "soup"
    answer = stockpot("evaluate", soup, recipe)
    assert answer.code == 1
    assert f"`stockpot rebuild '{run}' --method {missing}` writes it" in answer.err.replace("\n", "")
    assert stockpot("rebuild", run, "--method", missing).code == 0
    assert stockpot("evaluate", soup, recipe).code == 0
    none = stockpot("evaluate", run / "methods" / "ensemble" / "soup", recipe)  # and never will be one
    assert none.code == 1
    assert "stockpot rebuild" not in none.err


def test_rebuild_compares_writes_and_refuses(folder: Path, stockpot: Stockpot) -> None:
    assert stockpot("cook", folder / "recipe.yaml").code == 0
    run = folder / "run"
    soup = run / "methods" / "crossfit" / "soup"
    assert "every byte is the same" in stockpot("rebuild", run).out
    before = (soup / "model.safetensors").read_bytes()
    shutil.rmtree(soup)
    missing = stockpot("evaluate", run, folder / "recipe.yaml")
    assert missing.code == 1
    assert "stockpot rebuild" in missing.err
    assert stockpot("rebuild", run).code == 0
    assert (soup / "model.safetensors").read_bytes() == before
    (folder / "pool").rename(folder / "moved")
    elsewhere = stockpot("rebuild", run, "--pool", folder / "moved", "--out", folder / "again")
    assert elsewhere.code == 0
    assert (folder / "again" / "model.safetensors").read_bytes() == before
    assert stockpot("rebuild", run, "--pool", folder / "moved", "--out", folder / "again").code == 1
    changed = load_file(folder / "moved" / "model_1.safetensors")
    changed["0.bias"] += 1
    save_file(changed, folder / "moved" / "model_1.safetensors")
    refused = stockpot("rebuild", run, "--pool", folder / "moved", "--out", folder / "other")
    assert refused.code == 1
    assert "1 of 4 ingredients: expected the content the soup was made of" in refused.err


def test_cook_shows_the_best_ingredient_beside_the_soup(folder: Path, stockpot: Stockpot) -> None:
    answer = stockpot(
        "cook", folder / "recipe.yaml", "--out", folder / "elsewhere", "--set", "method.lr=0.02", "--json"
    )
    value = json.loads(answer.out)
    assert [row["method"] for row in value["methods"]] == ["best", "crossfit"]
    assert value["run"] == str(folder / "elsewhere")
    assert json.loads((folder / "elsewhere" / "recipe.yaml").read_text())["method"]["lr"] == 0.02


def test_report_is_written_again(shared: Path, compared: Answer, stockpot: Stockpot) -> None:
    before = (shared / "run" / "report.html").read_bytes()
    answer = stockpot("report", shared / "run")
    assert answer.code == 0
    assert "report.html" in answer.out
    assert compared.out.split("Next:")[0].strip() == answer.out.strip(), "as the comparison ended"
    assert (shared / "run" / "report.html").read_bytes() == before


def test_a_report_without_report_data_says_what_its_scores_are(
    shared: Path, tmp_path: Path, compared: Answer, stockpot: Stockpot
) -> None:
    """As of a run that was interrupted."""
    text = "Scores on fitting data"
    assert text not in stockpot("report", shared / "run").out
    run = tmp_path / "run"
    shutil.copytree(shared / "run", run)
    for file in run.glob("methods/*/result.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "reports": {}}))
    assert text in stockpot("report", run).out


def test_inspect_says_what_is_special_about_the_pool(folder: Path, stockpot: Stockpot) -> None:
    pool = folder / "pool"
    shutil.copy(pool / "model_0.safetensors", pool / "model_4.safetensors")
    far = {name: 50 * tensor for name, tensor in load_file(pool / "model_1.safetensors").items()}
    save_file(far, pool / "model_5.safetensors")
    answer = stockpot("inspect", pool, "--budget", "24GB")
    assert answer.code == 0
    assert "6 ingredients of 83 parameters in 4 tensors (4 float32)" in answer.out
    assert "outlier: model_5" in answer.out
    assert "duplicates: model_0, model_4 have the same content" in answer.out
    assert "fits the budget" in answer.out
    assert "not included: activations" in answer.out
    value = json.loads(stockpot("inspect", folder / "recipe.yaml", "--json").out)
    assert [entry["name"] for entry in value["ingredients"]] == [f"model_{k}" for k in range(6)]
    assert value["outlier"] == "model_5"
    assert value["problems"] == []


def test_inspect_names_a_model_from_elsewhere(folder: Path, stockpot: Stockpot) -> None:
    pool = folder / "pool"
    assert "no kin" not in stockpot("inspect", pool).out
    elsewhere = {name: -tensor for name, tensor in load_file(pool / "model_1.safetensors").items()}
    save_file(elsewhere, pool / "model_9.safetensors")
    answer = stockpot("inspect", pool)
    assert answer.code == 0
    assert "no kin: model_9, farther from every other ingredient than from zero" in answer.out
    assert json.loads(stockpot("inspect", pool, "--json").out)["strangers"] == ["model_9"]


def test_inspect_names_copies_that_were_only_rounded(folder: Path, stockpot: Stockpot) -> None:
    pool = folder / "pool"
    assert json.loads(stockpot("inspect", pool, "--json").out)["near"] == []
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(pool / "model_1.safetensors").items()}
    save_file(rounded, pool / "model_9.safetensors")
    answer = stockpot("inspect", pool)
    assert "nearly the same: model_1 and model_9; what they have in common counts twice" in answer.out


def test_a_class_order_that_nobody_gave_is_said_on_the_way(folder: Path, stockpot: Stockpot) -> None:
    rows = [f"{','.join(str((7 * k + j) % 5 - 2) for j in range(6))},{'abc'[k % 3]}" for k in range(60)]
    (folder / "t.csv").write_text("\n".join(["f0,f1,f2,f3,f4,f5,label", *rows]))
    data = "{table: t.csv, features: [f0, f1, f2, f3, f4, f5], label: label, fit: 0.5, report: 0.5}"
    recipe = folder / "table.yaml"
    recipe.write_text(
        'pool: {path: pool}\nmodel: {python: "toy:model"}\n'
        f"data: {data}\nmethod: {{name: uniform}}\noutput: {{dir: table}}\n"
    )
    answer = stockpot("cook", recipe)
    assert answer.code == 0, answer.err
    assert "classes in alphabetical order: a = 0, b = 1, c = 2 (" in answer.err
    given = stockpot("cook", recipe, "--set", "data.classes=[c, a, b]", "--out", folder / "given")
    assert given.code == 0, given.err
    assert "classes in" not in given.err


def test_inspect_of_a_pool_that_cannot_be_used_is_exit_code_1(folder: Path, stockpot: Stockpot) -> None:
    broken = load_file(folder / "pool" / "model_2.safetensors")
    broken["0.bias"][1] = float("nan")
    save_file(broken, folder / "pool" / "model_2.safetensors")
    answer = stockpot("inspect", folder / "pool")
    assert answer.code == 1
    assert "problem:" in answer.out
    assert "0.bias (1 NaN of 8)" in answer.out
    assert "outlier: model_2 is not finite" in answer.out
    assert "not finite" in answer.out
    recipe = folder / "recipe.yaml"
    assert stockpot("inspect", recipe).code == 1
    dropped = stockpot("inspect", recipe, "--set", "pool.nonfinite=drop")  # as the recipe would have it
    assert dropped.code == 0
    assert "3 ingredients" in dropped.out
    assert "left out: model_2, not finite, as the recipe says (pool.nonfinite: drop)" in dropped.out
    assert "problem:" not in dropped.out
    assert stockpot("inspect", recipe, "--set", "pool.nonfinite=ignore").code == 0
    del broken["0.weight"]
    save_file(broken, folder / "pool" / "model_2.safetensors")
    answer = stockpot("inspect", folder / "pool")
    assert answer.code == 1
    assert "0.weight" in answer.err
    assert "Traceback" not in answer.err


@pytest.mark.parametrize(
    ("budget", "found"), [("much", "'much'"), ("0GB", "'0GB'"), ("1", "1 byte."), ("24", "24 bytes")]
)
def test_inspect_refuses_a_budget_that_is_none(folder: Path, stockpot: Stockpot, budget: str, found: str) -> None:
    answer = stockpot("inspect", folder / "pool", "--budget", budget)
    assert answer.code == 1
    assert f"found {found}" in answer.err
    assert "Fix:" in answer.err


def test_schema_and_doctor_speak_json(stockpot: Stockpot) -> None:
    schema = json.loads(stockpot("schema").out)
    assert {"pool", "model", "data", "method", "finetune", "output"} <= set(schema["properties"])
    value = json.loads(stockpot("doctor", "--json").out)
    assert value["torch"]
    assert value["extras"]["cli"]["typer"]
    text = stockpot("doctor").out
    assert "stockpot" in text.splitlines()[0]


def test_several_sets_are_columns_and_evaluate_scores_each(folder: Path, stockpot: Stockpot) -> None:
    text = (folder / "toy.py").read_text()
    assert "return x, " in text
    (folder / "toy.py").write_text(text.replace("def data(which):", "def one(which):") + """
def data(which):
    return {"test": one("report"), "shifted": one("fit")} if which == "report" else one(which)
""")  # fmt: skip
    answer = stockpot("compare", folder / "recipe.yaml", "--set", "method.methods=[best, uniform]")
    assert answer.code == 0, answer.err
    (head,) = [line.split() for line in answer.out.splitlines() if line.split()[:1] == ["method"]]
    assert head == ["method", "test", "vs.", "best", "single", "shifted", "vs.", "best", "single"]
    value = json.loads(stockpot("report", folder / "run", "--json").out)
    assert value["report"].endswith("report.html")
    model = folder / "pool" / "model_0.safetensors"
    said = stockpot("evaluate", model, folder / "recipe.yaml").out.splitlines()
    assert [line.split(" on ")[1].split(" (")[0] for line in said] == ["test", "shifted"]
    found = json.loads(stockpot("evaluate", model, folder / "recipe.yaml", "--json").out)
    assert list(found["sets"]) == ["test", "shifted"]
    assert found["score"] == found["sets"]["test"]

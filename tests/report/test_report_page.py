"""Claims: the page says what the run found, loads nothing, escapes everything, and is the same bytes every time."""

from __future__ import annotations

import json
import re
import shutil
import time
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from stockpot.report import write_report
from stockpot.report.reading import Run, changed_settings

from .records import edit, names, write_record

VOID = {"meta", "link", "br", "path", "use", "rect"}
NASTY = [
    "<script>alert(1)</script>",
    '" onmouseover="alert(1)" x="',
    "$\\frac{1}{2}$ and $x",
    "]]>&amp;<!-- ",
    "{{ 7 * 7 }}{% raw %}",
    "模型_#507010",
]


class Reader(HTMLParser):
    """Collects elements and text; fails on tags that do not match."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(folder: Path) -> Reader:
    return Reader((folder / "report.html").read_text("utf-8"))


def test_every_part_is_there(complete: Path) -> None:
    found = page(complete)
    charts = {a["id"] for tag, a in found.elements if tag == "figure"}
    expected = ["comparison", "weights", "curves"]
    assert charts == {f"chart-{name}" for name in expected}
    results = json.loads((complete / "results.json").read_text())
    for part in (
        *results["verdict"].split("\n"),
        "stockpot compare 'my recipe.yaml'",
        "zoo/*.safetensors",
        "The outlier is trial_05",
        "The guard kept the learned soup",
        "in greedy",
        "Glossary",
        "8.0 GiB",
        "22.7 million parameters",
        "Weights have a norm of",
    ):
        assert part in found.text, part
    for term in ("Soup", "Ingredient", "Held-out", "Extrapolated"):
        assert term in found.text


def test_a_real_run_has_its_charts(real: Path) -> None:
    charts = {a["id"].removeprefix("chart-") for tag, a in page(real).elements if tag == "figure"}
    assert charts == {"comparison", "weights", "curves"}


def test_every_chart_says_what_to_see(complete: Path) -> None:
    found = page(complete)
    pictures = [attributes for tag, attributes in found.elements if tag == "svg"]
    assert len(pictures) == 6  # each for a desktop and for a phone
    assert all(a["role"] == "img" and len(a["aria-label"]) > 20 for a in pictures)
    assert sum(tag == "figcaption" for tag, _ in found.elements) == 3


def test_the_page_loads_nothing(complete: Path) -> None:
    source = (complete / "report.html").read_text("utf-8")
    found = page(complete)
    for tag, attributes in found.elements:
        for key in ("src", "href", "action", "data", "poster", "srcset"):
            if key in attributes:
                assert attributes[key].startswith(("#", "data:,")), (tag, attributes)
        assert tag not in ("iframe", "img", "object", "embed")
        assert not any(key.startswith("on") for key in attributes)
    assert not re.findall(r"(?i)https?:|@import|url\((?!#)", source)
    policy = next(a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    # One script runs, ours, as the policy has it by its digest; the other is numbers.
    script = (files("stockpot.report") / "templates/report.js").read_text()
    assert f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" in policy
    kinds = [attributes.get("type") for tag, attributes in found.elements if tag == "script"]
    assert kinds == ["application/json", None]
    assert source.count(f"<script>{script}</script>") == 1
    assert len(source) < 1_000_000


def test_ids_are_unique_and_references_resolve(complete: Path) -> None:
    found = page(complete)
    ids = [a["id"] for _, a in found.elements if "id" in a]
    assert len(ids) == len(set(ids))
    used = {
        name
        for _, attributes in found.elements
        for key, value in attributes.items()
        if key in ("href", "clip-path", "style")
        for name in re.findall(r"^#([\w.-]+)$|url\(#([\w.-]+)\)", value)
        for name in name
        if name
    }
    assert used
    assert used <= set(ids)


def test_colours_follow_the_page_in_light_and_dark(complete: Path) -> None:
    source = (complete / "report.html").read_text("utf-8")
    css = source[source.index("<style>") : source.index("</style>")]
    light, dark = css.split("prefers-color-scheme: dark")
    used = set(re.findall(r"var\(--([\w-]+)\)", source))
    for theme in (light, dark.split("* {")[0]):
        assert used <= set(re.findall(r"--([\w-]+):", theme))
    body = source[source.index("<body>") :]
    assert not re.findall(r"#[0-9a-f]{6}\b", body), "a chart brings a colour of its own"


def test_the_same_run_gives_the_same_bytes(complete: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(complete, tmp_path / "complete")
    (copy / "report.html").unlink()
    write_report(copy)
    for name in ("report.html", "report.md"):
        assert (copy / name).read_bytes() == (complete / name).read_bytes()


def test_names_are_text_whatever_they_hold(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", ingredients=NASTY, methods=["best", "greedy", "crossfit"])
    edit(folder / "run.json", title=NASTY[0], command=NASTY)
    edit(folder / "results.json", verdict=NASTY[1])
    write_report(folder)
    found = page(folder)
    assert sum(tag == "script" for tag, _ in found.elements) == 2
    told = re.findall(r"<script type=.*?</script>", (folder / "report.html").read_text("utf-8"))
    assert len(told) == 1
    assert set(json.loads(told[0].partition(">")[2].removesuffix("</script>"))["rows"]) == set(NASTY)
    assert not any(key.startswith("on") for _, attributes in found.elements for key in attributes)
    for name in NASTY:
        assert " ".join(name.split()) in found.text
    prose = re.sub(r"(?s)```.*?```", "", (folder / "report.md").read_text("utf-8"))
    assert NASTY[0] not in prose
    assert r"\<script\>" in prose


@pytest.mark.parametrize("name", ["nul\x00", "escape\x1b[31m", "surrogate\ud800", "\uffff"])
def test_letters_no_page_can_carry_do_not_stop_it(tmp_path: Path, name: str) -> None:
    folder = write_record(tmp_path / "run", ingredients=["plain", name, "third"], methods=["best", "greedy"])
    write_report(folder)
    assert "\ufffd" in page(folder).text


@pytest.mark.parametrize(
    ("options", "there", "gone"),
    [
        ({"methods": ["ensemble"]}, [], ["comparison", "weights", "curves"]),
        ({"methods": ["crossfit"], "kind": "cook"}, ["weights", "curves"], ["comparison"]),
        ({"methods": ["best"]}, [], ["comparison", "weights"]),
        ({"models": 2, "groups": 2}, ["weights", "comparison"], []),
        (
            {"nan_losses": True, "sets": (), "metric": "loss", "methods": ["best", "mehl+", "crossfit"]},
            ["curves", "comparison"],
            [],
        ),
        (
            {"models": 72, "groups": 500, "ingredients": names(72, 80), "methods": ["best", "mehl+", "crossfit"]},
            ["weights", "comparison"],
            [],
        ),
    ],
    ids=["ensemble", "cook", "best", "two", "nan", "large"],
)
def test_missing_and_extreme_parts(
    tmp_path: Path, options: dict[str, object], there: list[str], gone: list[str]
) -> None:
    folder = write_record(tmp_path / "run", **options)  # type: ignore[arg-type]
    path = write_report(folder)
    charts = {a["id"].removeprefix("chart-") for tag, a in page(folder).elements if tag == "figure"}
    assert charts >= set(there)
    assert not charts & set(gone)
    assert "nan" not in page(folder).text.lower().split()
    assert path.stat().st_size < 2**21


def test_a_report_of_five_hundred_ingredients_stays_small_and_quick(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", models=500, groups=200, ingredients=names(500, 60))
    began = time.perf_counter()
    path = write_report(folder)
    assert path.stat().st_size < 3 * 2**20
    assert time.perf_counter() - began < 30  # a third of that on an idle machine
    text = page(folder).text
    assert "Shown are the 72 ingredients with the largest weights, of 500." in text


def test_nothing_but_run_json_is_enough(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run")
    for name in ("pool.json", "results.json", "recipe.yaml"):
        (folder / name).unlink()
    shutil.rmtree(folder / "methods")
    edit(folder / "run.json", status="interrupted")
    write_report(folder)
    text = page(folder).text
    assert "This run was interrupted: the report shows what is there so far." in text
    assert "No method has finished yet." in text
    assert "Nothing has been scored yet." in text


def test_an_interrupted_run_names_the_best_so_far(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best", "uniform"], sets=())
    (folder / "results.json").unlink()
    edit(folder / "run.json", status="running")
    write_report(folder)
    text = page(folder).text
    assert "So far uniform scores highest" in text
    assert "on the fitting data" in text
    assert "They flatter the methods that learn" in text


def test_the_guards_fallback_and_failed_methods_are_said(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", guard_winner="greedy", methods=["best", "crossfit"])
    edit(folder / "results.json", failed={"hl+": "loss at block 1: expected a finite number"})
    write_report(folder)
    text = page(folder).text
    assert "The guard stepped in: greedy did better on held-out data than chance explains" in text
    assert "hl+ could not be cooked: loss at block 1" in text


def test_where_a_single_model_is_better_the_report_says_where_it_is(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best", "crossfit"])
    (best,) = (method for method in Run(folder).methods if method.name == "best")
    assert best.W is not None
    one = json.loads((folder / "pool.json").read_text())["ingredients"][int(best.W[:, 0].argmax())]
    said = f"{one['name']}, the best single model, is {one['path']}"
    for verdict, there in ((f"No gain beyond chance: keep {one['name']}.\nWhy.", True), ("Use it: more.\nWhy.", False)):
        edit(folder / "results.json", verdict=verdict)
        write_report(folder)
        text = page(folder).text
        assert (said in text.replace(" .", "")) == there
        assert ("the best single model, is" in (folder / "report.md").read_text()) == there


def test_the_share_of_extrapolated_weights_is_stated(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    folder = write_record(tmp_path / "run", models=2, groups=4, methods=["best", "learned+", "crossfit"])
    file = folder / "methods" / "crossfit" / "weights.safetensors"
    W = np.array([[1.5, 1.0, 0.5, 0.2], [-0.5, 0.0, 0.5, 0.8]])
    save_file({**load_file(file), "W": W}, file)
    write_report(folder)
    text = page(folder).text
    assert "25 % of the 8 weights are extrapolated (below 0 or above 1)" in text


def test_markdown_has_the_verdict_and_the_table(complete: Path) -> None:
    lines = (complete / "report.md").read_text("utf-8").splitlines()
    results = json.loads((complete / "results.json").read_text())
    decision, why = results["verdict"].split("\n")
    assert lines[0] == f"# {decision}"
    assert why in lines
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 2 + len(results["methods"])
    assert {line.replace("\\|", "").count("|") for line in table} == {8}
    assert [line for line in table if line.startswith("| **crossfit** |")]
    assert not [line for line in lines if "![" in line or "http" in line]


def test_markdown_names_cannot_break_the_table(tmp_path: Path) -> None:
    from stockpot.words import escaped

    assert escaped("a|b\n<c> `d` *e* [f](g)") == r"a\|b \<c\> \`d\` \*e\* \[f\](g)"


def test_templates_are_part_of_the_package() -> None:
    from importlib.resources import files

    folder = files("stockpot.report") / "templates"
    assert {file.name for file in folder.iterdir()} >= {"report.html.j2", "report.css"}


def test_every_set_has_its_column_and_panel_and_the_soup_its_place(tmp_path: Path) -> None:
    folder = write_record(tmp_path / "run", methods=["best", "uniform", "crossfit"], sets=("test", "shifted"))
    edit(folder / "results.json", absent={"ensemble": "exact_match calls the model itself"})
    (folder / "methods" / "crossfit" / "soup").mkdir()
    (folder / "methods" / "crossfit" / "soup" / "model.safetensors").touch()
    write_report(folder)
    found = page(folder)
    for part in ("on test", "on shifted", "the verdict goes by the first set", "methods/crossfit/soup", "load_file("):
        assert part in found.text, part
    assert "not in the table: exact_match calls the model itself" in found.text
    header = next(line for line in (folder / "report.md").read_text("utf-8").splitlines() if line.startswith("|"))
    assert header.count("95 % interval") == header.count("vs. best single model") == 2
    assert "| test |" in header
    assert "| shifted |" in header
    tones = [a.get("class") for tag, a in found.elements if tag == "span" and a.get("class") in ("good", "bad")]
    assert {"good", "bad"} == set(tones)


def test_settings_are_shown_where_they_are_not_the_default(real: Path) -> None:
    assert changed_settings(Run(real)) == [("steps", "8"), ("batch_size", "16")]  # of all methods
    text = page(real).text
    assert "Settings that are not the default steps 8 batch_size 16" in text
    about = json.loads((real / "run.json").read_text())
    about["settings"]["mehl+"]["lr"] = 0.5
    run = Run(real)
    run.about = about
    assert changed_settings(run)[-1] == ("lr of mehl+", "0.5")

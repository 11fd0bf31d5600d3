"""Tasks of lm-evaluation-harness as report data, with the real library, task files written here and a small Llama."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from functools import partialmethod
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from stockpot import Pool, Task, compare, cook
from stockpot.adapters.lm_eval import lm_eval_tasks
from stockpot.cli.app import app
from stockpot.errors import RecipeError, StockpotError, TaskError
from stockpot.events import Event
from stockpot.recipe import make_recipe
from stockpot.recipe.build import build_pool, build_task, cook_arguments
from words import TEXTS, tokenizer

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra lm-eval")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{options}}}}"
doc_to_target: "{{{{answer}}}}"
"""
WRITTEN = """
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
num_fewshot: 1
output_type: generate_until
generation_kwargs: {{until: ["."], max_gen_toks: 4}}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{options[0]}}}}"
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
  - {{metric: bleu, aggregation: bleu, higher_is_better: true}}
"""
TEXT = """
task: text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: bits_per_byte}}
"""
WRONG_ANSWERS = """
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: false}
"""
GROUP = """
group: both
task: [sky, sea]
aggregate_metric_list: [{{metric: acc, aggregation: mean, weight_by_size: {weighted}}}]
"""


class WITH:
    defaults = False


def _with_own_tasks_only(manager: Any, real: Any, **how: Any) -> None:
    real(manager, **{"include_defaults": WITH.defaults, **how})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three models that were not trained, task files, and nothing from the network."""
    import datasets
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("lm-eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for config in (datasets.config, huggingface_hub.constants):
            patch.setattr(config, "HF_HUB_OFFLINE", True)
        # The harness reads ten thousand files of its own tasks before each answer; one test lets it.
        patch.setattr(TaskManager, "__init__", partialmethod(_with_own_tasks_only, TaskManager.__init__))
        for number in range(3):
            torch.manual_seed(number)
            llama_of(vocab_size=320).save_pretrained(folder / "models" / f"run_{number}")
            tokenizer(folder / "models" / f"run_{number}")
        (folder / "tasks").mkdir()
        draw = random.Random(0)
        for name, count in (("sky", 24), ("sea", 7)):
            rows = []
            for _ in range(count):
                options = [f" {word}" for word in draw.sample(TEXTS[0].split(), 2)]
                rows.append({"question": draw.choice(TEXTS)[:20], "options": options, "answer": draw.randrange(2)})
            data = folder / f"{name}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "tasks" / f"{name}.yaml").write_text(CHOICE.format(name=name, data=data))
        data = folder / "sea.jsonl"
        for name, text in (("written", WRITTEN), ("text", TEXT)):
            (folder / "tasks" / f"{name}.yaml").write_text(text.format(data=data))
        wrong = CHOICE.format(name="wrong", data=folder / "sky.jsonl") + WRONG_ANSWERS
        (folder / "tasks" / "wrong.yaml").write_text(wrong)
        (folder / "tasks" / "both.yaml").write_text(GROUP.format(weighted="true"))
        yield folder


@pytest.fixture(scope="module")
def words(home: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(home / "models" / "run_0")


def llama_of(**given: Any) -> Any:
    build: Any = transformers.LlamaForCausalLM
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return build(transformers.LlamaConfig(**sizes, max_position_embeddings=64, **given))


def llama(folder: Path) -> Any:
    load: Any = transformers.LlamaForCausalLM
    return load.from_pretrained(folder)


def sets(home: Path, words: Any, *tasks: str, **how: Any) -> dict[str, Any]:
    return dict(lm_eval_tasks(tasks, words, include_path=home / "tasks", **how))


def task_of(home: Path, words: Any, report: Mapping[str, Any]) -> Task:
    ids = words(TEXTS[0])["input_ids"][:16]
    fit = {"input_ids": torch.tensor([ids] * 4), "labels": torch.tensor([ids] * 4)}
    return Task(llama(home / "models" / "run_0"), fit, report, metric="nats_per_token")


def asked_by_the_harness(home: Path, model: Path, *tasks: str, **how: Any) -> Any:
    """What lm_eval itself says of a model on disk."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(home / "tasks"), include_defaults=False)
    model_ = HFLM(pretrained=str(model), device="cpu", batch_size=8, dtype="float32")
    return simple_evaluate(model_, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **how)


def test_soups_are_scored_live_as_the_harness_scores_them_from_disk(home: Path, words: Any, tmp_path: Path) -> None:
    pool = Pool.open(home / "models")
    report = sets(home, words, "sky", "both:acc", "sea:acc_norm", "written", "text:bits_per_byte")
    found = compare(pool, task_of(home, words, report), ["best", "uniform", "ensemble"], run=tmp_path / "run")
    assert "ensemble" not in found
    assert found.absent["ensemble"] == "report data 'sky', which calls the model itself"
    uniform = found["uniform"]
    assert uniform.soup is not None
    uniform.soup.save(tmp_path / "soup")
    theirs = asked_by_the_harness(home, tmp_path / "soup", "both", "written", "text")["results"]
    known = {
        "sky": theirs["sky"]["acc,none"], "both": theirs["both"]["acc,none"], "sea": theirs["sea"]["acc_norm,none"],
        "written": theirs["written"]["exact_match,none"], "text": -theirs["text"]["bits_per_byte,none"],
    }  # fmt: skip
    assert {name: scores.value for name, scores in uniform.reports.items()} == pytest.approx(known)
    assert {name: scores.n for name, scores in uniform.reports.items()} == {
        "sky": 24, "both": 31, "sea": 7, "written": 7, "text": 7
    }  # fmt: skip


def test_less_may_be_better(home: Path, words: Any) -> None:
    model = llama(home / "models" / "run_0")
    right, wrong = (sets(home, words, name)[name] for name in ("sky", "wrong"))
    assert (right.metric.name, wrong.metric.name) == ("acc", "negative_acc")
    assert torch.equal(wrong.table(model, None, lambda _: None), -right.table(model, None, lambda _: None))


def test_the_task_s_autocast_reaches_the_harness(home: Path, words: Any) -> None:
    model = llama(home / "models" / "run_0")
    text = sets(home, words, "text:bits_per_byte")["text"]
    single, half = (text.table(model, dtype, lambda _: None) for dtype in (None, torch.bfloat16))
    assert not torch.equal(single, half)
    assert torch.allclose(single, half, rtol=0.02)


def test_questions_are_paired_and_a_run_goes_on_with_them(home: Path, words: Any, tmp_path: Path) -> None:
    pool = Pool.open(home / "models")

    def once() -> Any:
        report = sets(home, words, "sky:acc_norm", "text:word_perplexity")
        return compare(pool, task_of(home, words, report), ["best", "uniform"], run=tmp_path / "run")

    first, again = once(), once()
    assert again.reused == ("best", "uniform")
    for name, scores in first["uniform"].reports.items():
        base, read = first["best"].reports[name], again["uniform"].reports[name]
        change = next(row for row in first.rows() if row.method == "uniform").sets[name].difference
        assert change == pytest.approx(scores.difference(base))
        assert torch.equal(read.table, scores.table)
        assert (read.value, read.interval()) == (scores.value, scores.interval())
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["report_metrics"] == {
        "sky": {"metric": "acc_norm", "unit": "%"}, "text": {"metric": "negative_word_perplexity", "unit": ""}
    }  # fmt: skip
    page = first.report().read_text()
    assert "sky, acc norm<small>" in page
    assert "text, negative word perplexity<small>" in page


def test_other_questions_or_another_metric_are_another_run(home: Path, words: Any) -> None:
    digests = [
        sets(home, words, *("sky", *rest), **how)["sky"].fingerprint()
        for rest, how in (((), {}), ((), {}), (("sea",), {}), ((), {"limit": 3}), ((), {"num_fewshot": 0}))
    ]
    digests.append(sets(home, words, "sky:acc_norm")["sky"].fingerprint())
    assert len(set(digests[:3])) == 1
    assert len(set(digests)) == 3  # num_fewshot is 0 anyway


def test_every_model_gets_the_same_examples(home: Path, words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval import evaluator

    prompts, real = [], evaluator.evaluate

    def kept(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        prompts.append([one["arguments"] for one in found["samples"]["written"]])
        return found

    monkeypatch.setattr(evaluator, "evaluate", kept)
    benchmark = sets(home, words, "written", num_fewshot=2, limit=3)["written"]
    model = llama(home / "models" / "run_0")
    tables = [benchmark.table(model, None, lambda _: None) for _ in range(2)]
    assert len(prompts[0]) == len(tables[0]) == len(benchmark) == 3
    assert prompts[0] == prompts[1]
    assert prompts[0] != asked_by_the_harness(home, home / "models" / "run_0", "written", limit=3)["samples"]["written"]


def test_what_is_cut_off_is_said_and_random_numbers_go_on_as_before(home: Path, words: Any) -> None:
    events: list[Event] = []
    task = task_of(home, words, sets(home, words, "sky", num_fewshot=8))
    (sky,) = task._sealed.open(["x"]).values()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.random(), np.random.rand(), torch.rand(1)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    task.score_report(sky, events.append)
    assert (random.random(), np.random.rand(), torch.rand(1)) == before
    said = [event.data["text"] for event in events if event.kind == "phase"]
    assert said == ["sky: 48 questions are longer than the model's context, and lost their beginning"]
    assert [event.data["done"] for event in events if event.kind == "progress"][-1] == 48


DATA = {"table": "texts.jsonl", "text": "text", "fit": 4}
RECIPE: dict[str, Any] = {
    "pool": {"path": "models"},
    "model": {"transformers": "models/run_0"},
    "data": DATA,
    "method": {"name": "uniform"},
    "output": {"dir": "run"},
}


def recipe(home: Path, **data: Any) -> Any:
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return make_recipe({**RECIPE, "data": {**DATA, **data}}, home)


def test_a_recipe_names_tasks_among_its_sets_and_alone(home: Path, words: Any, tmp_path: Path) -> None:
    tasks = {"tasks": ["sky:acc_norm", "sea"], "python": "tasks", "limit": 5}
    made = recipe(home, report={"lm_eval": tasks, "rest": 3})
    task = build_task(made)
    assert task.report_names == ["sky", "sea", "rest"]
    found = cook(build_pool(made), task, **{**cook_arguments(made), "run": tmp_path / "run"})
    assert [scores.n for scores in found.reports.values()] == [5, 5, 3]
    alone = sets(home, words, "sky:acc_norm", limit=5)["sky"].table(task.model, None, lambda _: None)
    assert torch.equal(found.reports["sky"].table, alone)
    file = home / "recipe.yaml"
    file.write_text(json.dumps({**RECIPE, "data": {**DATA, "report": {"lm_eval": tasks, "rest": 3}}}))
    done = CliRunner().invoke(app, ["evaluate", str(home / "models" / "run_1"), str(file), "--json"])
    assert json.loads(done.stdout)["metrics"] == {"sky": "acc_norm", "sea": "acc", "rest": "nats_per_token"}
    said = CliRunner().invoke(app, ["evaluate", str(home / "models" / "run_1"), str(file)]).stdout.splitlines()
    assert said[0].startswith("acc norm ")
    assert said[0].endswith("n = 5)")
    assert ", loss " in said[2]
    assert build_task(recipe(home, report={"lm_eval": {"tasks": "sea", "python": "tasks"}})).report_names == ["sea"]


def other(home: Path, name: str, text: str, **options: Any) -> Callable[[Any], Any]:
    """A task file of its own."""

    def call(words: Any) -> Any:
        folder = home / name
        folder.mkdir(exist_ok=True)
        for file in ("sky", "sea"):
            (folder / f"{file}.yaml").write_text((home / "tasks" / f"{file}.yaml").read_text())
        (folder / "own.yaml").write_text(text)
        return lm_eval_tasks("both" if "group:" in text else "own", words, include_path=folder, **options)

    return call


def refusals(home: Path) -> dict[str, tuple[Callable[[Any], Any], str]]:
    own = CHOICE.format(name="own", data=home / "sky.jsonl")
    hub = own.replace("dataset_path: json", "dataset_path: someone/questions").replace("dataset_kwargs", "metadata")
    return {
        "nothing": (lambda words: lm_eval_tasks([], words), r"expected names of tasks, found \[\]"),
        "no tokenizer": (lambda words: sets(home, "folder", "sky"), "expected a tokenizer of transformers, found str"),
        "no folder": (lambda words: lm_eval_tasks("a", words, include_path=home / "gone"), "expected a folder"),
        "twice": (lambda words: sets(home, words, "sky", "sky:acc_norm"), "'sky': expected each task once"),
        "metric": (lambda words: sets(home, words, "sky:f1"), "a metric of the task: acc, acc_norm, found 'f1'"),
        "filter": (lambda words: sets(home, words, "sky:acc,strict"), "a filter of the task: none, found 'strict'"),
        "bleu": (lambda words: sets(home, words, "written:bleu"), r"found bleu \(bleu\)"),
        "broken": (other(home, "broken", own + "output_type: spoken"), "a task that loads, found ValueE"),
        "network": (other(home, "hub", hub), "on the Hub or in the cache, found .*someone/questions"),
        "uneven": (other(home, "uneven", GROUP.format(weighted="false")), "the mean over all its questions, found the"),
        "code": (other(home, "code", own + "unsafe_code: true"), "found a task that runs what the model wrote"),
        "other tokens": (
            lambda words: sets(home, words, "sky")["sky"].check(llama_of(vocab_size=9), None),
            "task 'sky': expected answers to its questions, found IndexError",
        ),
        "no language model": (
            lambda words: Task(torch.nn.Linear(2, 2), (torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])),
                               sets(home, words, "sky")),
            "expected a language model of transformers, causal or sequence-to-sequence, found Linear",
        ),
    }  # fmt: skip


CASES = ("nothing", "no tokenizer", "no folder", "twice", "metric", "filter", "bleu", "broken", "network", "uneven",
         "code", "other tokens", "no language model")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_asked_is_refused_at_the_start(case: str, home: Path, words: Any) -> None:
    call, text = refusals(home)[case]
    with pytest.raises(TaskError, match=f"(?s)lm_eval.*{text}.*Fix: "):
        call(words)


def test_a_task_of_the_library_says_what_is_missing_without_a_network(
    home: Path, words: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WITH, "defaults", True)
    with pytest.raises(TaskError, match=r"(?s)'arc_easy': expected its questions, .* found .*allenai/ai2_arc.*HF_HOME"):
        lm_eval_tasks(["arc_easy"], words)


def test_an_unknown_task_is_told_its_neighbours(home: Path, words: Any) -> None:
    with pytest.raises(TaskError, match=r"(?s)lm_eval task 'skye': expected a task or group that lm_eval .* try sky;"):
        sets(home, words, "skye")


def test_without_the_library_the_extra_is_named(words: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(TaskError, match=r"library lm_eval: .*found none\.\n? *Fix: pip install 'stockpot\[lm-eval\]'"):
        lm_eval_tasks("arc_easy", words)


WRONG: dict[str, tuple[dict[str, Any], type[StockpotError], str]] = {
    "no tasks": ({"lm_eval": {"limit": 5}}, RecipeError, "data.report.lm_eval.tasks: required, but not there"),
    "misspelt": ({"lm_eval": {"tasks": ["sky"], "limt": 5}}, RecipeError, "report.lm_eval.limt: .*did you mean limit"),
    "another place": ({"x": {"tasks": ["sky"]}, "rest": 3}, RecipeError, "report.x.tasks: unknown key"),
    "two of a name": ({"sky": 3, "lm_eval": {"tasks": "sky", "python": "tasks"}}, RecipeError, "found sky twice"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_recipe_that_names_them_wrongly_is_refused(case: str, home: Path) -> None:
    report, kind, text = WRONG[case]
    with pytest.raises(kind, match=f"(?s){text}"):
        build_task(recipe(home, report=report))

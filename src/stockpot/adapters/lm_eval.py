"""Tasks of lm-evaluation-harness as sets of report data, asked of the live model: no model is written to disk for it.

The harness itself builds the questions, asks and judges; what it found for each question is kept, so that intervals
and differences are paired question by question as on any other data.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stockpot.adapters.code import bad_model, need, said, silent
from stockpot.events import Event, Listener, ignore, progress
from stockpot.task.metric import Benchmark, Metric

BATCH = 8  # questions asked together; a task's batch size for learning has nothing to do with it
_SEED = 1234  # the harness's own, from which it draws examples
_TRIED = 2  # questions asked before anything long
# How the harness makes one number of what it found, where that is numbers for each question.
_REDUCTIONS = ("mean", "perplexity", "weighted_perplexity", "bits_per_byte", "f1", "matthews_corrcoef")


def lm_eval_tasks(
    tasks: str | Iterable[str],
    tokenizer: Any,
    *,
    include_path: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int = BATCH,
    chat_template: bool = False,
) -> dict[str, Benchmark]:
    """Sets of report data by name, for `Task(model, fit, report)`; needs `stockpot[lm-eval]`.

    A task is a name that lm_eval knows, such as `arc_easy`, or one with a metric (and filter), such as
    `arc_easy:acc_norm` or `gsm8k:exact_match,flexible-extract`; the first metric is the default. A group, such as
    `mmlu`, is one set of all its questions. `include_path` is a folder of task files of your own, which may run code;
    `limit` takes the first questions of each task only.
    """
    given = [tasks] if isinstance(tasks, str) else list(tasks)
    if not given or not all(isinstance(one, str) and one for one in given):
        raise bad_model("lm_eval tasks", "names of tasks", repr(tasks), 'write lm_eval_tasks(["arc_easy"], tokenizer)')
    need("lm_eval")
    need("lm_eval.models.huggingface")  # with what it needs
    if not hasattr(tokenizer, "convert_tokens_to_ids"):
        fix = 'give the tokenizer itself, AutoTokenizer.from_pretrained("folder")'
        raise bad_model("lm_eval tokenizer", "a tokenizer of transformers", type(tokenizer).__name__, fix)
    how = _How(copy.deepcopy(tokenizer), num_fewshot, limit, batch_size, chat_template)  # it gets a token for padding
    with silent(), _quiet():
        manager = _manager(given, None if include_path is None else Path(include_path))
        found: dict[str, Benchmark] = {}
        for spec in given:
            name, wanted = _split(spec, manager)
            if name in found:
                raise bad_model(f"lm_eval task {name!r}", "each task once", "it twice", "leave one out")
            found[name] = _opened(name, wanted, manager, how)
    return found


@dataclass(frozen=True)
class _How:
    """How questions are asked."""

    tokenizer: Any
    num_fewshot: int | None
    limit: int | None
    batch_size: int
    chat_template: bool


@dataclass(frozen=True, eq=False)
class LmEvalTask(Benchmark):
    """One task, or the tasks of a group."""

    name: str
    metric: Metric
    key: str  # the metric's name there
    filtered: str  # how answers are read before they are judged
    tasks: Mapping[str, Any]
    how: _How
    size: int
    digest: str

    def __len__(self) -> int:
        return self.size

    def fingerprint(self) -> str:
        return self.digest

    def check(self, model: nn.Module, autocast: torch.dtype | None) -> None:
        can = getattr(model, "can_generate", None)
        if not callable(can) or not can():
            fix = "give a model such as AutoModelForCausalLM makes, or leave the task out"
            expected = "a language model of transformers, causal or sequence-to-sequence"
            raise bad_model(f"lm_eval task {self.name!r}", expected, type(model).__name__, fix)
        self._asked(model, autocast, min(_TRIED, self.how.limit or _TRIED), ignore)

    def table(self, model: nn.Module, autocast: torch.dtype | None, listen: Listener) -> Tensor:
        found = self._asked(model, autocast, self.how.limit, listen)
        if len(found) != self.size:
            fix = "tasks whose questions are not always the same cannot be compared; leave it out"
            raise bad_model(f"lm_eval task {self.name!r}", f"{self.size} questions", str(len(found)), fix)
        return found

    def _asked(self, model: nn.Module, autocast: torch.dtype | None, limit: int | None, listen: Listener) -> Tensor:
        evaluator = need("lm_eval.evaluator")

        def tell(done: int, total: int) -> None:
            progress(listen, f"asking {self.name}", done, total, unit="questions")

        with silent(), _quiet():
            asked = _asks(model, self.how, autocast, tell)
            for task in self.tasks.values():
                task.set_fewshot_seed(_SEED)  # the same examples for every model
            try:
                found = evaluator.evaluate(
                    asked, {"tasks": dict(self.tasks), "groups": {}}, limit=limit, bootstrap_iters=0, log_samples=True,
                    apply_chat_template=self.how.chat_template, fewshot_as_multiturn=self.how.chat_template,
                )["samples"]  # fmt: skip
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # code of the harness, of a task file and of the model
                fix = f"see whether `lm_eval --tasks {self.name}` alone can ask this model, or leave the task out"
                raise bad_model(f"lm_eval task {self.name!r}", "answers to its questions", said(error), fix) from error
        if asked.cut and len(found):
            text = f"{self.name}: {asked.cut} questions are longer than the model's context, and lost their beginning"
            listen(Event("phase", {"text": text}))
        every = (one for name in self.tasks for one in sorted(found[name], key=lambda one: int(one["doc_id"])))
        rows = [self._numbers(one.get(self.key)) for one in every if one["filter"] == self.filtered]
        table = torch.tensor(rows, dtype=torch.float64)
        return -table if self.metric.is_mean and self.metric.name != self.key else table

    def _numbers(self, value: Any) -> list[float]:
        try:
            return [float(each) for each in (value if isinstance(value, (tuple, list)) else [value])]
        except (TypeError, ValueError):
            what, fix = f"{self.key} of lm_eval task {self.name!r}", "name another metric of it, TASK:METRIC"
            raise bad_model(what, "numbers for each question", repr(value)[:60], fix) from None


# What the harness knows ----------------------------------------------------------------------------------


def _manager(given: list[str], folder: Path | None) -> Any:
    """Its list of tasks, some ten thousand files; only those of a folder where they are all that is asked for."""
    library = need("lm_eval.tasks")
    if folder is None:
        return library.TaskManager()
    if not folder.is_dir():
        fix = "name the folder with your task files"
        raise bad_model(f"lm_eval task folder {folder}", "a folder", "none at this path", fix)
    own = library.TaskManager(include_path=str(folder), include_defaults=False)
    alone = all(spec in own.all_subtasks or spec.rpartition(":")[0] in own.all_subtasks for spec in given)
    return own if alone else library.TaskManager(include_path=str(folder))


def _split(spec: str, manager: Any) -> tuple[str, str]:
    """The task's name, and the metric that is wanted of it or nothing."""
    known = manager.all_tasks
    name, _, wanted = (spec, "", "") if spec in known else spec.rpartition(":")
    if name in known:
        return name, wanted
    close = difflib.get_close_matches(name or spec, known, n=3)
    fix = f"try {', '.join(close)}" if close else "`lm-eval ls tasks` lists all"
    fix += "; files of your own are found in the folder that is named for them"
    expected = f"a task or group that lm_eval {need('lm_eval').__version__} knows"
    raise bad_model(f"lm_eval task {spec!r}", expected, "an unknown name", fix)


def _opened(name: str, wanted: str, manager: Any, how: _How) -> LmEvalTask:
    """A task with its questions."""
    what = f"lm_eval task {name!r}"
    try:
        loaded = manager.load([name])
        tasks = dict(sorted(loaded["tasks"].items()))
        questions = {key: list(task.eval_docs) for key, task in tasks.items()}
    except OSError as error:  # also what network and Hub have
        fix = (
            "open it once where there is a network, with the same HF_HOME: what was loaded is found again; or write a"
            " task file with local data"
        )
        raise bad_model(what, "its questions, on the Hub or in the cache", said(error), fix) from error
    except Exception as error:
        raise bad_model(what, "a task that loads", said(error), "see to its task file") from error
    for task in tasks.values():
        if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
            code = "a task that runs what the model wrote" if getattr(task, "UNSAFE_CODE", False) else "images or sound"
            fix = "save the soup, and ask it with lm_eval itself"
            raise bad_model(what, "questions and answers in words", code, fix)
        own = task.get_config("num_fewshot")
        task.set_config("num_fewshot", own or 0 if how.num_fewshot is None or own == 0 else how.num_fewshot)
    metric, key, filtered = _metric(what, wanted, tasks, loaded["groups"])
    content = [need("lm_eval").__version__, metric.name, filtered, how.limit, how.chat_template, *tasks]
    content += [part for key, task in tasks.items() for part in (task.dump_config(), questions[key][: how.limit])]
    digest = hashlib.sha256(json.dumps(content, default=_named, sort_keys=True).encode()).hexdigest()
    size = sum(len(each[: how.limit]) for each in questions.values())
    return LmEvalTask(name, metric, key, filtered, tasks, how, size, digest)


def _named(value: Any) -> str:
    """Functions and objects by name: where they lie in memory is another place every time."""
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _metric(what: str, wanted: str, tasks: Mapping[str, Any], groups: Mapping[str, Any]) -> tuple[Metric, str, str]:
    """The metric, its name there, and the filter: what was asked for, else the first."""
    first = next(iter(tasks.values()))
    names = [name for name in first.aggregation() if all(name in task.aggregation() for task in tasks.values())]
    filters = [str(one["name"]) for one in first.get_config("filter_list") or [{"name": "none"}]]
    key, _, filtered = wanted.partition(",")
    key, filtered = key or next(iter(names), ""), filtered or filters[0]
    for kind, one, known in (("metric", key, names), ("filter", filtered, filters)):
        if one not in known:
            fix = "write TASK:METRIC,FILTER with one of these, or leave them out for the first"
            raise bad_model(what, f"a {kind} of the task: {', '.join(known) or 'none'}", repr(one), fix)
    reduce, ways = first.aggregation()[key], need("lm_eval.api.registry").AGGREGATION_REGISTRY
    how = next((one for one in _REDUCTIONS if ways.get(one) is reduce), "")
    if not how:
        fix = f"name another metric, TASK:METRIC; the task has {', '.join(names)}"
        raise bad_model(what, f"a metric that is one of: {', '.join(_REDUCTIONS)}", f"{key} ({_named(reduce)})", fix)
    better = bool(first.higher_is_better().get(key, True))
    uneven = any(not one.weight_by_size for group in groups.values() for one in group.aggregate_metric_list or ())
    if len(tasks) > 1 and (how != "mean" or uneven):
        found = f"{how} of {len(tasks)} tasks" if how != "mean" else "the mean of its tasks' means"
        expected = "a group whose score is the mean over all its questions"
        raise bad_model(what, expected, found, f"name its tasks: {', '.join(list(tasks)[:3])}, ...")
    name = key if better else f"negative_{key}"  # higher is better everywhere
    if how == "mean":
        percent = better and key.startswith(("acc", "exact_match"))
        return Metric(name, _unused, is_mean=True, percent=percent), key, filtered

    def reduced(table: Tensor) -> float:
        rows = [tuple(row) if len(row) > 1 else row[0] for row in table.tolist()]
        return float(reduce(rows)) * (1 if better else -1)

    return Metric(name, _unused, reduced), key, filtered


def _unused(*_: Any) -> Tensor:
    raise AssertionError("lm_eval judges answers itself")


# Asking --------------------------------------------------------------------------------------------------


def _asks(model: nn.Module, how: _How, autocast: torch.dtype | None, tell: Any) -> Any:
    """The live model as the harness calls it."""
    library = need("lm_eval.models.huggingface")

    class Asks(library.HFLM):  # type: ignore[misc, name-defined]
        cut = done = total = 0

        def _loglikelihood_tokens(self, requests: list[Any], *rest: Any, **more: Any) -> Any:
            self.done, self.total = 0, len(requests)
            self.cut += sum(len(before) + len(after) > self.max_length + 1 for _, before, after in requests)
            found = super()._loglikelihood_tokens(requests, *rest, **more)
            self._tell(self.total)  # questions with the same beginning are asked once
            return found

        def generate_until(self, requests: list[Any], *rest: Any, **more: Any) -> Any:
            self.done, self.total = 0, len(requests)
            return super().generate_until(requests, *rest, **more)

        def _model_call(self, inps: Tensor, *rest: Any, **more: Any) -> Any:
            self._tell(len(inps))
            return super()._model_call(inps, *rest, **more)

        def _model_generate(self, context: Tensor, *rest: Any, **more: Any) -> Any:
            self._tell(len(context))
            return super()._model_generate(context, *rest, **more)

        def _tell(self, more: int) -> None:
            self.done = min(self.done + more, self.total)
            tell(self.done, self.total)

    given = {"tokenizer": how.tokenizer, "batch_size": how.batch_size, "mixed_precision_dtype": autocast}
    return Asks(pretrained=model, **given)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars of others, and with the same random numbers each time; those of the caller go on as before."""
    bar = need("tqdm").tqdm
    start, states = bar.__init__, (random.getstate(), np.random.get_state())
    bar.__init__ = lambda self, *arguments, **options: start(self, *arguments, **{**options, "disable": True})
    random.seed(0)
    np.random.seed(_SEED)
    try:
        yield
    finally:
        bar.__init__ = start
        random.setstate(states[0])
        np.random.set_state(states[1])

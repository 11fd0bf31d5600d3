"""From a checked recipe to the objects it describes. Torch is loaded here, inside the functions."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from stockpot.errors import DataError, RecipeError, RunError, TaskError
from stockpot.events import Listener, ignore
from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import LmEval, PythonCode, Split

if TYPE_CHECKING:
    from stockpot.adapters.models import ImageInput, LoadedModel
    from stockpot.pool import Pool
    from stockpot.task import Task
    from stockpot.zoo.folder import TrialRecord


def pool_paths(recipe: Recipe) -> list[str]:
    """Where the checkpoints are; refused where `finetune` was to make them and has not."""
    if recipe.pool.path is not None:
        return [path if path.startswith("hf://") else str(recipe.path(path)) for path in recipe.pool.path]
    assert recipe.finetune is not None  # the schema has seen to it
    folder = recipe.path(recipe.finetune.dir)
    with contextlib.suppress(OSError):  # opening the pool says why
        if not folder.exists() or not any(folder.iterdir()):
            found = "an empty folder" if folder.is_dir() else "no such folder"
            fix = "run `stockpot finetune` with this recipe first, or name your checkpoints in pool.path"
            raise RecipeError.of(f"finetune.dir {folder}", "the checkpoints of this recipe's search", found, fix)
    return [str(folder)]


def pool_base(recipe: Recipe) -> str | None:
    """The base of adapters: a path of the recipe, or else a name."""
    given = recipe.pool.base
    return str(recipe.path(given)) if given is not None and recipe.path(given).exists() else given


def build_pool(recipe: Recipe, listen: Listener = ignore) -> Pool:
    """The opened, checked pool."""
    from stockpot.pool import Pool

    section = recipe.pool
    options = section.model_dump(include={"key", "rename", "mixed_dtypes"})
    pool = Pool.open(*pool_paths(recipe), base=pool_base(recipe), listen=listen, **options)
    return finite(pool, section.nonfinite, listen)


def finite(pool: Pool, rule: str, listen: Listener = ignore) -> Pool:
    """What is used of a pool by `pool.nonfinite`."""
    if rule == "refuse":
        pool.verify_finite(listen)
    return pool.drop_nonfinite(listen) if rule == "drop" else pool


def cook_arguments(recipe: Recipe, kind: str = "cook", title: str = "", command: Sequence[str] = ()) -> dict[str, Any]:
    """What `stockpot.cook` (kind `cook`) or `compare` (any other) is called with besides pool and task."""
    from stockpot.run.directory import RecipeFacts

    section, output, run = recipe.method, recipe.output, recipe.path(recipe.output.dir)
    load = functools.partial(code_of, recipe)
    if run.resolve() == recipe.folder.resolve():
        fix = "choose another directory, such as output.dir: runs/first"
        raise RunError.of(f"output.dir {output.dir!r}", "a directory of its own", "the recipe's folder", fix)
    content = (recipe.digest(), recipe.resolved(), code_digests(recipe))
    shared = {
        **section.model_dump(include={"preset", "include", "exclude", "donor"}),
        "run": run,
        "overwrite": output.overwrite,
        "recipe": RecipeFacts(title, kind, tuple(command), *content, output.max_shard_size),
        "seed": output.seed,
        "form": output.form,
        "track": output.track,
    }
    if kind == "cook":
        return {**shared, "method": section.name, **section.for_cook(load)}
    return {**shared, "methods": section.methods, "each": section.own(load), **section.stated(load)}


def build_model(recipe: Recipe, pretrained: bool = False) -> LoadedModel:
    """The model on the CPU; `pretrained` also gives it the weights that `finetune` starts from."""
    from stockpot.adapters.huggingface import pool_class_names
    from stockpot.adapters.models import load_model

    section = recipe.model
    loaded = load_model(
        section.kind,
        getattr(section, section.kind),
        folder=recipe.folder,
        weights=recipe.path(section.weights) if section.weights is not None else None,
        tokenizer=recipe.path(section.tokenizer) if section.tokenizer is not None else None,
        pretrained=pretrained,
        dtype="float32" if pretrained else section.dtype,
        seed=recipe.output.seed,
        **section.model_dump(include={"classes", "options", "auto_class"}),
    )
    for key, (purposes, expected, name) in MODELS.items():
        if getattr(recipe.data, key) is not None and loaded.purpose not in purposes:
            fix = f"set model.auto_class, such as {name}, or name other columns"
            raise TaskError.of(f"data.{key}", expected=expected, found=type(loaded.model).__name__, fix=fix)
    if recipe.data.python is None and recipe.data.loss is None:
        _check_columns(recipe, loaded)
    if recipe.data.python is None:
        settle_problem(recipe.data.target, loaded)
        with contextlib.suppress(RecipeError):  # there need be no pool yet, or any more
            loaded = replace(loaded, class_names=pool_class_names(pool_paths(recipe)) or loaded.class_names)
    own = section.kind == "python" and recipe.data.kind == "python"
    if not own or any(value is not None for value in recipe.data.preprocessing.model_dump().values()):
        _image(recipe, loaded).attach(loaded.model)  # touches nothing but uint8 images
    return loaded


def build_task(recipe: Recipe, listen: Listener = ignore) -> Task:
    """Model, metric and data, ready to be cooked with."""
    from stockpot.task import Task

    loaded = build_model(recipe)
    data = build_data(recipe, loaded, ("fit", "report"), listen)
    report = data.get("report")
    if isinstance(recipe.data.report, dict):
        report = _report_sets(recipe.data.report, data, recipe, loaded)
    return Task(
        loaded.model,
        data["fit"],
        report,
        **judged(recipe, loaded),
        statistics=recipe.model.statistics,
        memory_limit=_memory_limit(recipe),
        listen=listen,
    )


def _report_sets(
    given: Mapping[str, Split | LmEval], data: Mapping[str, Any], recipe: Recipe, loaded: LoadedModel
) -> dict[str, Any]:
    """In their order: the first counts. What a python function gives comes before tasks of lm_eval."""
    from stockpot.task.checks import report_sets

    sets = {name: source for name, (source, _) in report_sets(data.get("report"), None, data["fit"]).items()}
    for name, one in given.items():
        new = {name: data[f"report.{name}"]} if isinstance(one, Split) else _lm_eval(one, recipe, loaded)
        if twice := [name for name in new if name in sets]:
            fix = "give the other set another name"
            raise RecipeError.of("data.report", expected="a name for each set", found=f"{twice[0]} twice", fix=fix)
        sets |= new
    return sets


def _lm_eval(section: LmEval, recipe: Recipe, loaded: LoadedModel) -> dict[str, Any]:
    from stockpot.adapters.lm_eval import lm_eval_tasks

    if loaded.tokenizer is None:
        expected, fix = "a model with a tokenizer", "use model.transformers, and model.tokenizer if it has none"
        raise RecipeError.of("data.report.lm_eval", expected, f"model.{recipe.model.kind}, which has none", fix)
    return lm_eval_tasks(
        section.tasks,
        loaded.tokenizer(),
        include_path=None if section.python is None else recipe.path(section.python),
        **section.model_dump(include={"num_fewshot", "limit", "batch_size", "chat_template"}),
    )


def build_data(
    recipe: Recipe, loaded: LoadedModel, wanted: tuple[str, ...], listen: Listener = ignore
) -> dict[str, Any]:
    """The samples of each wanted split (`train`, `fit`, `report`) that the recipe has.

    Of several sets of report data each is a split, `report.NAME`.
    """
    from stockpot.adapters.code import call_code
    from stockpot.adapters.samples import read_splits
    from stockpot.adapters.splits import Columns, DataSource, Share
    from stockpot.adapters.tables import Limits

    section = recipe.data
    if section.python is not None:
        made = {name: call_code(section.python, recipe.folder, name, **section.options) for name in wanted}
        missing = [name for name in wanted if made[name] is None and name != "report"]
        if missing:
            expected, fix = f"data for {missing[0]!r}", "return tensors, a Dataset or a DataLoader for it"
            raise DataError.of(f"python: {section.python}", expected=expected, found="None", fix=fix)
        return made
    shares = {
        name: Share(
            s.of, s.fraction, s.count, *(None if place is None else recipe.path(place) for place in (s.rows, s.path))
        )
        for name, s in section.splits.items()
    }
    wanted = tuple(name for name in shares if name.split(".")[0] in wanted)
    source = DataSource(
        section.kind,
        recipe.path(getattr(section, section.kind)),
        Columns(**section.model_dump(include={field.name for field in fields(Columns)})),
        shares,
        section.split_seed,
        cache=None if section.cache is None else recipe.path(section.cache),
        limits=Limits(**section.limits.model_dump()),
        **section.model_dump(include={"classes", "memory_limit", "target", "max_length", "long_texts", "separator"}),
        generate=section.generate,
        metric=section.metric if isinstance(section.metric, str) else "",
    )
    return read_splits(source, loaded, _image(recipe, loaded), wanted, listen)


def run_finetune(recipe: Recipe, listen: Listener = ignore) -> list[TrialRecord]:
    """Every trial of the recipe that nobody has finished or holds; the records of all of them."""
    from stockpot.task import Data
    from stockpot.zoo.search import finetune

    section, seed = recipe.finetune, recipe.output.seed
    if section is None:
        raise RecipeError("finetune: required by `stockpot finetune`, but not there; an empty section will do")
    loaded = build_model(recipe, pretrained=True)
    data = build_data(recipe, loaded, ("train", "fit"), listen)
    train, fit = (
        Data.of(data[name], name=f"{name} data", memory_limit=_memory_limit(recipe), listen=listen)
        for name in ("train", "fit")
    )
    # Checkpoints made from a Hugging Face folder, and soups made from those, should load like it.
    given = recipe.model.transformers
    folder = recipe.path(given) if isinstance(given, str) and recipe.path(given).is_dir() else None
    return finetune(
        loaded.model,
        train,
        fit,
        recipe.path(section.dir),
        section.plan(seed),
        **judged(recipe, loaded),
        code=code_digests(recipe),
        as_directories=folder is not None,
        companions=folder,
        listen=listen,
    )


def _memory_limit(recipe: Recipe) -> int:
    """Decoded images in a cache are mapped from their files: the system reads and drops them as it likes."""
    return recipe.data.memory_limit if recipe.data.cache is None else sys.maxsize


def _image(recipe: Recipe, loaded: LoadedModel) -> ImageInput:
    from stockpot.adapters.models import ImageInput

    return (loaded.image or ImageInput()).override(recipe.data.preprocessing.model_dump())


def code_digests(recipe: Recipe) -> dict[str, str]:
    """Of the files beside the recipe whose functions it names."""
    from stockpot.adapters.code import code_digest

    groups = [getattr(section, "granularity", None) for section in (recipe.method, *recipe.method.each.values())]
    named = [code.python for code in (recipe.data.loss, recipe.data.metric, *groups) if isinstance(code, PythonCode)]
    references = [one for one in (recipe.model.python, recipe.data.python, *named) if one is not None]
    found = (code_digest(one, recipe.folder) for one in references)
    return dict(one for one in found if one is not None)


# ---- how the model is run, taught and scored


def judged(recipe: Recipe, loaded: LoadedModel) -> dict[str, Any]:
    """How the model is run and scored, as keyword arguments that `Task` and `finetune` share."""
    import torch

    section, device = recipe.data, recipe.model.device
    if device == "auto":
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        device = next(name for name, there in found.items() if there)
    loss = None if section.loss is None else code_of(recipe, section.loss)
    if loss is None and section.target != "class" and not loaded.keywords:
        loss = torch.nn.MSELoss() if section.target == "number" else torch.nn.BCEWithLogitsLoss()
    return {
        "loss": loss,
        "metric": _metric(recipe, loaded),
        "device": device,
        "autocast": None if recipe.model.autocast == "none" else getattr(torch, recipe.model.autocast),
        "batch_size": section.batch_size,
    }


def _metric(recipe: Recipe, loaded: LoadedModel) -> Any:
    """What `Task` is given as its metric; the default is that of the kind of task."""
    from stockpot.task.language import entity_f1, exact_match, is_iob2
    from stockpot.task.metrics import METRICS, MULTI_LABEL

    section, names = recipe.data, recipe.data.classes or loaded.class_names
    if isinstance(section.metric, PythonCode):
        return code_of(recipe, section.metric)
    name = section.metric or "accuracy"
    if section.metric is None and section.words is not None:
        name = "entity_f1" if is_iob2(names or ()) else "token_f1"
    elif section.metric is None and loaded.purpose in ("causal", "seq2seq") and section.label is None:
        name = "accuracy" if section.python is not None else "nats_per_token"
    if name == "entity_f1" and names is not None:
        return entity_f1(names)
    if name == "exact_match" and loaded.tokenizer is not None:
        tokenizer = loaded.tokenizer()
        _end_with(loaded.model, getattr(tokenizer, "eos_token_id", None))
        return exact_match(functools.partial(tokenizer.batch_decode, skip_special_tokens=True))
    return MULTI_LABEL.get(name, METRICS[name]) if section.target == "multi" else name


def _end_with(model: Any, end: int | None) -> None:
    """Generation also stops at the end of text that answers are learned with."""
    settings = getattr(model, "generation_config", None)
    if settings is not None and end is not None:
        known = settings.eos_token_id
        others = [] if known is None else known if isinstance(known, list) else [known]
        settings.eos_token_id = list(dict.fromkeys([*others, end]))


_CAUSAL = ("causal",), "a causal language model", "AutoModelForCausalLM"
MODELS = {  # columns, and which models they are for
    "messages": _CAUSAL,
    "choices": _CAUSAL,
    "prompt": (("causal", "seq2seq"), "a language model: causal or sequence-to-sequence", "AutoModelForCausalLM"),
    "words": (("tags",), "a model for token classification", "AutoModelForTokenClassification"),
}


def _check_columns(recipe: Recipe, loaded: LoadedModel) -> None:
    """The loss of a model of tokens takes no label per sample; the library says so in shapes alone."""
    section = recipe.data
    target = None if section.target == "class" else f"data.target: {section.target}"
    wrong = {
        "causal": ("no label per sample: it learns its input", target if section.label is None else "data.label"),
        "seq2seq": ("data.prompt and completion", "neither" if section.prompt is None else None),
        "tags": ("data.words and tags", "neither" if section.words is None else None),
    }
    expected, found = wrong.get(loaded.purpose, ("", None))
    if found is not None:
        fix = "write so; or, for a label per sample, set model.auto_class, such as AutoModelForSequenceClassification"
        raise TaskError.of(f"data for {type(loaded.model).__name__}", expected=expected, found=found, fix=fix)


_PROBLEMS = {"class": "single_label_classification", "number": "regression", "multi": "multi_label_classification"}


def settle_problem(target: str, loaded: LoadedModel) -> None:
    """A transformers classifier guesses its loss from the first labels unless it is told which."""
    config: Any = getattr(loaded.model, "config", None)
    if loaded.purpose != "" or not hasattr(config, "problem_type"):
        return
    if config.problem_type not in (None, _PROBLEMS[target]):
        wanted = next((name for name, problem in _PROBLEMS.items() if problem == config.problem_type), "class")
        expected = f"a model whose configuration says problem_type {_PROBLEMS[target]}, or nothing"
        fix = f"write data.target: {wanted}, or give the model that was trained for these labels"
        raise TaskError.of(f"data.target: {target}", expected=expected, found=config.problem_type, fix=fix)
    if target != "class":
        config.problem_type = _PROBLEMS[target]


def code_of(recipe: Recipe, reference: PythonCode) -> Any:
    from stockpot.adapters.code import load_code

    return load_code(reference.python, recipe.folder)

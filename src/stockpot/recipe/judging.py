"""How the model of a recipe is run, taught and scored: its device, its loss, its metric, and the models data is for."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from stockpot.errors import TaskError
from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import PythonCode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from stockpot.adapters.models import LoadedModel


def judged(recipe: Recipe, loaded: LoadedModel) -> dict[str, Any]:
    """How the model is run and scored, as keyword arguments that `Task` and `finetune` share."""
    import torch

    section, device = recipe.data, recipe.model.device
    if device == "auto":
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
        device = next(name for name, there in found.items() if there)
    loss = None if section.loss is None else code_of(recipe, section.loss)
    if loss is None and section.target != "class" and not loaded.keywords:
        loss = functools.partial(target_loss, section.target)
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


def target_loss(target: str, model: nn.Module, batch: Any) -> Tensor:
    """Squared error or binary cross-entropy of each sample, its mean over several outputs. (n,)"""
    from torch.nn.functional import binary_cross_entropy_with_logits

    from stockpot.task.batches import need_logits

    found, labels = need_logits(model(batch[0]), f"data.target: {target}"), batch[1]
    if found.numel() != labels.numel():
        expected = f"one output for each number of the labels, {tuple(labels.shape)}"
        fix = "give the model a head of that size, or write another data.target or a data.loss of your own"
        what, outputs = f"model and data.target: {target}", f"outputs {tuple(found.shape)}"
        raise TaskError.of(what, expected=expected, found=outputs, fix=fix)
    found, labels = found.reshape(len(labels), -1), labels.reshape(len(labels), -1).to(found)
    if target == "multi":
        return binary_cross_entropy_with_logits(found, labels, reduction="none").mean(1)
    errors: Tensor = (found - labels).square().mean(1)
    return errors


def code_of(recipe: Recipe, reference: PythonCode) -> Any:
    from stockpot.adapters.code import load_code

    return load_code(reference.python, recipe.folder)

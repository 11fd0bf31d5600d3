"""The one place that opens the report data: finished decisions go in, their scores come out.

A decision is known by what it was asked for: the method, its settings, the ingredients and the groups. Learning is
deterministic, so the same question asked again (a run that is continued) is the same decision, and allowed; any other
question is refused by the task from the first look on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from stockpot.events import Event, Listener, ignore
from stockpot.layout import Layout
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.result import Result
from stockpot.soups.settings_before import Settings
from stockpot.task import Data, Scores, Task
from stockpot.task.sealed import open_report

Key = TypeVar("Key")


def about(method: str, settings: Settings) -> dict[str, Any]:
    """What a soup's record says of how it was decided."""
    values = dataclasses.asdict(settings)
    if callable(values["granularity"]):
        values["granularity"] = "custom"
    return {"method": method, "settings": values}


def decision(how: Mapping[str, Any], digests: Iterable[str], layout: Layout | None) -> str:
    """The name of a decision; `how` is what `about` gives. The ensemble has no layout and no settings."""
    what = {"method": how["method"], "ingredients": list(digests)}
    if layout is not None:
        what |= {"settings": how["settings"], "layout": layout.to_json()}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def report_on(kitchen: Kitchen, decided: Mapping[Key, Result]) -> Iterator[tuple[Key, Result]]:
    """The same results with their scores on the report data, one after the other.

    All of them must be given at once: from the first look on, the task takes part in no other decision.
    """
    listen = kitchen.listen
    data = open_report(kitchen.task, [_decision_of(kitchen, result) for result in decided.values()])
    listen(Event("unsealed", {"decisions": len(decided), "samples": len(data)}))
    for key, result in decided.items():
        scores = _score(kitchen, result, data)
        listen(Event("report", {"method": result.method, "mean": scores.mean, "value": scores.mean, "n": scores.n}))
        yield key, dataclasses.replace(result, report=scores)


def _score(kitchen: Kitchen, result: Result, data: Data) -> Scores:
    task = kitchen.task
    if result.soup is None:
        return task.ensemble_scores(kitchen.members(), data, listen=kitchen.listen)
    result.soup.load_into(task.model)
    return task.score(data, listen=kitchen.listen)


def report_weights(task: Task, listen: Listener = ignore) -> Scores:
    """The weights that are in the model now, decided elsewhere: those of a file."""
    total = hashlib.sha256()
    for name, tensor in task.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            total.update(name.encode() + flat.view(torch.uint8).numpy().tobytes())
    return task.score(open_report(task, [total.hexdigest()]), listen=listen)


def _decision_of(kitchen: Kitchen, result: Result) -> str:
    if result.soup is None:
        return decision({"method": result.method}, kitchen.facts.digests, None)
    return decision(result.soup.about, result.soup.pool.digests(), result.soup.layout)

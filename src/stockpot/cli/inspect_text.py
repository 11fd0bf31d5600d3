"""What `stockpot inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stockpot.cli.terminal import say, table
from stockpot.report import words


def show(found: Mapping[str, Any]) -> None:
    _overview(found)
    _model(found.get("model"))
    _ingredients(found)
    _peculiarities(found)
    if found["forecast"] is not None:
        _forecast(found["forecast"], len(found["ingredients"]))
    for problem in found["problems"]:
        say(f"problem: {problem}")
        say()


def _overview(found: Mapping[str, Any]) -> None:
    ingredients = found["ingredients"]
    dtypes = ", ".join(f"{count} {name}" for name, count in found["dtypes"].items())
    total = sum(entry["bytes"] for entry in ingredients)
    say(
        f"{words.plural(len(ingredients), 'ingredient')} of {words.count(found['parameters'])} parameters"
        f" in {words.plural(found['tensors'], 'tensor')} ({dtypes}); {words.size(total)} in all"
    )
    say()


def _model(model: Mapping[str, Any] | None) -> None:
    if model is None:
        return
    fits = "fits the recipe's model" if model["fits"] else "does not fit the recipe's model; see the end"
    say(f"The pool {fits} ({model['name']}).")
    say()


def _ingredients(found: Mapping[str, Any]) -> None:
    ingredients, pairs = found["ingredients"], found["distances"]
    rows = []
    for k, entry in enumerate(ingredients):
        nearest = _nearest(k, pairs, ingredients)
        rows.append(
            (
                entry["name"],
                entry["format"] + (f" [{entry['key']}]" if entry["key"] else ""),
                words.size(entry["bytes"]),
                _distance(entry["norm"]),
                _distance(entry["to_mean"]),
                nearest,
            )
        )
    table(("ingredient", "format", "size", "norm", "distance to mean", "nearest"), rows)
    say()


def _nearest(k: int, pairs: Sequence[Sequence[float | None]] | None, entries: Sequence[Mapping[str, Any]]) -> str:
    others = [(d, i) for i, d in enumerate(pairs[k]) if i != k and d is not None] if pairs else []
    if not others:
        return "–"
    distance, i = min(others)
    return f"{words.middle(entries[i]['name'], 24)} ({_distance(distance)})"


def _distance(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _peculiarities(found: Mapping[str, Any]) -> None:
    lines = []
    if found["dropped"]:
        lines.append(f"left out: {_some(found['dropped'])}, not finite, as the recipe says (pool.nonfinite: drop)")
    if found["outlier"] is not None:
        far = any(entry["to_mean"] is not None for entry in found["ingredients"])
        why = (
            "is much farther from the mean than the others" if far else "is not finite, and so nothing is near the mean"
        )
        lines.append(f"outlier: {found['outlier']} {why}")
    if found["strangers"]:
        lines.append(
            f"no kin: {_some(found['strangers'])}, farther from every other ingredient than from zero;"
            " not a fine-tune of the same model?"
        )
    if found["frozen"]:
        lines.append(f"frozen: {_some(found['frozen'])} equal in all ingredients; copied, not mixed")
    lines += [f"tied: {_some(names)} hold one tensor; mixed once" for names in found["tied"]]
    lines += [f"duplicates: {_some(names)} have the same content" for names in found["duplicates"]]
    kept = found.get("kept", {})
    if kept.get("statistic"):
        lines.append(
            f"statistics: {words.plural(kept['statistic'], 'running statistic')} of normalisation layers;"
            " measured again for every soup"
        )
    if kept.get("integer"):
        lines.append(f"integers: {words.plural(kept['integer'], 'tensor')}; never averaged")
    for line in lines:
        say(line)
    if lines:
        say()


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _forecast(forecast: Mapping[str, Any], models: int) -> None:
    budget = forecast["budget"]
    headings = ["method", "models at a time", "peak memory", "reading"]
    if budget is not None:
        headings.append("fits the budget")
    rows = []
    for row in forecast["rows"]:
        block = "1" if row["block"] is None else f"all {models}" if row["block"] == models else str(row["block"])
        cells = [row["method"], block, words.size(row["memory"]), words.size(row["reading"])]
        rows.append([*cells, *([] if budget is None else ["yes" if row["fits"] else "no"])])
    table(headings, rows)
    say()
    where = "on the GPU, directions in bf16" if forecast["device"] == "cuda" else "on the CPU, weights in fp32"
    say(f"Peak memory is {where}; not included: {forecast['not_included']}.")
    largest = forecast["largest_block"]
    if largest is not None:
        block = largest["crossfit"]
        if block:
            say(f"Largest block for crossfit within the budget: {block} (method.block_size: {block}).")
        else:
            say("No block size of crossfit fits this budget; uniform and greedy need the least.")
    say()

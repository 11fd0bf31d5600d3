"""What `stockpot inspect` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stockpot.cli.terminal import say, table
from stockpot.report import words


def show(found: Mapping[str, Any]) -> None:
    ingredients, model, forecast = found["ingredients"], found.get("model"), found["forecast"]
    dtypes = ", ".join(f"{count} {name}" for name, count in found["dtypes"].items())
    say(
        f"{words.plural(len(ingredients), 'ingredient')} of {words.count(found['parameters'])} parameters"
        f" in {words.plural(found['tensors'], 'tensor')} ({dtypes});"
        f" {words.size(sum(entry['bytes'] for entry in ingredients))} in all\n"
    )
    if model is not None:
        fits = "fits the recipe's model" if model["fits"] else "does not fit the recipe's model; see the end"
        say(f"The pool {fits} ({model['name']}).\n")
    headings = ("ingredient", "format", "size", "norm", "distance to mean", "nearest")
    table(headings, [_ingredient(k, found) for k in range(len(ingredients))])
    peculiar = _peculiarities(found)
    say("\n".join(["", *peculiar, ""] if peculiar else [""]))
    if forecast is not None:
        _show_forecast(forecast, len(ingredients))
    for problem in found["problems"]:
        say(f"problem: {problem}\n")


def _ingredient(k: int, found: Mapping[str, Any]) -> tuple[str, ...]:
    entry = found["ingredients"][k]
    others = [(d, i) for i, d in enumerate(found["distances"][k]) if i != k and d is not None]
    nearest = "–"
    if others:
        distance, i = min(others)
        nearest = f"{words.middle(found['ingredients'][i]['name'], 24)} ({_distance(distance)})"
    return (
        entry["name"],
        entry["format"] + (f" [{entry['key']}]" if entry["key"] else ""),
        words.size(entry["bytes"]),
        _distance(entry["norm"]),
        _distance(entry["to_mean"]),
        nearest,
    )


def _distance(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _peculiarities(found: Mapping[str, Any]) -> list[str]:
    def some(names: Sequence[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    kept = found.get("kept", {})
    far = any(entry["to_mean"] is not None for entry in found["ingredients"])
    why = "much farther from the mean than the others" if far else "not finite, and so nothing is near the mean"
    statistics = words.plural(kept.get("statistic", 0), "running statistic")
    lines = {
        f"left out: {some(found['dropped'])}, not finite, as the recipe says (pool.nonfinite: drop)": found["dropped"],
        f"outlier: {found['outlier']} is {why}": found["outlier"] is not None,
        f"no kin: {some(found['strangers'])}, farther from every other ingredient than from zero;"
        " not a fine-tune of the same model?": found["strangers"],
        f"frozen: {some(found['frozen'])} equal in all ingredients; copied, not mixed": found["frozen"],
        **{f"tied: {some(names)} hold one tensor; mixed once": True for names in found["tied"]},
        **{f"duplicates: {some(names)} have the same content": True for names in found["duplicates"]},
        f"statistics: {statistics} of normalisation layers; measured again for every soup": kept.get("statistic"),
        f"integers: {words.plural(kept.get('integer', 0), 'tensor')}; never averaged": kept.get("integer"),
    }
    return [line for line, there in lines.items() if there]


def _show_forecast(forecast: Mapping[str, Any], models: int) -> None:
    budget = [] if forecast["budget"] is None else ["fits the budget"]
    rows = []
    for row in forecast["rows"]:
        block = f"all {models}" if row["block"] == models else str(row["block"] or 1)
        fits = ["yes" if row["fits"] else "no"] if budget else []
        rows.append([row["method"], block, words.size(row["memory"]), words.size(row["reading"]), *fits])
    table(["method", "models at a time", "peak memory", "reading", *budget], rows)
    where = "on the GPU, directions in bf16" if forecast["device"] == "cuda" else "on the CPU, weights in fp32"
    say(f"\nPeak memory is {where}; not included: {forecast['not_included']}.")
    if budget:
        block = forecast["largest_block"]["crossfit"]
        largest = f"Largest block for crossfit within the budget: {block} (method.block_size: {block})."
        say(largest if block else "No block size of crossfit fits this budget; uniform and greedy need the least.")
    say()

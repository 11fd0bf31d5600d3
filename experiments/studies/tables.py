"""One zoo's answer to each question, as Markdown tables; no lines where nothing was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from stockpot.report import words
from studies import paper
from studies.loaded import Point, Results
from studies.markdown import change, duration, interval, number, percent, points, table
from studies.plans import DEFAULT, PAPER

METHODS = (
    "best",
    "uniform",
    "greedy",
    "learned",
    "hl",
    "mehl",
    "learned+",
    "hl+",
    "mehl+",
    "crossfit",
    "ensemble",
)
MISSING = "not measured yet"


def methods(zoo: Results) -> list[str]:
    """Tables 1 and 2."""
    beside = paper.BESIDE.get(zoo.zoo, ())
    rows = []
    for name in METHODS:
        found, one = zoo.over_seeds(name), zoo.of_main(name)
        if found is None or one is None:
            continue
        seconds = one["seconds"]
        costs = name not in ("best", "uniform", "ensemble")
        epochs = one["epochs"] if costs else None
        rows.append(
            [
                f"**{name}**" if name == DEFAULT else name,
                percent(found["report"][0]),
                f"{percent(found['report'][1])} to {percent(found['report'][2])}",
                percent(found["spread"]) if found["spread"] else "–",
                interval(found.get("default_minus")),
                duration(seconds / epochs) if epochs else "–",
                f"{epochs:.1f}" if epochs else "–",
                duration(seconds) if costs else "–",
                words.size(one["peak_device"]) if costs else "–",
                words.size(one["peak_host"]) if costs else "–",
                *(_beside(each, name) for each in beside),
            ]
        )
    headings = ["method", "test accuracy (%)", "95 % interval", "over seeds", f"{DEFAULT} minus it"]
    headings += ["time per epoch", "epochs", "construction time", "peak GPU", "peak host"]
    if not rows:
        return []
    return table([*headings, *(f"paper, {each.title}" for each in beside)], rows) + _surprises(zoo)


def _surprises(zoo: Results) -> list[str]:
    """What a table alone would hide: a guard that fell back, a method that failed."""
    lines = []
    for run in [*zoo.study("main").values(), *zoo.study("seeds").values()]:
        winner = run["methods"].get(DEFAULT, {}).get("guard")
        if winner not in (None, "learned"):
            lines.append(f"Seed {run['seed']}: {DEFAULT}'s guard returned the {winner} soup.")
        lines += [f"Seed {run['seed']}: {name} failed." for name in run["failed"]]
    return [" ".join(lines), ""] if lines else []


def _beside(each: paper.Table, name: str) -> str:
    return each.rows[name].text() if name in each.rows else "–"


def removed(zoo: Results) -> list[str]:
    """Table 3."""
    runs = zoo.smaller_pools("removed")[::-1]  # the whole pool first
    if len(runs) < 2:
        return []
    names = ("best", "uniform", "greedy", PAPER, DEFAULT)
    heads = ["best ingredients left out", *(str(zoo.models - run["models"]) for run in runs)]
    rows = [[name, *(_accuracy(run, name) for run in runs)] for name in names]
    rows += [
        [f"{first} minus greedy", *(interval(_between(run, first, "greedy")) for run in runs)]
        for first in (PAPER, DEFAULT)
    ]
    if zoo.models == 72:
        for place, name in enumerate(("greedy", PAPER)):
            cells = [paper.REMOVED.get(zoo.models - run["models"]) for run in runs]
            rows.append(
                [f"paper: {name}", *("–" if cell is None else f"{cell[place]:.2f}" for cell in cells)]
            )
    return table(heads, rows)


def coefficients(zoo: Results) -> list[str]:
    rows = []
    for name in METHODS:
        found = zoo.value["coefficients"].get(name)
        if found is None:
            continue
        quantiles = found["quantiles"]
        rows.append(
            [
                name,
                f"{found['models']} x {found['groups']}",
                f"{number(quantiles['0.0'])} to {number(quantiles['1.0'])}",
                f"{number(quantiles['0.05'])} to {number(quantiles['0.95'])}",
                words.share(found["outside"]),
                words.share(found["near_zero"]),
            ]
        )
    heads = [
        "method",
        "weights",
        "smallest to largest",
        "5 % to 95 %",
        "below 0 or above 1",
        "within 0.1 of 0",
    ]
    return table(heads, rows) if rows else []


def cost(zoo: Results) -> list[str]:
    runs = zoo.smaller_pools("cost")
    if len(runs) < 2:
        return []
    spent = [one["seconds"] for one in zoo.value["ingredients"]]
    known = bool(spent) and None not in spent
    rows = [
        [
            str(run["models"]),
            words.seconds(sum(spent[: run["models"]])) if known else "–",
            *(_accuracy(run, name) for name in ("best", "uniform", "greedy", PAPER, DEFAULT)),
            interval(_between(run, DEFAULT, "greedy")),
        ]
        for run in runs
    ]
    heads = ["ingredients", "fine-tuning time", "best", "uniform", "greedy", PAPER, DEFAULT]
    return table([*heads, f"{DEFAULT} minus greedy"], rows)


def ablations(zoo: Results) -> list[str]:
    lines = []
    for symbol, found in (("b", zoo.blocks()), ("T", zoo.visits()), ("J", zoo.steps(PAPER))):
        if len(found) < 2:
            lines.append(f"{symbol}: {MISSING}.\n")
            continue
        lines += table([symbol, *(f"{point.x:g}" for point in found)], _sweep(zoo, PAPER, found))
    return lines if any(line.startswith("|") for line in lines) else []


def decentralise(zoo: Results) -> list[str]:
    rows = _by_seed(zoo, "decentralise-off", PAPER)
    if not rows:
        return []
    rows.append(["paper, appendix D", f"{paper.DECENTRALISED:.2f}", f"{paper.FREE:.2f}", "−0.60"])
    return table(["seed", f"{PAPER}, directions from the mean", "free weights", "off minus on"], rows)


def statistics(zoo: Results) -> list[str]:
    runs = {run["statistics"]: run for run in zoo.study("statistics").values()}
    if not runs or zoo.main is None:
        return []
    runs = {zoo.main["statistics"]: zoo.main, **runs}
    names = ("uniform", "greedy", PAPER, DEFAULT)
    rows = [
        [
            name,
            *(
                _accuracy(run, name) + (f" ({interval(_to_main(run, name))})" if run is not zoo.main else "")
                for run in runs.values()
            ),
        ]
        for name in names
    ]
    return table(["method", *runs], rows)


def directions(zoo: Results) -> list[str]:
    """How far rounding moves the accuracy, and whether that is within one standard error."""
    rounding: Mapping[str, Any] = zoo.value.get("rounding") or {}
    kinds = sorted(
        {kind for found in rounding.values() for kind in found}, key=lambda one: (one != "main", one)
    )
    rows = [
        [name, percent(next(iter(found.values()))["exact"]), *(_moved(found.get(kind)) for kind in kinds)]
        for name, found in rounding.items()
        if found
    ]
    titles = ["as in `main`, minus fp32" if kind == "main" else f"{kind} minus fp32" for kind in kinds]
    return table(["method", "fp32", *titles], rows) if rows else []


def _moved(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    inside = abs(found["difference"][0]) <= found["error"]
    seeds = f"{len(found['seeds'])} seed{'s' if len(found['seeds']) > 1 else ''}"
    where = "within" if inside else "beyond"
    return f"{interval(found['difference'])}, {where} one standard error ({points(found['error'])}; {seeds})"


def presets(zoo: Results) -> list[str]:
    rows = [[name, *row] for name in ("hl+", PAPER) for row in _by_seed(zoo, "presets-authors", name)]
    return table(["method", "seed", "`paper`", "`authors`", "authors minus paper"], rows) if rows else []


def _by_seed(zoo: Results, variant: str, name: str) -> list[list[str]]:
    """Each seed of `main`, the same seed of the variant, and how they differ; then all seeds together."""
    runs = [
        run
        for key, run in zoo.study(variant.split("-")[0]).items()
        if key.startswith(variant) and name in run["methods"]
    ]
    rows = [
        [
            str(run["seed"]),
            percent(_mean_of_main(zoo, run["seed"], name)),
            _accuracy(run, name),
            interval(_to_main(run, name)),
        ]
        for run in sorted(runs, key=lambda run: int(run["seed"]))
    ]
    whole, own = zoo.value["variants"].get(variant, {}).get(name), zoo.over_seeds(name)
    if len(rows) > 1 and whole is not None and own is not None:
        rows.append(
            ["all", percent(own["report"][0]), percent(whole["report"][0]), interval(whole["to_main"])]
        )
    return rows


def sensitivity(zoo: Results) -> list[str]:
    lines = []
    for title, of in (("learning rate", Results.rates), ("steps per block", Results.steps)):
        for name in (DEFAULT, PAPER):
            # The default has changed since; the paper's method has not.
            shown = zoo.with_curve(partial(of, method=PAPER)) if name == PAPER else zoo
            found = of(shown, name)
            if len(found) > 1:
                lines += [] if shown is zoo else [f"{PAPER}, of an earlier time:", ""]
                lines += table([title, *(f"{point.x:g}" for point in found)], _sweep(shown, name, found))
    return lines


def _sweep(zoo: Results, name: str, found: Sequence[Point]) -> list[list[str]]:
    """Accuracy, and the change against `main` on the same samples."""
    changes = []
    for point in found:
        if point.record is zoo.of_main(name):
            changes.append("main")
        elif point.run is zoo.main:  # hl+ stands for b = K
            difference = _between(point.run, name, "hl+")
            changes.append(
                "–" if difference is None else interval([-difference[0], -difference[2], -difference[1]])
            )
        else:
            changes.append(interval(point.record["to_main"]))
    scores = [point.accuracy for point in found]
    best = max(scores) - min(scores)
    seeds = f", mean of {1 + len(found[0].others)} seeds" if found[0].others else ""
    return [
        [f"{name} (%){seeds}, range {change(best).lstrip('+')}", *(percent(score) for score in scores)],
        ["change" + (" of seed 0" if seeds else ""), *changes],
    ]


def _accuracy(run: Mapping[str, Any], name: str) -> str:
    found = run["methods"].get(name)
    return "–" if found is None or found["report"] is None else percent(found["report"]["mean"])


def _to_main(run: Mapping[str, Any], name: str) -> Sequence[float] | None:
    found = run["methods"].get(name)
    return None if found is None else found["to_main"]


def _between(run: Mapping[str, Any], first: str, second: str) -> Sequence[float] | None:
    found: Sequence[float] | None = run["differences"].get(first, {}).get(second)
    return found


def _mean_of_main(zoo: Results, seed: int, name: str) -> float | None:
    run = zoo.runs.get(f"main-{seed}")
    found = None if run is None else run["methods"].get(name)
    return None if found is None or found["report"] is None else float(found["report"]["mean"])

"""The answer to each question as one Markdown table over all zoos; no lines where nothing was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from stockpot import words
from studies import paper
from studies.loaded import Point, Results
from studies.plans import DEFAULT, PAPER

METHODS = (
    "best", "uniform", "greedy", "learned", "hl", "mehl", "learned+", "hl+", "mehl+", "crossfit", "ensemble"
)  # fmt: skip
POOLS = ("best", "uniform", "greedy", PAPER, DEFAULT)
EARLIER = "(earlier)"  # stands behind the name of a zoo whose figures are of an earlier pool and default
Record = Mapping[str, Any]


# Numbers as they stand on the page.


def percent(score: float | None) -> str:
    return "–" if score is None else f"{100 * score:.2f}"


def points(difference: float) -> str:
    """A size without a sign; fine enough that a limit and what is just above it do not look the same."""
    return f"{100 * difference:.3f}"


def change(difference: float) -> str:
    shown = f"{100 * difference:+.2f}"
    return (shown if float(shown) else "0.00").replace("-", "−")


def interval(value: Sequence[float] | None) -> str:
    """A difference in points with its 95 % interval."""
    if value is None:
        return "–"
    mean, low, high = (change(one) for one in value)
    return f"{mean} [{low}, {high}]"


def number(value: float) -> str:
    return f"{value:.3f}".replace("-", "−")


def duration(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else words.seconds(seconds)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


# One function per section of the page.


def methods(zoos: Sequence[Results]) -> list[str]:
    """The paper's tables 1 and 2: one table per zoo, because the paper's columns differ."""
    lines: list[str] = []
    for zoo in zoos:
        beside = paper.BESIDE.get(zoo.zoo, ())
        rows = [
            [*_method(zoo, name), *(each.rows[name].text() if name in each.rows else "–" for each in beside)]
            for name in METHODS
            if zoo.over_seeds(name) is not None and zoo.of_main(name) is not None
        ]
        headings = [zoo.zoo, "accuracy (%)", "95 % interval", "over seeds", f"{DEFAULT} minus it"]
        headings += ["epochs x time", "construction", "peak GPU", "peak host"]
        if rows:
            lines += table([*headings, *(f"paper, {each.title}" for each in beside)], rows) + _surprises(zoo)
    return lines


def _method(zoo: Results, name: str) -> list[str]:
    found, one = zoo.over_seeds(name), zoo.of_main(name)
    assert found is not None
    assert one is not None
    costs = name not in ("best", "uniform", "ensemble")
    epochs, seconds = one["epochs"] if costs else None, one["seconds"]
    return [
        f"**{name}**" if name == DEFAULT else name,
        percent(found["report"][0]),
        f"{percent(found['report'][1])} to {percent(found['report'][2])}",
        percent(found["spread"]) if found["spread"] else "–",
        interval(found.get("default_minus")),
        f"{epochs:.1f} x {duration(seconds / epochs)}" if epochs else "–",
        duration(seconds) if costs else "–",
        words.size(one["peak_device"]) if costs else "–",
        words.size(one["peak_host"]) if costs else "–",
    ]


def _surprises(zoo: Results) -> list[str]:
    """What a table alone would hide: a guard that fell back, a method that failed."""
    lines = []
    for run in [*zoo.study("main").values(), *zoo.study("seeds").values()]:
        winner = run["methods"].get(DEFAULT, {}).get("guard")
        if winner not in (None, "learned"):
            lines.append(f"{zoo.zoo}, seed {run['seed']}: {DEFAULT}'s guard returned the {winner} soup.")
        lines += [f"{zoo.zoo}, seed {run['seed']}: {name} failed." for name in run["failed"]]
    return [" ".join(lines), ""] if lines else []


def removed(zoos: Sequence[Results]) -> list[str]:
    """Table 3."""
    rows = []
    for zoo in zoos:
        runs = zoo.smaller_pools("removed")[::-1]  # the whole pool first
        for run in runs if len(runs) > 1 else []:
            gone = zoo.models - run["models"]
            printed = paper.REMOVED.get(gone) if zoo.models == 72 else None
            rows.append(
                [
                    _title(zoo),
                    str(gone),
                    *(_accuracy(run, name) for name in POOLS),
                    *(interval(_between(run, first, "greedy")) for first in (PAPER, DEFAULT)),
                    "–" if printed is None else f"{printed[0]:.2f}, {printed[1]:.2f}",
                ]
            )
    heads = ["zoo", "left out", *POOLS, f"{PAPER} minus greedy", f"{DEFAULT} minus greedy"]
    return table([*heads, f"paper: greedy, {PAPER}"], rows) if rows else []


def coefficients(zoos: Sequence[Results]) -> list[str]:
    rows = []
    for zoo in zoos:
        for name in METHODS:
            found = zoo.value["coefficients"].get(name)
            if found is None:
                continue
            at = found["quantiles"]
            rows.append(
                [
                    zoo.zoo,
                    name,
                    f"{found['models']} x {found['groups']}",
                    f"{number(at['0.0'])} to {number(at['1.0'])}",
                    f"{number(at['0.05'])} to {number(at['0.95'])}",
                    words.share(found["outside"]),
                    words.share(found["near_zero"]),
                ]
            )
    heads = ["zoo", "method", "weights", "smallest to largest", "5 % to 95 %", "below 0 or above 1"]
    return table([*heads, "within 0.1 of 0"], rows) if rows else []


def cost(zoos: Sequence[Results]) -> list[str]:
    rows = []
    for zoo in zoos:
        runs = zoo.smaller_pools("cost")
        spent = [one["seconds"] for one in zoo.value["ingredients"]]
        known = bool(spent) and None not in spent
        rows += [
            [
                _title(zoo),
                str(run["models"]),
                words.seconds(sum(spent[: run["models"]])) if known else "–",
                *(_accuracy(run, name) for name in POOLS),
                interval(_between(run, DEFAULT, "greedy")),
            ]
            for run in (runs if len(runs) > 1 else [])
        ]
    heads = ["zoo", "ingredients", "fine-tuning time", *POOLS, f"{DEFAULT} minus greedy"]
    return table(heads, rows) if rows else []


def ablations(zoos: Sequence[Results]) -> list[str]:
    rows = [
        [_title(zoo), symbol, *_sweep(zoo, PAPER, found)]
        for zoo in zoos
        for symbol, found in (("b", zoo.blocks()), ("T", zoo.visits()), ("J", zoo.steps(PAPER)))
        if len(found) > 1
    ]
    return table(["zoo", "changed", "range", f"{PAPER} (%) and the change against `main`"], rows) if rows else []


def sensitivity(zoos: Sequence[Results]) -> list[str]:
    rows = []
    for zoo in zoos:
        for title, of in (("learning rate", Results.rates), ("steps per block", Results.steps)):
            for name in (DEFAULT, PAPER):
                # The default has changed since earlier results were made; the paper's method has not.
                shown = zoo.with_curve(partial(of, method=PAPER)) if name == PAPER else zoo
                found = of(shown, name)
                if len(found) > 1:
                    when = "" if shown is zoo else f" {EARLIER}"
                    rows.append([zoo.zoo + when, title, name, *_sweep(shown, name, found)])
    heads = ["zoo", "changed", "method", "range", "accuracy (%) and the change against `main`"]
    return table(heads, rows) if rows else []


def _sweep(zoo: Results, name: str, found: Sequence[Point]) -> list[str]:
    """The range of the accuracies, and each of them with its change against `main` on the same samples."""
    cells = []
    for point in found:
        if point.record is zoo.of_main(name):
            moved = "main"
        elif point.run is zoo.main:  # hl+ stands for b = K
            difference = _between(point.run, name, "hl+")
            moved = "–" if difference is None else interval([-difference[0], -difference[2], -difference[1]])
        else:
            moved = interval(point.record["to_main"])
        cells.append(f"**{point.x:g}**: {percent(point.accuracy)} ({moved})")
    scores = [point.accuracy for point in found]
    seeds = f", {1 + len(found[0].others)} seeds" if found[0].others else ""
    return [change(max(scores) - min(scores)).lstrip("+") + seeds, "; ".join(cells)]


def decentralise(zoos: Sequence[Results]) -> list[str]:
    rows = [row for zoo in zoos for row in _by_seed(zoo, "decentralise-off", PAPER)]
    if not rows:
        return []
    rows.append(["paper, appendix D", PAPER, f"{paper.DECENTRALISED:.2f}", f"{paper.FREE:.2f}", "−0.60", "–"])
    return table(["zoo", "method", "from the mean", "free weights", "free minus from the mean", "by seed"], rows)


def presets(zoos: Sequence[Results]) -> list[str]:
    rows = [row for zoo in zoos for name in ("hl+", PAPER) for row in _by_seed(zoo, "presets-authors", name)]
    heads = ["zoo", "method", "`paper`", "`authors`", "authors minus paper", "by seed"]
    return table(heads, rows) if rows else []


def _by_seed(zoo: Results, variant: str, name: str) -> list[list[str]]:
    """`main` and the variant over all seeds that have both, how they differ, and that of each seed."""
    runs = sorted(
        (
            run
            for key, run in zoo.study(variant.split("-")[0]).items()
            if key.startswith(variant) and name in run["methods"]
        ),
        key=lambda run: int(run["seed"]),
    )
    if not runs:
        return []
    moved = [run["methods"][name]["to_main"] for run in runs]
    whole, own = zoo.value["variants"].get(variant, {}).get(name), zoo.over_seeds(name)
    if len(runs) > 1 and whole is not None and own is not None:
        each = ", ".join(f"{_accuracy(run, name)} ({interval(one)})" for run, one in zip(runs, moved, strict=True))
        scores = percent(own["report"][0]), percent(whole["report"][0]), interval(whole["to_main"])
    else:
        each = f"seed {runs[0]['seed']} only"
        scores = (percent(_mean_of_main(zoo, runs[0]["seed"], name)), _accuracy(runs[0], name), interval(moved[0]))
    return [[_title(zoo), name, *scores, each]]


def statistics(zoos: Sequence[Results]) -> list[str]:
    lines: list[str] = []
    for zoo in zoos:
        runs = {run["statistics"]: run for run in zoo.study("statistics").values()}
        if not runs or zoo.main is None:
            continue
        kinds = {zoo.main["statistics"]: zoo.main, **runs}
        rows = [
            [
                name,
                *(
                    _accuracy(run, name) + (f" ({interval(_to_main(run, name))})" if run is not zoo.main else "")
                    for run in kinds.values()
                ),
            ]
            for name in ("uniform", "greedy", PAPER, DEFAULT)
        ]
        lines += table([_title(zoo), *kinds], rows)
    return lines


def directions(zoos: Sequence[Results]) -> list[str]:
    """How far rounding moves the accuracy, and whether that is within one standard error."""
    rows = []
    for zoo in zoos:
        rounding: Record = zoo.value.get("rounding") or {}
        rows += [
            [_title(zoo), name, percent(one["exact"]), ("bf16" if kind == "main" else kind) + " " + _moved(one)]
            for name, found in rounding.items()
            for kind, one in found.items()
        ]
    return table(["zoo", "method", "fp32 (%)", "rounded minus fp32"], rows) if rows else []


def _moved(found: Record) -> str:
    where = "within" if abs(found["difference"][0]) <= found["error"] else "beyond"
    seeds = f"{len(found['seeds'])} seed{'s' if len(found['seeds']) > 1 else ''}"
    return f"{interval(found['difference'])}, {where} one standard error ({points(found['error'])}; {seeds})"


def _title(zoo: Results) -> str:
    return f"{zoo.zoo} {EARLIER}" if zoo.is_earlier else zoo.zoo


def _accuracy(run: Record, name: str) -> str:
    found = run["methods"].get(name)
    return "–" if found is None or found["report"] is None else percent(found["report"]["mean"])


def _to_main(run: Record, name: str) -> Sequence[float] | None:
    found = run["methods"].get(name)
    return None if found is None else found["to_main"]


def _between(run: Record, first: str, second: str) -> Sequence[float] | None:
    found: Sequence[float] | None = run["differences"].get(first, {}).get(second)
    return found


def _mean_of_main(zoo: Results, seed: int, name: str) -> float | None:
    run = zoo.runs.get(f"main-{seed}")
    found = None if run is None else run["methods"].get(name)
    return None if found is None or found["report"] is None else float(found["report"]["mean"])

"""Short tables of results in READMEs, each zoo's own and the project's, between two marks; the rest is people's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stockpot.soups.settings import LEARNED
from studies.loaded import Results
from studies.markdown import interval, percent, table
from studies.plans import DEFAULT, PAPER
from studies.tables import METHODS

BEGIN = "<!-- Results: written by `make results`. -->"
END = "<!-- End of results. -->"
SHORT = ("best", "uniform", "greedy", "learned+", PAPER, DEFAULT, "ensemble")


def update(zoo: Results, readme: Path) -> None:
    """A zoo's README: every method."""
    if readme.is_file():
        _between_marks(readme, _every_method(zoo))


def update_project(zoos: Sequence[Results], readme: Path) -> None:
    """The project's: one line per zoo. Only where the marks are."""
    if readme.is_file() and BEGIN in readme.read_text("utf-8"):
        _between_marks(readme, _one_line_each(zoos))


def _between_marks(readme: Path, lines: Sequence[str]) -> None:
    """Replace what is there, or add both at the end."""
    before, _, rest = readme.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2].removeprefix("\n")
    middle = "\n".join([BEGIN, *lines, END])
    readme.write_text(f"{before.rstrip()}\n\n{middle}\n{after}", "utf-8")


def _one_line_each(zoos: Sequence[Results]) -> list[str]:
    rows = []
    for zoo in zoos:
        found = {name: zoo.over_seeds(name) for name in SHORT}
        if found[DEFAULT] is not None:
            gains = [(found[name] or {}).get("default_minus") for name in ("best", "greedy")]
            rows.append(
                [
                    f"[{zoo.zoo}](experiments/{zoo.zoo}/), K = {zoo.models}",
                    *(percent(None if one is None else one["report"][0]) for one in found.values()),
                    *map(interval, gains),
                ]
            )
    headings = ["test accuracy in %", *SHORT, f"{DEFAULT} minus best", "minus greedy"]
    return table(headings, rows)[:-1] if rows else ["Not measured yet."]


def _every_method(zoo: Results) -> list[str]:
    rows = []
    for name in METHODS:
        found = zoo.over_seeds(name)
        if found is not None:
            low, high = (percent(end) for end in found["report"][1:3])
            accuracy = percent(found["report"][0])
            rows.append([name, accuracy, f"{low} to {high}", interval(found.get("default_minus"))])
    if not rows:
        return ["## Results", "", "Not measured yet."]
    counts = {name: len(own["seeds"]) for name in LEARNED if (own := zoo.over_seeds(name)) is not None}
    seeds, most = min(counts.values(), default=1), counts.get(DEFAULT, 1)
    more = f" ({most} of {DEFAULT})" if most > seeds else ""
    return [
        "## Results",
        "",
        f"Test accuracy in %, mean of {seeds} seed{'s' * (seeds > 1)}{more}, with 95 % intervals; differences are"
        " paired."
        " Everything else is in [docs/results.md](../../docs/results.md).",
        "",
        *table(["method", "accuracy", "95 % interval", f"{DEFAULT} minus it"], rows)[:-1],
    ]

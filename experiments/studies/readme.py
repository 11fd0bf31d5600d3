"""The short table of results in a zoo's own README, between two marks; the rest of the file is people's."""

from __future__ import annotations

from pathlib import Path

from stockpot.methods.settings import LEARNED
from studies.loaded import Results
from studies.markdown import interval, percent, table
from studies.plans import DEFAULT
from studies.tables import METHODS

BEGIN = "<!-- Results: written by `make results`. -->"
END = "<!-- End of results. -->"


def update(zoo: Results, readme: Path) -> None:
    """Replace what is between the marks, or add both at the end."""
    if not readme.is_file():
        return
    text = readme.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    middle = "\n".join([BEGIN, *_lines(zoo), END])
    readme.write_text(f"{before.rstrip()}\n\n{middle}\n{after.lstrip()}", "utf-8")


def _lines(zoo: Results) -> list[str]:
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

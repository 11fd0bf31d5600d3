"""Writes README.md, the list of all threats: `PYTHONPATH=src:tests python -m attacks.readme`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from attacks.kit import Threat
from attacks.threats_archives import ARCHIVES
from attacks.threats_data import ARRAYS, DATASETS, IMAGES, TABLES
from attacks.threats_pickles import PICKLES
from attacks.threats_recipes import RECIPES
from attacks.threats_records import SOUPS
from attacks.threats_tensors import INDEXES, PLACES, TENSORS

README = Path(__file__).with_name("README.md")
CHECKPOINT_DOORS = "`open_checkpoint`, `Pool.open`, `Soup.load`, `rebuild`, a recipe's `weights:`, `evaluate`"
PARTS: tuple[tuple[str, str, str, list[Threat]], ...] = (
    ("Pickles", "threats_pickles.py", CHECKPOINT_DOORS, PICKLES),
    ("Zip archives", "threats_archives.py", CHECKPOINT_DOORS, ARCHIVES),
    ("Safetensors headers", "threats_tensors.py", CHECKPOINT_DOORS, TENSORS),
    ("Indexes of shards", "threats_tensors.py", CHECKPOINT_DOORS, INDEXES),
    ("Places that are no files", "threats_tensors.py", CHECKPOINT_DOORS, PLACES),
    ("Saved soups", "threats_records.py", "`rebuild`, which loads them first", SOUPS),
    ("Arrays", "threats_data.py", "`data.arrays`", ARRAYS),
    ("Tables", "threats_data.py", "`data.table`", TABLES),
    ("Datasets", "threats_data.py", "`data.dataset`", DATASETS),
    ("Images", "threats_data.py", "`data.images`", IMAGES),
    ("Recipes", "threats_recipes.py", "`load_recipe`, which every command uses", RECIPES),
)
HEAD = """# Attacks

Files as a hostile stranger would make them. They are written by the scripts here when the tests run; none is
stored. Those that carry code would create a file called `marker` if anything ran it;
`test_the_payloads_are_live` shows that they are no duds. For each threat the tests demand our error with the
words below (or that it opens with the right numbers, where it is harmless), no marker, no more than 150 MB of
memory, and an end.

Not in the tables: run directories and saved states (`test_attacks_records.py`), links, FIFOs and devices planted in
runs, soups, searches and demos (`test_attacks_links.py`), model folders
(`test_attacks_models.py`), PEFT folders (`test_attacks_adapters.py`), chats, prompts, questions, tokenizers and their
templates (`test_attacks_chats.py`), names of files, tensors and
classes on their way to a terminal and into a report (`test_attacks_names.py`), and that the package has no
switch that runs a pickle (`test_attacks_switch.py`).

This page is written by `python -m attacks.readme`; a test compares.
"""


def lines() -> Iterator[str]:
    yield HEAD
    for title, file, doors, threats in PARTS:
        yield f"## {title} ({len(threats)})\n"
        yield f"Made by `{file}`; opened through {doors}.\n"
        yield "| threat | what happens |"
        yield "|---|---|"
        for threat in threats:
            happens = "opens, harmlessly" if threat.words is None else f"refused: “{threat.words}”"
            yield f"| {_cell(threat.name)} | {_cell(happens)} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "\\<")


if __name__ == "__main__":
    README.write_text("\n".join(lines()), encoding="utf-8")

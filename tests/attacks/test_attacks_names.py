"""Names of strangers: of files, tensors and classes, on their way to a terminal and into a report."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from stockpot import Pool, Task, compare
from stockpot.cli.app import app
from stockpot.report import write_report
from stockpot.run.directory import RecipeFacts

SCRIPT = "<script>alert(1)<!-- \"'&"
IMAGE = "<img src=x onerror=alert(1)>"
STEERING = "\x1b[2J\x1b]0;title\x07\x9b31m\u202egnp\u2066"  # clears the screen, sets the title, reverses the text


def _module() -> nn.Module:
    """A model whose tensors are named as a stranger would."""
    model = nn.Sequential()
    model.add_module(f"{SCRIPT}{STEERING}", nn.Linear(4, 3))
    return model


def _pool(folder: Path) -> Path:
    folder.mkdir()
    for k in range(3):
        torch.manual_seed(k)
        save_file(_module().state_dict(), folder / f"{IMAGE}{STEERING}{k}.safetensors")
    return folder


def _harmless(text: str) -> bool:
    return all(char.isprintable() or char in "\n\t" for char in text)


class _Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.handlers: list[str] = []
        self.scripts: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        if tag == "script":
            self.scripts.append(dict(attrs).get("type", "text/javascript"))
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_names_are_text_in_a_report(tmp_path: Path) -> None:
    pool = Pool.open(_pool(tmp_path / "pool"))
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    task = Task(_module(), (x, x[:, :3].argmax(1)))
    facts = RecipeFacts(f"{IMAGE}{SCRIPT}", "compare", ("stockpot", IMAGE))
    compare(pool, task, ["best", "greedy", "hl+"], steps=2, run=tmp_path / "run", recipe=facts)
    tags = _Tags()
    page = write_report(tmp_path / "run").read_text(encoding="utf-8")
    tags.feed(page)
    assert tags.scripts == ["application/json", "text/javascript"], "the charts' values, and the one that may run"
    assert "img" not in tags.found
    assert tags.handlers == []
    assert "&lt;img src=x onerror" in page, "the name is there, as text"
    assert "\x1b" not in page


@pytest.mark.parametrize("extra", [(), ("--json",)])
def test_names_cannot_steer_a_terminal(tmp_path: Path, extra: tuple[str, ...]) -> None:
    folder = _pool(tmp_path / "pool")
    answer = CliRunner().invoke(app, ["inspect", str(folder), *extra])
    assert answer.exit_code == 0, answer.stderr
    assert _harmless(answer.stdout)
    assert _harmless(answer.stderr)
    if extra:
        names = [entry["name"] for entry in json.loads(answer.stdout)["ingredients"]]
        assert names == [f"{IMAGE}{STEERING}{k}" for k in range(3)], "a program gets the name itself"
    else:
        assert "\\x1b[2J" in answer.stdout, "a person gets to see what it is"


def test_names_in_errors_cannot_steer_a_terminal(tmp_path: Path) -> None:
    folder = _pool(tmp_path / "pool")
    next(folder.iterdir()).write_bytes(b"junk")
    save_file({f"other{STEERING}": torch.zeros(1)}, folder / "last.safetensors")
    answer = CliRunner().invoke(app, ["inspect", str(folder)])
    assert answer.exit_code == 1
    assert "\\x1b[2J" in answer.stderr
    assert _harmless(answer.stderr)


def test_classes_in_errors_cannot_steer_a_terminal(tmp_path: Path) -> None:
    _pool(tmp_path / "pool")
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 4), np.float32), y=np.array(["a", "b", "a", f"c{STEERING}"]))
    (tmp_path / "toy.py").write_text("from torch import nn\ndef model():\n    return nn.Linear(4, 3)\n")
    (tmp_path / "recipe.yaml").write_text(
        "pool: {path: pool}\nmodel: {python: 'toy:model'}\noutput: {dir: run}\n"
        "data: {arrays: data.npz, features: x, label: y, classes: [a, b], fit: 1.0}\n"
    )
    answer = CliRunner().invoke(app, ["cook", str(tmp_path / "recipe.yaml")])
    assert answer.exit_code == 1
    assert "found label" in answer.stderr
    assert _harmless(answer.stderr)

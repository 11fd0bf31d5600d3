"""Help is quick, complete, and shows by example."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import stockpot as library
from cli.conftest import Stockpot
from stockpot.cli.app import app

COMMANDS = (
    "average",
    "demo",
    "inspect",
    "cook",
    "compare",
    "finetune",
    "evaluate",
    "rebuild",
    "export",
    "push",
    "report",
    "schema",
    "doctor",
)


def test_help_answers_without_loading_anything_heavy() -> None:
    # What makes it answer at once: its time, 0.2 s on an idle machine, says more about the machine than about us.
    code = (
        "import sys; from stockpot.cli import main; sys.argv = ['stockpot', '--help']\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'numpy', 'pydantic', 'matplotlib'} & set(sys.modules), 'something heavy was loaded'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


def test_every_command_is_there_once() -> None:
    assert tuple(command.callback.__name__ for command in app.registered_commands if command.callback) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples(stockpot: Stockpot, command: str) -> None:
    answer = stockpot(command, "--help")
    assert answer.code == 0
    assert "Examples:" in answer.out
    assert f"stockpot {command}" in answer.out.split("Examples:")[1]


def test_help_names_every_method(stockpot: Stockpot) -> None:
    soups = {name for name, method in library.METHODS.items() if method.soup}
    for command, methods in (("cook", soups), ("compare", set(library.METHODS))):
        assert methods <= set(re.split(r"[\s:,.()]+", stockpot(command, "--help").out.split("Examples:")[0]))


def test_version(stockpot: Stockpot) -> None:
    assert stockpot("--version").out == f"stockpot {library.__version__}\n"


@pytest.mark.parametrize("arguments", [("brew",), ("compare",), ("compare", "a.yaml", "--nope"), ("evaluate", "x")])
def test_wrong_usage_is_exit_code_2(stockpot: Stockpot, arguments: tuple[str, ...]) -> None:
    answer = stockpot(*arguments)
    assert answer.code == 2
    assert "Usage:" in answer.err
    assert "Traceback" not in answer.err

"""Data flows one way: who may import whom, and what importing stockpot costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stockpot"
# From the top down; docs/architecture.md says what is in each.
PARTS = (
    "cli",
    "recipe",
    "callbacks",
    "zoo",
    "cooking",
    "report",
    "run",
    "soups",
    "engine",
    "adapters",
    "task",
    "soup",
    "layout",
    "pool",
    "names",
    "files",
    "folders",
    "progress",
    "ranks",
    "watch",
    "signals",
    "table",
    "words",
    "events",
    "errors",
)
CORE = {"torch", "safetensors", "numpy"}  # may be imported anywhere
# Libraries whose decorators and base classes shape a part: imported at the top of its files, and nowhere else.
FRAMEWORKS = {
    "typer": "cli",
    "click": "cli",
    "pydantic": "recipe",
    "typing_extensions": "recipe",  # comes with pydantic
    "yaml": "recipe",
    "triton": "engine",
}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import, wherever it stands, as (statement, dotted name)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import of {node.module}"
            assert node.module is not None
            if node.module == "stockpot":
                yield from ((node, f"stockpot.{alias.name}") for alias in node.names)
            else:
                yield node, node.module


def test_every_module_is_in_a_part_that_the_documentation_lists_in_this_order() -> None:
    known = {*PARTS, "__init__", "__main__", "_version"}
    assert {part_of(path) for path in modules()} <= known
    text = (ROOT / "docs" / "architecture.md").read_text()
    listed = [line.split()[0] for line in text.splitlines() if line.startswith("    ") and line.split()[0] in PARTS]
    assert tuple(dict.fromkeys(listed)) == PARTS


def test_imports_go_down_only() -> None:
    wrong = []
    for path in modules():
        part = part_of(path)
        if part not in PARTS:
            continue  # the package itself, which only names its parts
        for node, name in imports(ast.parse(path.read_text())):
            if not name.startswith("stockpot."):
                continue
            target = name.split(".")[1]
            if target in PARTS and PARTS.index(target) < PARTS.index(part):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} imports {name}, which is above {part}")
            if part != "cli" and target not in PARTS and target != "_version":
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} goes through the front door for {name}")
    assert wrong == []


def test_every_file_has_a_name_of_its_own() -> None:
    """`callbacks/` names the library that a callback is for, as users write it."""
    names = Counter(path.name for path in modules() if path.name != "__init__.py")
    assert {name for name, count in names.items() if count > 1} == set()


def at_top(tree: ast.Module) -> set[ast.stmt]:
    """Imports that run when the module is loaded: not in functions, not for type checkers only."""
    found: set[ast.stmt] = set()
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ClassDef)):
            todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.add(node)
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_file_needs_itself_to_be_loaded() -> None:
    """Also within a part; what functions import when they are called, and what is for type checkers, does not count."""
    names = {name_of(path) for path in modules()}
    needs: dict[str, set[str]] = {name: set() for name in names}
    for path in modules():
        for node in at_top(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                # Of a package a file in it, or else what the package itself names.
                needs[name_of(path)] |= {
                    inner if (inner := f"{node.module}.{alias.name}") in names else node.module for alias in node.names
                }
    assert len(needs["stockpot.soups.mehl"]) >= 3  # it sees something
    order = list(TopologicalSorter(needs).static_order())  # raises a CycleError that names the circle
    assert set(order) == names


def test_other_peoples_libraries_are_imported_in_one_file_inside_functions() -> None:
    homes: dict[str, set[str]] = {}
    wrong = []
    for path in modules():
        tree = ast.parse(path.read_text())
        top = at_top(tree)
        for node, name in imports(tree):
            library = name.split(".")[0]
            if library in CORE or library == "stockpot" or library in sys.stdlib_module_names:
                continue
            place = path.relative_to(PACKAGE).as_posix()
            if library in FRAMEWORKS:
                if part_of(path) != FRAMEWORKS[library]:
                    wrong.append(f"{place}:{node.lineno} imports {library}, which is for {FRAMEWORKS[library]}")
                continue
            homes.setdefault(library, set()).add(place)
            if node in top:
                wrong.append(f"{place}:{node.lineno} imports {library} at the top")
    # The command line may draw in several files; elsewhere a library has one home.
    several = {k: sorted(v) for k, v in homes.items() if len([p for p in v if not p.startswith("cli/")]) > 1}
    assert wrong == []
    assert several == {}


def test_nothing_but_the_command_line_and_progress_prints_or_exits() -> None:
    wrong = []
    for path in modules():
        if part_of(path) in ("cli", "progress"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("print", "exit", "quit")
            ):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} calls {node.func.id}")
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.exit", "sys.stdout", "sys.stderr"):
                wrong.append(f"{path.relative_to(PACKAGE)}:{node.lineno} uses {ast.unparse(node)}")
    assert wrong == []


HEAVY = ("torch", "triton", "matplotlib", "transformers", "rich", "numpy", "pydantic", "safetensors", "typer")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import stockpot", HEAVY),
        ("import stockpot; stockpot.METHODS, stockpot.Settings, stockpot.StockpotError", HEAVY),
        (
            "from stockpot import Pool, Task, Soup, Layout, cook, compare",
            ("triton", "matplotlib", "transformers", "rich", "pydantic", "typer", "sklearn"),
        ),
    ],
)
def test_importing_pulls_in_nothing_heavy(statement: str, absent: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nsys.stdout.write(' '.join(m for m in {absent!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_the_checks_above_can_see(tmp_path: Path) -> None:
    """A layering test that finds no imports would pass for ever."""
    found = {name for path in modules() for _, name in imports(ast.parse(path.read_text()))}
    assert {"torch", "stockpot.pool", "stockpot.errors", "stockpot.task"} <= found
    tree = ast.parse(
        "import a\nif TYPE_CHECKING:\n    import b\ntry:\n    import c\nexcept E:\n    pass\ndef f():\n    import d\n"
    )
    assert {node.names[0].name for node in at_top(tree) if isinstance(node, ast.Import)} == {"a", "c"}

"""Do the tests notice small mistakes? `python -m torture.mutation_check --each 25 --seed 0 [--file pool/compare.py]`.

Every chosen module of a *copy* of the package gets one mistake at a time; the tests that reach the changed line
run until one fails. A mistake that none notices survives and is printed. Tests that hang count as failed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from torture.mutants import Mutant, mutants

ROOT = Path(__file__).parents[2]
_SOUP = ("tests/soup", "tests/layout")
_POOL = ("tests/pool", "tests/attacks/test_attacks_checkpoints.py", "tests/soup/test_soup_save.py")
_LEARN = (
    "tests/soups/test_method_blocks.py",
    "tests/soups/test_method_visits.py",
    "tests/soups/test_method_laws.py",
    "tests/soups/test_method_resume.py",
    "tests/soups/test_method_settings.py",
)
# What is checked, and the tests that ought to notice.
SUITES: dict[str, tuple[str, ...]] = {
    "soup/weights.py": (*_SOUP, "tests/soups/test_method_laws.py"),
    "soup/mix.py": _SOUP,
    "soup/build.py": _SOUP,
    "layout/layout.py": _SOUP,
    "layout/groups.py": _SOUP,
    "engine/reference.py": ("tests/engine/test_engine_directions.py", "tests/engine/test_engine_gradients.py"),
    "methods/blocks.py": _LEARN[:2],
    "methods/visits.py": _LEARN[:2],
    "methods/state.py": _LEARN[:2],
    "run/state.py": ("tests/run/test_run_state.py", "tests/attacks/test_attacks_records.py"),
    "atomic.py": ("tests/test_atomic.py", "tests/test_atomic_flush.py", "tests/soup/test_soup_save.py"),
    "small_files.py": ("tests/test_small_files.py",),
    **{
        f"pool/{name}.py": _POOL
        for name in (
            "compare", "checkpoint", "discover", "naming", "huggingface", "safetensors_format", "torch_format", "facts",
            "content", "archive", "header", "pickles", "allowed", "files", "nesting", "finite",
        )
    },
}  # fmt: skip
_SLOWEST_TEST = 3.0  # seconds; slower ones are left to the suite
_FIRST_ROUND = 20  # tests
_TIMEOUT = 90.0  # seconds, for a handful of tests that take less than one
_KILLED, _SURVIVED, _UNREACHED = "killed", "survived", "not reached by any test"


class _Reached:
    """A pytest plugin: which tests reach which lines of the checked modules, and how long they take."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files  # absolute name -> short name
        self._now: set[tuple[str, int]] = set()
        self.reached: defaultdict[str, set[str]] = defaultdict(set)  # "file:line" -> tests
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        short = self._files.get(frame.f_code.co_filename)
        if short is None:
            return None
        self._now.add((short, frame.f_lineno))

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            self._now.add((short, frame.f_lineno))
            return local

        return local

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = set()
        began = time.perf_counter()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)
        self.seconds[item.nodeid] = time.perf_counter() - began
        for file, line in self._now:
            self.reached[f"{file}:{line}"].add(item.nodeid)


class _Mistaken(importlib.abc.MetaPathFinder):
    """Hands out one module with a mistake in it; everything else comes from the copy as it is."""

    def __init__(self, module: str, file: Path, tree: ast.Module) -> None:
        self._module, self._file, self._tree = module, file, tree

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        tree = self._tree

        class Loader(importlib.machinery.SourceFileLoader):
            def get_code(self, fullname: str) -> CodeType:
                code: CodeType = compile(tree, self.path, "exec")
                return code

        loader = Loader(name, str(self._file))
        return importlib.machinery.ModuleSpec(name, loader, origin=str(self._file))


def _warm_up() -> None:
    """Load once, for all children, the libraries that package and tests use; ours are forgotten again."""
    import hypothesis  # noqa: F401
    import torch

    import stockpot
    import zoo  # noqa: F401

    torch.set_num_threads(1)
    for name in ("pool", "soup", "layout", "methods", "engine", "task", "run", "recipe", "report"):
        importlib.import_module(f"{stockpot.__name__}.{name}")
    _forget()


def _forget() -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] in ("stockpot", "zoo")]:
        del sys.modules[name]


def _pytest(copy: Path, arguments: list[str], plugins: list[Any]) -> int:
    """In a forked child: quiet, in the copy, with the copy's package."""
    os.chdir(copy)
    _forget()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        (str(copy / "src"), str(copy / "tests"))
    )  # for tests' own children
    sys.path[:] = [str(copy / "src"), str(copy / "tests"), *(p for p in sys.path if str(ROOT) not in p)]
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory(prefix="mutant-") as base:
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
            "--basetemp",
            f"{base}/t",
            "-o",
            "addopts=",
        ]
        return int(pytest.main([*options, *arguments], plugins=plugins))


def _reach(copy: Path, names: list[str]) -> tuple[dict[str, set[str]], dict[str, float]]:
    """One run of all tests under a tracer, in a child of its own."""
    out = copy / "reached.json"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            plugin = _Reached({str(copy / "src" / "stockpot" / name): name for name in names})
            tests = sorted({test for name in names for test in SUITES[name]})
            _pytest(copy, [*tests, "--timeout", "600"], [plugin])
            reached = {place: sorted(there - plugin.failed) for place, there in plugin.reached.items()}
            facts = {"reached": reached, "seconds": plugin.seconds, "failed": sorted(plugin.failed)}
            out.write_text(json.dumps(facts))
            code = 0
        except BaseException:
            out.with_suffix(".txt").write_text(traceback.format_exc())
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    if not out.exists():
        raise SystemExit(out.with_suffix(".txt").read_text())
    found = json.loads(out.read_text())
    for test in found["failed"]:
        print(f"left out, because it fails without any mistake: {test}")
    return {place: set(tests) for place, tests in found["reached"].items()}, found["seconds"]


def _tests_for(
    name: str, mutant: Mutant, reached: dict[str, set[str]], seconds: dict[str, float]
) -> list[list[str]]:
    """The tests that reach the changed lines, in two rounds: the fastest of them, and if need be all the others.

    For lines that run at import these are all tests that reach the module.
    """
    first, last = mutant.lines
    found = {test for line in range(first, last + 1) for test in reached.get(f"{name}:{line}", ())}
    if not found and not _inside_a_function(mutant):
        found = {test for place, tests in reached.items() if place.startswith(f"{name}:") for test in tests}
    quick = sorted((test for test in found if seconds[test] < _SLOWEST_TEST), key=lambda test: seconds[test])
    return [part for part in (quick[:_FIRST_ROUND], quick[_FIRST_ROUND:]) if part]


def _inside_a_function(mutant: Mutant) -> bool:
    functions = [n for n in ast.walk(mutant.tree) if isinstance(n, ast.FunctionDef)]
    return any(f.body[0].lineno <= mutant.lines[0] <= (f.end_lineno or 0) for f in functions)


def _start(copy: Path, name: str, mutant: Mutant, tests: list[str]) -> int:
    child = os.fork()
    if child:
        return child
    code = 3
    try:
        os.setsid()
        file = copy / "src" / "stockpot" / name
        module = "stockpot." + name.removesuffix(".py").replace("/", ".")
        sys.meta_path.insert(0, _Mistaken(module, file, mutant.tree))
        code = _pytest(copy, ["-x", *tests], [])
    finally:
        os._exit(min(code, 100))


Job = tuple[str, Mutant, list[list[str]]]


def _check(copy: Path, jobs: list[Job], workers: int) -> Iterator[tuple[str, Mutant, str]]:
    running: dict[int, tuple[Job, float]] = {}
    waiting = list(jobs)
    while waiting or running:
        while waiting and len(running) < workers:
            name, mutant, rounds = waiting.pop(0)
            if not rounds:
                yield name, mutant, _UNREACHED
                continue
            running[_start(copy, name, mutant, rounds[0])] = ((name, mutant, rounds[1:]), time.monotonic())
        for child, ((name, mutant, rounds), began) in list(running.items()):
            done, status = os.waitpid(child, os.WNOHANG)
            if not done and time.monotonic() - began > _TIMEOUT:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                done, status = os.waitpid(child, 0)
            if done:
                del running[child]
                if status == 0 and rounds:
                    waiting.insert(0, (name, mutant, rounds))
                else:
                    yield name, mutant, _SURVIVED if status == 0 else _KILLED
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=25, help="mistakes per module, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--file", action="append", default=[], help="only these modules, such as pool/compare.py"
    )
    parser.add_argument("--only", type=int, nargs="*", help="only mistakes with these numbers")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--least", type=float, default=0.95, help="share that must be noticed")
    given = parser.parse_args()
    _warm_up()
    with tempfile.TemporaryDirectory(prefix="mutation-check-") as place:
        copy = Path(place).resolve()
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        for part in ("pyproject.toml", "docs", "README.md"):
            source = ROOT / part
            shutil.copytree(source, copy / part) if source.is_dir() else shutil.copy(source, copy / part)
        names = given.file or list(SUITES)
        reached, seconds = _reach(copy, names)
        print(f"{len(seconds)} tests", flush=True)
        jobs: list[Job] = []
        for name in names:
            made = mutants((copy / "src" / "stockpot" / name).read_text())
            if given.only is not None:
                made = [mutant for mutant in made if mutant.number in given.only]
            elif given.each and len(made) > given.each:
                made = random.Random(f"{given.seed}.{name}").sample(made, given.each)
            jobs += [(name, mutant, _tests_for(name, mutant, reached, seconds)) for mutant in made]
        counts: defaultdict[str, dict[str, int]] = defaultdict(
            lambda: {_KILLED: 0, _SURVIVED: 0, _UNREACHED: 0}
        )
        for name, mutant, happened in _check(copy, jobs, given.workers):
            counts[name][happened] += 1
            if happened != _KILLED:
                print(f"{happened}: {name} #{mutant.number} {mutant}", flush=True)
    killed = sum(count[_KILLED] for count in counts.values())
    total = sum(sum(count.values()) for count in counts.values())
    for name, count in counts.items():
        print(f"{name:32} {count[_KILLED]:4} of {sum(count.values()):4} noticed")
    print(f"{killed} of {total} mistakes noticed ({100 * killed / max(total, 1):.1f} %), seed {given.seed}")
    return 0 if killed >= given.least * total else 1


if __name__ == "__main__":
    sys.exit(main())

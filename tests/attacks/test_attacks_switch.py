"""There is no switch: nothing in the package can open a pickle in a way that runs it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "stockpot"


def _calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def _problems(path: Path) -> Iterator[str]:
    for call, name in _calls(path):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        place = f"{path.name}:{call.lineno}: {name}"
        if name in ("torch.load", "load") and "weights_only" in given and given["weights_only"] != "True":
            yield f"{place} with weights_only={given['weights_only']}"
        if name == "torch.load" and "weights_only" not in given:
            yield f"{place} without weights_only"
        if "allow_pickle" in given and given["allow_pickle"] != "False":
            yield f"{place} with allow_pickle={given['allow_pickle']}"
        if name in ("np.load", "numpy.load", "np.lib.format.read_array") and "allow_pickle" not in given:
            yield f"{place} without allow_pickle"
        if given.get("trust_remote_code", "False") != "False":
            yield f"{place} with trust_remote_code"
        forbidden = ("pickle.load", "pickle.loads", "torch.jit.load", "yaml.load", "yaml.unsafe_load", "joblib.load")
        if name in (*forbidden, "dill.load", "dill.loads", "eval", "exec", "marshal.loads", "shelve.open"):
            yield place
        if name.endswith("add_safe_globals"):
            yield place
        if name == "pickle.Unpickler":
            yield place


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_nothing_opens_a_pickle_without_care() -> None:
    assert [problem for path in _files() for problem in _problems(path)] == []


@pytest.mark.parametrize("words", ["weights_only=False", "allow_pickle=True", "UnsafeLoader", "trust_remote_code=True"])
def test_the_words_are_nowhere(words: str) -> None:
    assert [path.name for path in _files() if words in path.read_text()] == []


def test_there_is_no_unpickler_of_our_own() -> None:
    found = []
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
                found.append(path)
            if isinstance(node, ast.ImportFrom) and node.module == "pickle":
                found.append(path)
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path, weights_only=False)",
        "torch.load(path)",
        "torch.load(path, weights_only=careful)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "pickle.loads(content)",
        "yaml.load(text)",
        "torch.serialization.add_safe_globals([evil])",
        "AutoModel.from_pretrained(path, trust_remote_code=allowed)",
    ],
)
def test_the_search_would_find_it(line: str, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(line)
    assert list(_problems(tmp_path / "code.py"))

"""Bad input, from the outside: each item of the list gets an error of ours that names object, expectation, finding
and fix, and leaves nothing half-written.

| item | here | and in detail in |
|---|---|---|
| no files match | test_no_files_match | tests/pool/test_pool_open.py |
| one ingredient only | test_one_ingredient_only | tests/pool/test_pool_open.py |
| mismatched pools | test_mismatched_pool | tests/pool/test_pool_open.py |
| corrupt, truncated, empty file | test_broken_files | tests/pool/test_pool_bad_files.py |
| pickle with code in it | test_pickle_with_code | tests/pool/test_pool_bad_files.py |
| NaN or Inf in a checkpoint | test_weights_that_are_not_finite | tests/pool/test_pool_facts.py |
| unknown method | test_unknown_method | tests/soups/test_settings.py |
| unknown preset | test_unknown_preset | tests/soups/test_settings.py |
| unknown granularity | test_unknown_granularity | tests/layout/test_layout.py |
| b < 1 | test_block_size_below_one | tests/soups/test_settings.py |
| b > K | test_block_size_above_the_pool | tests/soups/test_settings.py |
| empty data | test_empty_data | tests/task/test_data.py |
| labels out of range | test_labels_out_of_range | tests/task/test_checks.py |
| model that lacks the pool's tensors, or has others | test_another_model | tests/task/test_checks.py |
| non-finite loss | test_loss_that_is_not_finite | tests/soups/test_skipped_steps.py |
| loss that ignores the model | test_loss_that_ignores_the_model | tests/task/test_checks.py |
| too little data for the folds | test_too_little_data_for_the_folds | tests/task/test_order.py |
| ingredients that changed | test_changed_ingredient | tests/soup/test_soup_save.py |
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from stockpot import Pool, Soup, StockpotError, Task, cook
from stockpot.errors import (
    CheckpointError,
    DataError,
    DigestError,
    LearningError,
    MethodError,
    MismatchError,
    PoolError,
    TaskError,
)
from zoo import fine_tunes, mlp, same, samples, write, zoo

SHAPE = re.compile(r".+: expected .+, found .+\n  Fix: .+", re.DOTALL)
BRIEF: dict[str, Any] = {"steps": 2, "batch_size": 8}


@contextmanager
def refused(folder: Path, kind: type[StockpotError], *texts: str) -> Iterator[None]:
    """An error of this kind, with these words, in the one shape of our messages; no file appears or changes."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with pytest.raises(kind) as caught:
        yield
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    message = str(caught.value)
    assert SHAPE.search(message), message
    for text in texts:
        assert text in message


def test_every_row_of_the_table_has_its_tests() -> None:
    rows = re.findall(r"^\| .+? \| (test_\w+) \| (tests/\S+) \|$", __doc__ or "", re.MULTILINE)
    own = {node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert len(rows) == 18
    assert {name for name, _ in rows} == own - {"refused", "test_every_row_of_the_table_has_its_tests"}
    assert [place for _, place in rows if not (Path(__file__).parents[1] / place).is_file()] == []


def test_no_files_match(tmp_path: Path) -> None:
    with refused(tmp_path, PoolError, "*.safetensors", "no files match"):
        Pool.open(str(tmp_path / "*.safetensors"))


def test_one_ingredient_only(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "only.safetensors")
    with refused(tmp_path, PoolError, "expected at least two ingredients, found only one", "only.safetensors"):
        Pool.open(tmp_path)


def test_mismatched_pool(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2), "b": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(3), "c": torch.zeros(1)}, tmp_path / "b.safetensors")
    with refused(tmp_path, MismatchError, "b.safetensors", "w", "[3]", "[2]"):
        Pool.open(tmp_path)


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pt"])
@pytest.mark.parametrize("content", [b"", b"not a model at all", b"cut"], ids=["empty", "corrupt", "truncated"])
def test_broken_files(tmp_path: Path, name: str, content: bytes) -> None:
    state = fine_tunes(mlp, 1)[0]
    save_file(state, tmp_path / "good.safetensors")
    path = tmp_path / name
    if content == b"cut":
        (torch.save if path.suffix == ".pt" else save_file)(state, path)
        content = path.read_bytes()[:-100]
    path.write_bytes(content)
    with refused(tmp_path, CheckpointError, name):
        Pool.open(tmp_path)


class Evil:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("import pathlib; pathlib.Path('hacked').touch()",)


def test_pickle_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.zeros(2), "x": Evil()}, tmp_path / "evil.pt")
    torch.save({"w": torch.zeros(2)}, tmp_path / "good.pt")
    with refused(tmp_path, CheckpointError, "evil.pt"):
        Pool.open(tmp_path)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    states = fine_tunes(mlp, 3)
    states[1]["0.bias"][2] = torch.nan
    pool = write(tmp_path, states)
    with refused(tmp_path, PoolError, "model_1", "0.bias"):
        pool.verify_finite()


def test_unknown_method(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    with refused(tmp_path, MethodError, "method 'gredy': expected one of best, crossfit,", "did you mean 'greedy'?"):
        cook(pool, task, "gredy")


def test_unknown_preset(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    with refused(tmp_path, MethodError, "preset 'author': expected one of authors, paper", "did you mean 'authors'?"):
        cook(pool, task, "mehl", preset="author")


def test_unknown_granularity(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    with refused(tmp_path, MethodError, "granularity 'layers': expected one of block, model, module, tensor"):
        cook(pool, task, "mehl", granularity="layers")


def test_block_size_below_one(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    with refused(tmp_path, MethodError, "setting block_size: expected at least 1", "found 0"):
        cook(pool, task, "mehl", block_size=0)


def test_block_size_above_the_pool(tmp_path: Path) -> None:
    pool, task = zoo(tmp_path)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    with refused(tmp_path, MethodError, "expected at most K = 4, the number of ingredients, found 5"):
        cook(pool, task, "mehl", block_size=5)
    assert same(task.model.state_dict(), before)


@pytest.mark.parametrize("data", [(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long)), []], ids=["tensors", "list"])
def test_empty_data(tmp_path: Path, data: Any) -> None:
    with refused(tmp_path, DataError, "fit data"):
        Task(mlp(), data)


def test_labels_out_of_range(tmp_path: Path) -> None:
    x, y = samples()
    with refused(tmp_path, DataError, "labels of fit data: expected 0 to 2", "found 3 at index", "subtract 1"):
        Task(mlp(), (x, y + 1))


def test_another_model(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    small = nn.Sequential(nn.Linear(6, 3))
    with refused(tmp_path, TaskError, "model Sequential: expected the pool's 4 tensors", "the model lacks 2: 2.bias"):
        cook(pool, Task(small, samples()), "uniform")
    large = nn.Sequential(*mlp().children(), nn.Linear(3, 3))
    with refused(tmp_path, TaskError, "the model has 2 more: 3."):
        cook(pool, Task(large, samples()), "uniform")
    with refused(tmp_path, TaskError, "3 with other shapes", "0.weight: model (9, 6), pool (8, 6)"):
        cook(pool, Task(mlp(hidden=9), samples()), "uniform")


def test_loss_that_is_not_finite(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    calls = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.append(1)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1 if len(calls) < 3 else torch.inf)

    with refused(
        tmp_path, LearningError, "learning at block 1 of 1, step 3", "loss and gradient are finite", "3 of 3 skipped"
    ):
        cook(pool, Task(mlp(), samples(), loss=loss), "mehl", steps=4, batch_size=8)
    with refused(tmp_path, TaskError, "loss at the start: expected a finite number, found inf"):
        cook(pool, Task(mlp(), samples(), loss=loss), "mehl", **BRIEF)


@pytest.mark.parametrize("way", ["constant", "detached", "another model"])
def test_loss_that_ignores_the_model(tmp_path: Path, way: str) -> None:
    pool, _ = zoo(tmp_path)
    other = mlp()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if way == "constant":
            return torch.tensor(1.0)
        if way == "detached":
            return model(batch[0]).detach().mean()  # type: ignore[no-any-return]
        return other(batch[0]).mean()  # type: ignore[no-any-return]

    with refused(tmp_path, TaskError, "loss: expected a value that depends on the model's parameters"):
        cook(pool, Task(mlp(), samples(), loss=loss), "mehl", **BRIEF)


def test_too_little_data_for_the_folds(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path)
    with refused(tmp_path, DataError, "folds of fit data: expected at least 8 samples for 4 folds, found 5"):
        cook(pool, Task(mlp(), samples(5)), **BRIEF)


def test_changed_ingredient(tmp_path: Path) -> None:
    pool, _ = zoo(tmp_path / "pool")
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    write(tmp_path / "pool", fine_tunes(mlp, 4, seed=1))
    with refused(tmp_path, DigestError, "4 of 4 ingredients: expected the content the soup was made of"):
        Soup.load(saved)

"""An error in code of the user's says whose it is, where it happened, and with which shapes it was called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stockpot import Metric, Pool, Task, cook
from stockpot.adapters.code import call_code
from stockpot.errors import TaskError
from stockpot.task.batches import sketch

from .models import blobs, linear

X, Y = blobs()
GIVEN = r"called with \(float32 \(8, 4\), int64 \(8,\)\)"


class Broken(nn.Module):
    """Fails for a batch of `size`, and for any if that is None."""

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.net, self.size = linear(), size

    def forward(self, x: Tensor) -> Any:
        if self.size in (None, len(x)):
            return self.net(x.reshape(-1, 5))
        return self.net(x)


class Files(Dataset[Any]):
    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise OSError(f"image {index} is broken")
        return X[index], Y[index]


def collate(samples: list[Any]) -> Any:
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y, _ in samples])


def batches() -> Iterator[Any]:
    yield X[:30], Y[:30]
    raise EOFError("the second file ends here")


def no_loss(model: nn.Module, batch: Any) -> Tensor:
    return batch["x"]  # type: ignore[no-any-return]


def no_score(outputs: Tensor, batch: Any) -> Tensor:
    return torch.add(outputs, batch[1])


CASES: dict[str, tuple[Callable[[], Any], str, str, type[Exception]]] = {
    "model": (
        lambda: Task(Broken(), (X, Y)),
        r"model Broken: expected outputs for a batch, found RuntimeError: shape .*" + GIVEN,
        "self.net(x.reshape(-1, 5))",
        RuntimeError,
    ),
    "model, under a loss of torch": (
        lambda: Task(Broken(), (X, X[:, :3]), loss=nn.MSELoss(), metric="loss"),
        r"model Broken: expected outputs for a batch, .*called with \(float32 \(8, 4\), float32 \(8, 3\)\)",
        "self.net(x.reshape(-1, 5))",
        RuntimeError,
    ),
    "loss": (
        lambda: Task(linear(), (X, Y), loss=no_loss, metric="loss"),
        r"loss, which is your own code: .* found TypeError: .*called with Sequential, " + GIVEN[len("called with ") :],
        'batch["x"]',
        TypeError,
    ),
    "metric": (
        lambda: Task(linear(), (X, Y), metric=no_score),
        r"metric no_score, .* found RuntimeError: .*called with float32 \(8, 3\), \(float32",
        "torch.add(outputs, batch[1])",
        RuntimeError,
    ),
    "reduction": (
        lambda: Task(linear(), (X, Y), metric=Metric("m", lambda o, b: o, lambda t: t.no)).score().value,  # type: ignore[attr-defined]
        r"reduction of metric m, .* found AttributeError: .*called with float64 \(60, 3\)",
        "t.no",
        AttributeError,
    ),
    "collate_fn": (
        lambda: Task(linear(), DataLoader(TensorDataset(X, Y), collate_fn=collate, batch_size=6)),
        r"collate_fn of the fit data, which is your own code: .*ValueError: not enough values .*"
        r"called with \[\(float32 \(4,\), int64 \(\)\), .*, \.\.\. 8 in all\]",
        "for _, y, _ in samples",
        ValueError,
    ),
    "first sample": (
        lambda: Task(linear(), Files(0)),
        "fit data, Files, which is your own code: .*OSError: image 0 is broken",
        "raise OSError",
        OSError,
    ),
    "later sample": (
        lambda: Task(linear(), (X, Y), Files(33)),
        "report data, Files, which is your own code: .*OSError: image 33 is broken",
        "raise OSError",
        OSError,
    ),
    "batches": (
        lambda: Task(linear(), batches()),
        "fit data, generator, which is your own code: .*EOFError: the second file ends here",
        "raise EOFError",
        EOFError,
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_it_says_whose_code_failed_where_and_on_what(case: str) -> None:
    call, text, line, cause = CASES[case]
    with pytest.raises(TaskError, match=f"(?s){text}") as error:
        call()
    assert isinstance(error.value.__cause__, cause)
    assert line in str(error.value)
    assert f"in {__file__}, line " in str(error.value)


def test_an_error_while_learning_is_told_with_the_batch_it_came_from() -> None:
    pool = Pool.open([Broken().state_dict(), Broken().state_dict()])
    task = Task(Broken(20), (X, Y), batch_size=30)
    with pytest.raises(TaskError, match=r"(?s)model Broken: .*called with \(float32 \(20, 4\), int64 \(20,\)\)"):
        cook(pool, task, "hl", batch_size=20, steps=2)


def test_a_function_of_a_recipe_is_told_with_what_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "mine_that_fails.py").write_text("def build(width, names):\n    return width['x']\n")
    text = r"(?s)python: mine_that_fails:build, which is your own code: .*TypeError: .*called with int, \[str, str\]"
    with pytest.raises(TaskError, match=text) as error:
        call_code("mine_that_fails:build", tmp_path, 3, names=["a", "b"])
    assert "line 2: return width['x']" in str(error.value)
    assert isinstance(error.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((X, Y), "(float32 (60, 4), int64 (60,))"),
        ({"ids": Y, "names": ["a"] * 9}, "{ids: int64 (60,), names: [str, str, str, str, str, str, ... 9 in all]}"),
        ([np.zeros((2, 3)), None, 1.5], "[array float64 (2, 3), NoneType, float]"),
        (torch.zeros(2, device="meta"), "float32 (2,) on meta"),
        ({str(k): k for k in range(9)}, "{0: int, 1: int, 2: int, 3: int, 4: int, 5: int, ...}"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
def test_what_was_given_is_types_and_shapes(given: Any, text: str) -> None:
    assert sketch(given) == text

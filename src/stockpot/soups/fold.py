"""A fold: one set of coefficients, the data it learns from, and how it is written down and read again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stockpot.errors import RunError
from stockpot.soups.mehl import State, weights
from stockpot.soups.problem import finite
from stockpot.task import Data

BlockStart = tuple[State, float]  # a fold's state before its block began, and its best loss then


@dataclass
class Fold:
    """One set of coefficients, the data it learns from, and how it does on the data left out."""

    number: int
    data: Data
    held_out: Data | None = None
    start: tuple[int, ...] | None = None  # it begins at the mean of these ingredients; None: of all
    state: State = field(init=False)
    best: Tensor | None = None  # (b, G) of the block under way
    best_beta: float | None = None
    best_loss: float = math.inf
    taken: int = 0  # steps in this block, skipped ones too
    taken_before: int = 0  # steps in earlier blocks
    skipped: int = 0  # steps in this block
    skipped_before: int = 0  # steps in earlier blocks

    def block_start(self) -> BlockStart:
        """What the fold goes back to when the block that comes next cannot be finished."""
        return replace(self.state, alpha=self.state.alpha.clone()), self.best_loss


def average(folds: Sequence[Fold], simplex: bool) -> tuple[Tensor, float | None]:
    """A soup is linear in its mixing weights, so the mean of the folds' is a soup too, and usually a better one."""
    W = torch.stack([weights(fold.state.alpha, simplex) for fold in folds]).mean(dim=0)
    betas = [fold.state.beta for fold in folds if fold.state.beta is not None]
    return W, sum(betas) / len(betas) if betas else None


# What is saved of folds that are not finished ------------------------------------------------------------


Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and plain JSON values


def fold_states(folds: Sequence[Fold], at_block: Mapping[int, BlockStart]) -> Saved:
    """Everything the next step of these folds depends on, by their numbers."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for fold in folds:
        n, s = fold.number, fold.state
        first, loss = at_block[n]
        tensors |= {f"{n}.alpha": s.alpha.clone(), f"{n}.at_block": first.alpha}
        if s.optimiser is not None:
            tensors |= {f"{n}.optimiser.{name}": value for name, value in s.optimiser.save().items()}
        if fold.best is not None:
            tensors[f"{n}.best"] = fold.best
        values[str(n)] = {
            "t": s.t,
            "j": s.j,
            "beta": s.beta,
            "pace": s.pace,
            "best_beta": fold.best_beta,
            "best_loss": finite(fold.best_loss),
            "counts": [fold.taken, fold.taken_before, fold.skipped, fold.skipped_before],
            "at_block": [first.t, first.beta, finite(loss)],
        }
    return tensors, {"folds": values}


def restore_folds(
    folds: Sequence[Fold], tensors: Mapping[str, Tensor], values: Mapping[str, Any]
) -> dict[int, BlockStart]:
    """Make folds what they were when `fold_states` wrote them down; returns where their blocks began, by number."""
    at_block = {}
    for fold in folds:
        kept = values["folds"].get(str(fold.number))
        if kept is None:
            continue  # another rank had it, and ended before it saved
        n = f"{fold.number}."
        moments = {
            name.removeprefix(f"{n}optimiser."): value
            for name, value in tensors.items()
            if name.startswith(f"{n}optimiser.")
        }
        fold.state = State(
            tensors[f"{n}alpha"], kept["beta"], kept["t"], kept["j"], kept["pace"], saved=moments or None
        )
        fold.best, fold.best_beta = tensors.get(f"{n}best"), kept["best_beta"]
        fold.best_loss = _loss(kept["best_loss"])
        fold.taken, fold.taken_before, fold.skipped, fold.skipped_before = kept["counts"]
        t, beta, loss = kept["at_block"]
        at_block[fold.number] = (State(tensors[f"{n}at_block"], beta, t), _loss(loss))
    return at_block


def merged(parts: Sequence[Saved]) -> Saved:
    """What several ranks saved of their folds, as one of them alone would have; of each fold where it got furthest.

    Where memory was short, blocks were cut and begun again: then only what is as new as the last part counts. All else
    is as the last part says.
    """
    parts = [part for part in parts if part[1]["blocks"] == parts[-1][1]["blocks"]]
    tensors: dict[str, Tensor] = {}
    folds: dict[str, dict[str, Any]] = {}
    history: list[Tensor] = []
    for n in sorted({n for _, values in parts for n in values["folds"]}, key=int):
        holding = [part for part in parts if n in part[1]["folds"]]
        found, values = max(holding, key=lambda part: (part[1]["folds"][n]["t"], part[1]["folds"][n]["j"]))
        folds[n] = values["folds"][n]
        tensors |= {name: value for name, value in found.items() if name.startswith(f"{n}.")}
        rows = found["history"]  # (entries, 6): kind, block, fold, ...
        history.append(rows[rows[:, 2] == int(n)])
    return {**tensors, "history": torch.cat(history)}, {**parts[-1][1], "folds": folds}


def _loss(value: float | None) -> float:
    return math.inf if value is None else value


def check_same_settings(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """What was learned one way is not continued in another, as after an update that changed a default."""
    if saved == now:
        return
    keys = [key for key in now if (saved or {}).get(key) != now[key]]
    found = ", ".join(f"{key} {(saved or {}).get(key)!r}, now {now[key]!r}" for key in keys) or "others"
    raise RunError.of(
        "the saved state of an unfinished method",
        expected="the settings that are to be used now",
        found=found,
        fix="start anew (cook and compare: --overwrite), or go on with the version of stockpot that began it",
    )

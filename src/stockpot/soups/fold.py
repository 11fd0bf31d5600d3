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

FORMAT = 2  # of saved states; another one wherever what is saved changes
SHOWN = 5  # classes named in one note
_ANEW = "start anew (cook and compare: --overwrite), or go on with the version of stockpot that began it"
Moments = dict[str, Tensor]  # all that an optimiser's next step depends on: AdamW.save


@dataclass
class Fold:
    """One set of coefficients, the data it learns from, and how it does on the data left out."""

    number: int
    data: Data
    held_out: Sequence[Data] = ()  # what it leaves out, in two parts where that can be
    state: State = field(init=False)
    at_block: State = field(init=False)  # where the block under way began, and begins again if it cannot be finished
    # Of the block under way, where data is left out (soups/stopping.py):
    losses: list[list[float]] = field(default_factory=list)  # at every judgement, of each part
    decided: int = 0  # judgements that something followed from
    judged: Moments | None = None  # what was judged last
    best: Moments | None = None  # what was judged when all folds together were best
    unseen: list[Tensor] = field(default_factory=list)  # (b, G) for each part, what was best on the other one
    taken: int = 0  # steps, skipped ones too
    skipped: int = 0

    def set_out(self) -> None:
        """A block begins here."""
        self.at_block = replace(self.state, alpha=self.state.alpha.clone())

    def forget(self) -> None:
        """Nothing of a block is known."""
        self.losses, self.decided, self.judged, self.best, self.taken, self.skipped = [], 0, None, None, 0, 0

    def begin(self, moments: Moments, block: Sequence[int]) -> None:
        """Go on from there."""
        s = self.state
        s.saved = moments
        s.alpha[block] = coefficients(moments["x"], block, s).to(s.alpha)
        s.beta = None if s.beta is None else float(moments["x"][-1])


def coefficients(x: Tensor, block: Sequence[int], state: State) -> Tensor:
    """The alpha (b, G) of what an optimiser holds."""
    return x[: len(block) * state.alpha.shape[1]].view(len(block), -1)


def halves_of(data: Data, outside: Tensor) -> list[Tensor]:
    """What a fold leaves out in two parts, or in one where that is a single group."""
    units = torch.arange(len(outside))
    if data.groups is not None:
        units = torch.unique(data.groups[outside], return_inverse=True)[1]
    return [half for half in (outside[units % 2 == 0], outside[units % 2 == 1]) if len(half)]


def thin_classes(labels: Tensor | None, folds: int) -> tuple[str, ...]:
    """Classes that some fold is judged without, however they are spread."""
    if labels is None:
        return ()
    classes, counts = torch.unique(labels[labels >= 0], return_counts=True)
    thin = [str(label) for label in classes[counts < folds].tolist()]
    if not thin:
        return ()
    more = f" and {len(thin) - SHOWN} more" if len(thin) > SHOWN else ""
    which = f"class {thin[0]} has" if len(thin) == 1 else f"classes {', '.join(thin[:SHOWN])}{more} have"
    return (f"{which} fewer than {folds} samples: some of the {folds} folds are judged without",)


def average(folds: Sequence[Fold], simplex: bool) -> tuple[Tensor, float | None]:
    """A soup is linear in its mixing weights, so the mean of the folds' is a soup too, and usually a better one."""
    W = torch.stack([weights(fold.state.alpha, simplex) for fold in folds]).mean(dim=0)
    betas = [fold.state.beta for fold in folds if fold.state.beta is not None]
    return W, sum(betas) / len(betas) if betas else None


# What is saved of folds that are not finished ------------------------------------------------------------


Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and plain JSON values


def fold_states(folds: Sequence[Fold]) -> Saved:
    """Everything the next step of these folds depends on, by their numbers."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for fold in folds:
        n, s = fold.number, fold.state
        first = fold.at_block
        tensors |= {f"{n}.alpha": s.alpha.clone(), f"{n}.at_block": first.alpha}
        tensors |= {f"{n}.unseen.{part}": unseen for part, unseen in enumerate(fold.unseen)}
        optimiser = s.saved if s.optimiser is None else s.optimiser.save()
        for part, moments in (("optimiser", optimiser), ("judged", fold.judged), ("best", fold.best)):
            tensors |= {f"{n}.{part}.{name}": value.clone() for name, value in (moments or {}).items()}
        values[str(n)] = {
            "t": s.t,
            "j": s.j,
            "beta": s.beta,
            "pace": s.pace,
            "losses": [[finite(loss) for loss in parts] for parts in fold.losses],
            "decided": fold.decided,
            "counts": [fold.taken, fold.skipped],
            "at_block": [first.t, first.beta],
        }
    return tensors, {"folds": values, "format": FORMAT}


def check_format(values: Mapping[str, Any]) -> None:
    """A state that another version has saved in another way is not read."""
    if values.get("format") != FORMAT:
        raise RunError.of(
            "the saved state of an unfinished method",
            expected=f"format {FORMAT}, that of this version",
            found="none" if values.get("format") is None else f"format {values['format']}",
            fix=_ANEW,
        )


def restore_folds(folds: Sequence[Fold], tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Make folds what they were when `fold_states` wrote them down."""
    for fold in folds:
        kept = values["folds"].get(str(fold.number))
        if kept is None:
            continue  # another rank had it, and ended before it saved
        n = fold.number
        moments = {
            part: {name.split(".")[2]: value for name, value in tensors.items() if name.startswith(f"{n}.{part}.")}
            for part in ("optimiser", "judged", "best")
        }
        saved = moments["optimiser"] or None
        fold.state = State(tensors[f"{n}.alpha"].clone(), kept["beta"], kept["t"], kept["j"], kept["pace"], saved=saved)
        fold.judged, fold.best = moments["judged"] or None, moments["best"] or None
        fold.unseen = [tensors[f"{n}.unseen.{part}"] for part in range(2) if f"{n}.unseen.{part}" in tensors]
        fold.losses = [[math.inf if loss is None else loss for loss in parts] for parts in kept["losses"]]
        fold.decided = kept["decided"]
        fold.taken, fold.skipped = kept["counts"]
        t, beta = kept["at_block"]
        fold.at_block = State(tensors[f"{n}.at_block"], beta, t)


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
        found, values = max(holding, key=lambda part: _how_far(part[1]["folds"][n]))
        folds[n] = values["folds"][n]
        tensors |= {name: value for name, value in found.items() if name.startswith(f"{n}.")}
        rows = found["history"]  # (entries, 6): kind, block, fold, ...
        history.append(rows[rows[:, 2] == int(n)])
    return {**tensors, "history": torch.cat(history)}, {**parts[-1][1], "folds": folds}


def _how_far(values: Mapping[str, Any]) -> tuple[int, ...]:
    return values["t"], values["j"], len(values["losses"]), values["decided"]


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
        fix=_ANEW,
    )

"""The average of what folds learned, where folds go different ways.

A soup is linear in its coefficients, so the average of F coefficient matrices is a soup too, and usually a better one
than theirs. That takes soups between which the loss has no hill. Folds that set out from one place have none between
them; folds that set out from different places may. So the average of all has to be at least as good, in loss on the
fitting data, as the averages of each kind are on average; on a loss without hills it always is (Jensen). Where it is
not, the kind with the lowest held-out loss is kept alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import Settings
from stockpot.methods.starts import kind
from stockpot.methods.track import Track, in_turn


@dataclass(frozen=True)
class Average:
    W: Tensor  # (K, G)
    tracks: Sequence[Track]  # those that are in it
    record: dict[str, Any] | None = None  # None: nothing had to be decided
    note: str | None = None


def average(kitchen: Kitchen, live: Live, settings: Settings, tracks: Sequence[Track]) -> Average:
    """Of all tracks, or of one kind of them."""
    kinds = _kinds(settings, tracks)
    W = _mean([track.W for track in tracks])
    if len(kinds) == 1:
        return Average(W, tracks)
    together = _loss(kitchen, live, tracks)
    apart = {name: _loss(kitchen, live, own) for name, own in kinds.items()}
    on_average = sum(apart[name] * len(own) for name, own in kinds.items()) / len(tracks)
    held_out = {name: sum(t.held_out_loss for t in own) / len(own) for name, own in kinds.items()}
    kept = None if together <= on_average else min(held_out, key=held_out.__getitem__)
    record = {"together": together, "apart": apart, "held_out": held_out, "kept": kept or "all"}
    kitchen.listen(Event("average", record))
    if kept is None:
        return Average(W, tracks, record)
    note = (
        f"only the folds {kept} are in this soup: averaged with the others they have a loss of {together:.4g} on"
        f" the fitting data, apart {on_average:.4g}"
    )
    return Average(_mean([track.W for track in kinds[kept]]), kinds[kept], record, note)


def _kinds(settings: Settings, tracks: Sequence[Track]) -> dict[str, list[Track]]:
    """Folds that set out from the same soup and move models in the same way, by what they do in words."""
    alike: dict[Any, list[Track]] = {}
    for track in tracks:
        alike.setdefault((track.start, in_turn(settings.coarse, track.number)), []).append(track)
    words = [_words(settings, own[0].number) for own in alike.values()]
    return {
        one if words.count(one) == 1 else f"{one} (fold {', '.join(str(t.number + 1) for t in own)})": own
        for one, own in zip(words, alike.values(), strict=True)
    }


def _words(settings: Settings, fold: int) -> str:
    coarse = in_turn(settings.coarse, fold)
    whole = {0.0: "", 1.0: ", whole models"}.get(coarse, f", whole models for {coarse:g} of the steps")
    return f"from {kind(settings, fold)}{whole}"


def _loss(kitchen: Kitchen, live: Live, tracks: Sequence[Track]) -> float:
    """Of the average of some tracks, on all fitting data."""
    live.theta.copy_(_mean([track.theta for track in tracks]))
    return kitchen.score_live(live, _mean([track.W for track in tracks])).loss


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).mean(dim=0)

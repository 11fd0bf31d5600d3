"""The average of what folds learned.

A soup is linear in its coefficients, so the average of F coefficient matrices is a soup too, and usually a better one
than theirs. That takes soups between which the loss has no hill. Folds that set out from one place have none between
them; folds that set out from different places may. So the loss of the average on the fitting data is held against what
the folds' own soups have on the samples they left out. The average is flattered there, by the folds that learned from
those samples, and the folds are not: where it is worse even so, a hill lies between, and the folds with the lowest loss
that set out from one place are kept alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.track import Track


@dataclass(frozen=True)
class Average:
    W: Tensor  # (K, G)
    tracks: Sequence[Track]  # those that are in it
    record: dict[str, Any] | None = None  # None: nothing had to be decided
    note: str | None = None

    @property
    def temperature(self) -> float | None:
        learned = [track.temperature for track in self.tracks if track.temperature is not None]
        return sum(learned) / len(learned) if learned else None


def plain(tracks: Sequence[Track]) -> Average:
    """Of all tracks."""
    return Average(torch.stack([track.W for track in tracks]).mean(dim=0), tracks)


def checked(
    kitchen: Kitchen, live: Live, found: Sequence[Sequence[Track]], held_out: Sequence[float]
) -> Average:
    """Of all tracks, or of those from one place. `held_out`: loss of a track's own soup on what it left out."""
    tracks = sorted((track for own in found for track in own), key=lambda track: track.number)
    everything = plain(tracks)
    live.theta.copy_(_mean_theta(tracks))
    together = kitchen.score_live(live, everything.W).loss
    apart = {_names(own): _mean_loss(own, held_out) for own in found}
    on_average = _mean_loss(tracks, held_out)
    hill = math.isfinite(on_average) and not together <= on_average
    kept = min(found, key=lambda own: apart[_names(own)]) if hill else None
    record = {"together": together, "apart": apart, "kept": "all" if kept is None else _names(kept)}
    kitchen.listen(Event("average", record))
    if kept is None:
        return Average(everything.W, tracks, record)
    verb = "are" if len(kept) > 1 else "is"
    note = (
        f"only {_names(kept)} {verb} in this soup: the average of all folds has a loss of {together:.4g} on the fitting"
        f" data, the folds themselves {on_average:.4g} on what they left out"
    )
    return Average(plain(kept).W, kept, record, note)


def by_start(tracks: Sequence[Track]) -> list[list[Track]]:
    """Those that set out from the same soup, together."""
    alike: dict[Any, list[Track]] = {}
    for track in tracks:
        alike.setdefault(track.start, []).append(track)
    return list(alike.values())


def _names(tracks: Sequence[Track]) -> str:
    return f"fold{'s' * (len(tracks) > 1)} {', '.join(str(track.number + 1) for track in tracks)}"


def _mean_loss(tracks: Sequence[Track], held_out: Sequence[float]) -> float:
    """Over all samples that these folds left out."""
    samples = {track.number: len(track.held_out) for track in tracks if track.held_out is not None}
    return sum(held_out[number] * count for number, count in samples.items()) / sum(samples.values())


def _mean_theta(tracks: Sequence[Track]) -> Tensor:
    """The soup of the average, where the tracks' soups wait; one more of them in memory, not as many again. (P,)"""
    total = tracks[0].theta.clone()
    for track in tracks[1:]:
        total.add_(track.theta)
    return total.div_(len(tracks))

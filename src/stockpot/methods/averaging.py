"""The average of what folds learned, where folds go different ways.

A soup is linear in its coefficients, so the average of F coefficient matrices is a soup too, and usually a better one
than theirs. That takes soups between which the loss has no hill. Folds that set out from one place have none between
them; folds that set out from different places may. So the loss of the average on the fitting data is held against what
the folds' own soups have on the samples they left out. The average is flattered there, by the folds that learned from
those samples, and the folds are not: where it is worse even so, a hill lies between, and the kind with the lowest loss
is kept alone.
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
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.settings import Settings
from stockpot.methods.starts import kind
from stockpot.methods.track import Track, in_turn

Kinds = dict[str, list[Track]]


@dataclass(frozen=True)
class Average:
    W: Tensor  # (K, G)
    tracks: Sequence[Track]  # those that are in it
    record: dict[str, Any] | None = None  # None: nothing had to be decided
    note: str | None = None


def plain(tracks: Sequence[Track]) -> Average:
    """Of all tracks."""
    return Average(torch.stack([track.W for track in tracks]).mean(dim=0), tracks)


def checked(kitchen: Kitchen, live: Live, found: Kinds, held_out: Sequence[float]) -> Average:
    """Of all tracks, or of one kind of them. `held_out`: loss of a track's own soup on what it left out."""
    tracks = sorted((track for own in found.values() for track in own), key=lambda track: track.number)
    everything = plain(tracks)
    live.theta.copy_(_mean_theta(tracks))
    together = kitchen.score_live(live, everything.W).loss
    samples = {name: sum(_left_out(track) for track in own) for name, own in found.items()}
    apart = {
        name: sum(held_out[track.number] * _left_out(track) for track in own) / samples[name]
        for name, own in found.items()
    }
    on_average = sum(apart[name] * samples[name] for name in found) / sum(samples.values())
    hill = math.isfinite(on_average) and not together <= on_average
    kept = min(apart, key=apart.__getitem__) if hill else None
    record = {"together": together, "apart": apart, "kept": kept or "all"}
    kitchen.listen(Event("average", record))
    if kept is None:
        return Average(everything.W, tracks, record)
    note = (
        f"only the folds {kept} are in this soup: averaged with the others they have a loss of {together:.4g} on"
        f" the fitting data, apart {on_average:.4g} on what they left out"
    )
    return Average(plain(found[kept]).W, found[kept], record, note)


def kinds(settings: Settings, tracks: Sequence[Track]) -> Kinds:
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


def _left_out(track: Track) -> int:
    assert track.held_out is not None
    return len(track.held_out)


def _mean_theta(tracks: Sequence[Track]) -> Tensor:
    """The soup of the average, where the tracks' soups wait; one more of them in memory, not as many again. (P,)"""
    total = tracks[0].theta.clone()
    for track in tracks[1:]:
        total.add_(track.theta)
    return total.div_(len(tracks))

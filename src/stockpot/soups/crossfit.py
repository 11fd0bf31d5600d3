"""Cross-fitting: learn once per fold, early-stopped on the fold left out, and average the coefficients.

Where folds set out is found in methods/starts.py; what they learn from there is cross-fitted, and averaged in
methods/averaging.py.

Every sample is held out by one fold, which also gives a score for the guard (methods/guard.py): if the best individual,
the uniform or the greedy soup does better on held-out data than chance explains, that one is returned instead. What is
scored there is a fold's own soup: a little too well, because the fold also said when to stop (and, with `greedy`, had
a say in where learning began), and lower than the average of all folds deserves. What a soup is worth, the report data
says.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.soup import weights
from stockpot.soups import averaging, guard, starts
from stockpot.soups.kitchen import Kitchen
from stockpot.soups.learn import Learner
from stockpot.soups.remarks import thin_classes
from stockpot.soups.settings_before import Settings
from stockpot.soups.state import StateStore
from stockpot.soups.track import Track
from stockpot.task import Scores
from stockpot.task.scores import worded


@dataclass(frozen=True)
class Learned:
    W: Tensor  # (K, G)
    temperature: float | None
    held_out: Scores | None
    winner: str  # "learned", or the baseline that the guard preferred
    history: tuple[object, ...]
    notes: tuple[str, ...]


def learn(kitchen: Kitchen, live: Live, settings: Settings, store: StateStore | None) -> Learned:
    """W by the learner: on all fitting data, or cross-fitted when settings.folds > 1."""
    if settings.folds == 1:
        return _at_once(kitchen, live, settings, store)
    data = kitchen.task.fit
    folds = data.folds(settings.folds, settings.seed)
    begins = starts.find(kitchen, live, settings, [inside for inside, _ in folds], store)
    tracks = [
        Track(f, data.subset(inside), data.subset(outside), begins[f])
        for f, (inside, outside) in enumerate(folds)
    ]
    learner = Learner(live, settings, tracks, listen=kitchen.listen, store=store)
    learner.run()
    places = averaging.by_start(tracks)
    held_out = _held_out(kitchen, live, tracks, folds, with_loss=len(places) > 1)
    averaged = averaging.plain(tracks)
    if len(places) > 1:
        averaged = averaging.checked(kitchen, live, places, [one.loss for one in held_out])
    history = [
        *learner.history,
        *([] if averaged.record is None else [{"kind": "average", **averaged.record}]),
    ]
    remarks = (*learner.setback_notes(), *thin_classes(data.labels, settings.folds))
    found = Learned(
        averaged.W,
        averaged.temperature,
        Scores(_in_place([one.values for one in held_out], folds)),
        "learned",
        tuple(history),
        remarks if averaged.note is None else (averaged.note, *remarks),
    )
    if not settings.guard:
        return found
    if kitchen.individual()[0].batches is not None:
        note = "no guard: the metric gives one score per batch; let it return one per sample, to tell gains from chance"
        return dataclasses.replace(found, notes=(note, *found.notes))
    return _guarded(kitchen, live, settings, found, begins, folds, remarks)


def _at_once(kitchen: Kitchen, live: Live, settings: Settings, store: StateStore | None) -> Learned:
    """On all fitting data, with nothing left out."""
    (begin,) = starts.find(kitchen, live, settings, [None], store)
    track = Track(0, kitchen.task.fit, start=begin)
    learner = Learner(live, settings, [track], listen=kitchen.listen, store=store)
    learner.run()
    return Learned(
        track.W, track.temperature, None, "learned", tuple(learner.history), learner.setback_notes()
    )


def _guarded(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    found: Learned,
    begins: list[starts.Start],
    folds: guard.Folds,
    remarks: tuple[str, ...],
) -> Learned:
    """What was found, or what is simpler and better beyond chance; `remarks` hold for either."""
    assert found.held_out is not None
    members = begins[0] if settings.start == "greedy" else None
    if settings.start == "own-greedy":
        own = [begin for begin in begins if begin is not None]
        decision = guard.decide_by_own(kitchen, live, found.held_out, own, folds)
    else:
        members = members or starts.greedy_members(kitchen, live, settings, None, "greedy soup")
        decision = guard.decide(kitchen, live, settings, found.held_out, members, folds)
    kitchen.listen(Event("guard", decision.record))
    history = (*found.history, {"kind": "guard", **decision.record})
    winner, known = decision.winner, decision.known
    if winner == "learned":
        return dataclasses.replace(found, history=history)
    metric = kitchen.task.metric if isinstance(kitchen.task.metric, str) else "score"
    note = (
        f"the guard returned {winner}, on held-out data {worded(known[winner], metric)}, instead of the learned soup,"
        f" {worded(known['learned'], metric)}: more than chance explains"
    )
    if winner == "greedy":
        members = members or starts.greedy_members(kitchen, live, settings, None, "greedy soup")
    W = _baseline(kitchen, live, winner, members or ())
    return Learned(W, None, known[winner], winner, history, (note, *remarks))


def _held_out(
    kitchen: Kitchen, live: Live, tracks: list[Track], folds: guard.Folds, *, with_loss: bool
) -> list[Scores]:
    """Each fold's own soup on the samples it did not fit on."""
    found = []
    for track, (_, outside) in zip(tracks, folds, strict=True):
        live.theta.copy_(track.theta)
        found.append(kitchen.score_live(live, track.W, indices=outside, with_loss=with_loss))
    return found


def _in_place(parts: list[Tensor], folds: guard.Folds) -> Tensor:
    """The samples' scores in the order of the fitting data. (N,)"""
    values = torch.empty(sum(len(part) for part in parts), dtype=torch.float64)
    for part, (_, outside) in zip(parts, folds, strict=True):
        values[outside] = part
    return values


def _baseline(kitchen: Kitchen, live: Live, name: str, members: tuple[int, ...]) -> Tensor:
    K, G = len(kitchen.pool), len(live.layout)
    if name == "uniform":
        return weights.uniform(K, G)
    if name == "best":
        return weights.chosen(K, G, [kitchen.first(kitchen.individual_values().mean(dim=1).tolist())])
    return weights.chosen(K, G, members)

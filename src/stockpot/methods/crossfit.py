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

from dataclasses import dataclass

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.methods import averaging, guard, starts
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.learn import Learner
from stockpot.methods.remarks import thin_classes
from stockpot.methods.settings import Settings
from stockpot.methods.state import StateStore
from stockpot.methods.track import Track
from stockpot.soup import weights
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
    data = kitchen.task.fit
    if settings.folds == 1:
        begins, among = _limited(kitchen, settings, starts.find(kitchen, live, settings, [None], store))
        tracks = [Track(0, data, start=begins[0])]
        learner = Learner(live, settings, tracks, among=among, listen=kitchen.listen, store=store)
        learner.run()
        track = learner.tracks[0]
        _go_part_of_the_way(track, live, settings.reach)
        return Learned(
            track.W, track.temperature, None, "learned", tuple(learner.history), learner.setback_notes()
        )
    folds = data.folds(settings.folds, settings.seed)
    found = starts.find(kitchen, live, settings, [inside for inside, _ in folds], store)
    begins, among = _limited(kitchen, settings, found)
    tracks = [
        Track(f, data.subset(inside), data.subset(outside), begins[f])
        for f, (inside, outside) in enumerate(folds)
    ]
    learner = Learner(live, settings, tracks, among=among, listen=kitchen.listen, store=store)
    learner.run()
    for track in tracks:
        _go_part_of_the_way(track, live, settings.reach)
    kinds = averaging.kinds(settings, tracks)
    several = len(kinds) > 1
    held_out = _held_out(kitchen, live, tracks, folds, with_loss=several)
    averaged = averaging.plain(tracks)
    if several:
        averaged = averaging.checked(kitchen, live, kinds, [one.loss for one in held_out])
    W = averaged.W
    temperatures = [track.temperature for track in averaged.tracks if track.temperature is not None]
    temperature = sum(temperatures) / len(temperatures) if temperatures else None
    history: list[object] = list(learner.history)
    if averaged.record is not None:
        history.append({"kind": "average", **averaged.record})
    always = (*learner.setback_notes(), *thin_classes(data.labels, settings.folds))
    notes = always if averaged.note is None else (averaged.note, *always)
    learned = Scores(_in_place([one.values for one in held_out], folds))
    if not settings.guard:
        return Learned(W, temperature, learned, "learned", tuple(history), notes)
    if kitchen.individual()[0].batches is not None:
        note = "no guard: the metric gives one score per batch; let it return one per sample, to tell gains from chance"
        return Learned(W, temperature, learned, "learned", tuple(history), (note, *notes))
    members = begins[0] if starts.at_greedy(settings, 0) else None
    own = [begin for begin in begins if begin is not None]
    if starts.all_own(settings, len(folds)):
        decision = guard.decide_by_own(kitchen, live, learned, own, folds)
    else:
        members = members or starts.greedy_members(kitchen, live, settings, None, "greedy soup")
        decision = guard.decide(kitchen, live, settings, learned, members, folds)
    history.append({"kind": "guard", **decision.record})
    kitchen.listen(Event("guard", decision.record))
    winner, known = decision.winner, decision.known
    if winner == "learned":
        return Learned(W, temperature, learned, winner, tuple(history), notes)
    metric = kitchen.task.metric if isinstance(kitchen.task.metric, str) else "score"
    note = (
        f"the guard returned {winner}, on held-out data {worded(known[winner], metric)}, instead of the learned soup,"
        f" {worded(known['learned'], metric)}: more than chance explains"
    )
    if winner == "greedy":
        members = members or starts.greedy_members(kitchen, live, settings, None, "greedy soup")
    W = _baseline(kitchen, live, winner, members or ())
    return Learned(W, None, known[winner], winner, tuple(history), (note, *always))


def _limited(
    kitchen: Kitchen, settings: Settings, begins: list[starts.Start]
) -> tuple[list[starts.Start], tuple[int, ...] | None]:
    """Starts, and which ingredients are learned (None: all): those of the starts and the best of the others.

    Ranked on all fitting data: who is among so many says little about a sample that a fold leaves out.
    """
    K = len(kitchen.pool)
    if settings.among is None or settings.among >= K:
        return begins, None
    best = kitchen.ranked(kitchen.individual_values().mean(dim=1).tolist())[: settings.among]
    among = set(best).union(*(start for start in begins if start is not None))
    # Summed up alike wherever they stand in the pool.
    ordered = tuple(sorted(among, key=kitchen.facts.digests.__getitem__))
    return [ordered if start is None else start for start in begins], ordered


def _go_part_of_the_way(track: Track, live: Live, reach: float) -> None:
    """Towards what was learned, from the start: on the line between two soups every point is a soup."""
    if reach == 1.0:
        return
    K, G = track.W.shape
    start = weights.uniform(K, G) if track.start is None else weights.chosen(K, G, track.start)
    track.W = start.lerp(track.W, reach)
    theta = live.mean(None if track.start is None else list(track.start))
    track.theta = theta.lerp_(track.theta.to(theta.device), reach).to(track.theta.device)


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

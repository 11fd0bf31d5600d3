"""Cross-fitting: learn once per fold, early-stopped on the fold left out, and average the coefficients.

A soup is linear in its coefficients, so the average of F coefficient matrices is a soup too. All folds may set out from
the greedy soup of the whole fitting data. What they learn from there is cross-fitted, where they begin is not: a soup
chosen on a part of the data is a worse place to begin.

Every sample is held out by one fold, which also gives a score for the guard: if the best individual, the uniform or the
greedy soup does better on held-out data than chance explains, that one is returned instead. What is scored there is a
fold's own soup: a little too well, because the fold also said when to stop, and lower than the average of all deserves.
What a soup is worth, the report data says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stockpot.engine import Live
from stockpot.events import Event
from stockpot.methods.greedy import greedy
from stockpot.methods.kitchen import Kitchen
from stockpot.methods.learn import Learner
from stockpot.methods.remarks import thin_classes
from stockpot.methods.settings import Settings
from stockpot.methods.state import StateStore
from stockpot.methods.track import Track
from stockpot.methods.visit import finite
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
    start = greedy_start(kitchen, live, settings, store) if settings.start == "greedy" else None
    if settings.folds == 1:
        learner = Learner(live, settings, [Track(0, data, start=start)], listen=kitchen.listen, store=store)
        learner.run()
        track = learner.tracks[0]
        _go_part_of_the_way(track, live, settings.reach)
        return Learned(
            track.W, track.temperature, None, "learned", tuple(learner.history), learner.setback_notes()
        )
    folds = data.folds(settings.folds, settings.seed)
    tracks = [
        Track(f, data.subset(inside), data.subset(outside), start)
        for f, (inside, outside) in enumerate(folds)
    ]
    learner = Learner(live, settings, tracks, listen=kitchen.listen, store=store)
    learner.run()
    for track in tracks:
        _go_part_of_the_way(track, live, settings.reach)
    W = torch.stack([track.W for track in tracks]).mean(dim=0)
    temperatures = [track.temperature for track in tracks if track.temperature is not None]
    temperature = sum(temperatures) / len(temperatures) if temperatures else None
    history: list[object] = list(learner.history)
    notes = (*learner.setback_notes(), *thin_classes(data.labels, settings.folds))
    learned = Scores(_held_out_values(kitchen, live, tracks, folds))
    if not settings.guard:
        return Learned(W, temperature, learned, "learned", tuple(history), notes)
    members = start if start is not None else greedy_start(kitchen, live, settings)
    known, decision = _guarded(kitchen, live, settings, learned, members, folds)
    winner = decision["winner"]
    history.append({"kind": "guard", **decision})
    kitchen.listen(Event("guard", decision))
    if winner == "learned":
        return Learned(W, temperature, learned, winner, tuple(history), notes)
    metric = kitchen.task.metric if isinstance(kitchen.task.metric, str) else "score"
    note = (
        f"the guard returned {winner}, on held-out data {worded(known[winner], metric)}, instead of the learned soup,"
        f" {worded(learned, metric)}: more than chance explains"
    )
    W = _baseline(kitchen, live, winner, members)
    return Learned(W, None, known[winner], winner, tuple(history), (note, *notes))


def _guarded(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    learned: Scores,
    members: tuple[int, ...],
    folds: list[tuple[Tensor, Tensor]],
) -> tuple[dict[str, Scores], dict[str, Any]]:
    """The scores that the guard compared, and its decision.

    The greedy soup is scored first on the samples it was chosen on, which flatters it. Only where it wins in that way
    is one chosen for every fold, without the samples it is scored on, which takes a greedy search each.
    """
    known = {"learned": learned, **_simple(kitchen, live, folds)}
    live.theta.copy_(live.mean(list(members)))
    W = weights.chosen(len(kitchen.pool), len(live.layout), members)
    known["greedy"] = Scores(kitchen.score_live(live, W, with_loss=False).values)
    decision = {**judged(known), "flattered": ["greedy"]}
    if decision["winner"] == "greedy":
        known["greedy"] = Scores(_cross_fitted_greedy(kitchen, live, settings, folds))
        decision = {**judged(known), "flattered": []}
    return known, decision


def judged(known: Mapping[str, Scores]) -> dict[str, Any]:
    """The guard's decision between `learned` and the others, all scored on the same samples.

    Each of the others is another chance to be ahead by luck, so they share the 5 % (Bonferroni).
    """
    others = [name for name in known if name != "learned"]
    confidence = 1 - 0.05 / len(others)
    over = {name: known[name].difference(known["learned"], confidence) for name in others}
    better = [name for name, (_, low, _) in over.items() if low > 0]  # beyond chance
    return {
        "held_out": {name: one.mean for name, one in known.items()},
        "intervals": {name: [finite(end) for end in one.interval()] for name, one in known.items()},
        "over_learned": {name: [finite(x) for x in found] for name, found in over.items()},
        "winner": max(better, key=lambda name: known[name].mean, default="learned"),
    }


def _go_part_of_the_way(track: Track, live: Live, reach: float) -> None:
    """Towards what was learned, from the start: on the line between two soups every point is a soup."""
    if reach == 1.0:
        return
    K, G = track.W.shape
    start = weights.uniform(K, G) if track.start is None else weights.chosen(K, G, track.start)
    track.W = start.lerp(track.W, reach)
    theta = live.mean(None if track.start is None else list(track.start))
    track.theta = theta.lerp_(track.theta.to(theta.device), reach).to(track.theta.device)


def _held_out_values(
    kitchen: Kitchen, live: Live, tracks: list[Track], folds: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Each sample scored by the fold that did not fit on it. (N,)"""
    values = torch.empty(len(kitchen.task.fit), dtype=torch.float64)
    for track, (_, outside) in zip(tracks, folds, strict=True):
        live.theta.copy_(track.theta)
        values[outside] = kitchen.score_live(live, track.W, indices=outside, with_loss=False).values
    return values


def _simple(kitchen: Kitchen, live: Live, folds: list[tuple[Tensor, Tensor]]) -> dict[str, Scores]:
    """Held-out scores of the uniform soup and of the best individual, chosen without the samples it is scored on."""
    K, G = len(kitchen.pool), len(live.layout)
    own = kitchen.individual_values()  # (K, N)
    live.theta.copy_(live.mean(listen=kitchen.listen))
    uniform = kitchen.score_live(live, weights.uniform(K, G), with_loss=False).values
    best = torch.empty(own.shape[1], dtype=torch.float64)
    for inside, outside in folds:
        best[outside] = own[int(own[:, inside].mean(dim=1).argmax()), outside]
    return {"best": Scores(best), "uniform": Scores(uniform)}


def _cross_fitted_greedy(
    kitchen: Kitchen, live: Live, settings: Settings, folds: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Each sample scored by a greedy soup that was chosen without it. (N,)"""
    K, G = len(kitchen.pool), len(live.layout)
    values = torch.empty(len(kitchen.task.fit), dtype=torch.float64)
    for number, (inside, outside) in enumerate(folds):
        label = f"greedy soup {number + 1} of {len(folds)}"
        chosen = _greedy(kitchen, live, settings, inside, label)
        live.theta.copy_(live.mean(list(chosen)))
        W = weights.chosen(K, G, chosen)
        values[outside] = kitchen.score_live(live, W, indices=outside, with_loss=False).values
    return values


def greedy_start(
    kitchen: Kitchen, live: Live, settings: Settings, store: StateStore | None = None
) -> tuple[int, ...]:
    """The members of the greedy soup of all fitting data; as an earlier process chose them, if one did."""
    saved = None if store is None else store.load()
    if saved is not None:
        return tuple(saved[1]["starts"][0])
    return _greedy(kitchen, live, settings, None, "greedy soup")


def _greedy(
    kitchen: Kitchen, live: Live, settings: Settings, indices: Tensor | None, label: str
) -> tuple[int, ...]:
    ties = settings.greedy_ties
    return greedy(kitchen, live, indices=indices, ties=ties, by_content=True, label=label).chosen


def _baseline(kitchen: Kitchen, live: Live, name: str, members: tuple[int, ...]) -> Tensor:
    K, G = len(kitchen.pool), len(live.layout)
    if name == "uniform":
        return weights.uniform(K, G)
    if name == "best":
        return weights.chosen(K, G, [int(kitchen.individual_values().mean(dim=1).argmax())])
    return weights.chosen(K, G, members)

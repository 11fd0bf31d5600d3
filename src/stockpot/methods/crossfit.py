"""Cross-fitting: learn once per fold, early-stopped on the fold left out, and average the coefficients.

A soup is linear in its coefficients, so the average of F coefficient matrices is a soup too. A fold may set out from a
greedy soup, chosen on the samples it learns from. Every sample is held out by one fold, which also gives a score for
the guard: if the best individual, the uniform or the greedy soup, chosen in the same cross-fitted way, does better on
held-out data than chance explains, that one is returned instead. What is scored there is a fold's own soup: a little
too well, because the fold also said when to stop, and lower than the average of all deserves. What a soup is worth, the
report data says.
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
    greedy_start = settings.start == "greedy"
    if settings.folds == 1:
        everything = torch.arange(len(data))
        start = greedy_soups(kitchen, live, settings, [everything], store)[0] if greedy_start else None
        learner = Learner(live, settings, [Track(0, data, start=start)], listen=kitchen.listen, store=store)
        learner.run()
        track = learner.tracks[0]
        _go_part_of_the_way(track, live, settings.reach)
        return Learned(
            track.W, track.temperature, None, "learned", tuple(learner.history), learner.setback_notes()
        )
    folds = data.folds(settings.folds, settings.seed)
    insides = [inside for inside, _ in folds]
    chosen = greedy_soups(kitchen, live, settings, insides, store) if greedy_start else None
    tracks = [
        Track(f, data.subset(inside), data.subset(outside), chosen[f] if chosen else None)
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
    scores: dict[str, Tensor] = {"learned": _held_out_values(kitchen, live, tracks, folds)}
    if not settings.guard:
        return Learned(W, temperature, Scores(scores["learned"]), "learned", tuple(history), notes)
    if chosen is None:
        chosen = greedy_soups(kitchen, live, settings, insides)
    scores.update(_baselines(kitchen, live, chosen, folds))
    known = {name: Scores(values) for name, values in scores.items()}
    decision = judged(known)
    winner = decision["winner"]
    history.append({"kind": "guard", **decision})
    kitchen.listen(Event("guard", decision))
    if winner == "learned":
        return Learned(W, temperature, Scores(scores[winner]), winner, tuple(history), notes)
    metric = kitchen.task.metric if isinstance(kitchen.task.metric, str) else "score"
    note = (
        f"the guard returned {winner}, on held-out data {worded(known[winner], metric)}, instead of the learned soup,"
        f" {worded(known['learned'], metric)}: more than chance explains"
    )
    W = _baseline(kitchen, live, settings, winner)
    return Learned(W, None, Scores(scores[winner]), winner, tuple(history), (note, *notes))


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


def _baselines(
    kitchen: Kitchen, live: Live, greedies: list[tuple[int, ...]], folds: list[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """Held-out scores of the simple soups, each chosen without the samples it is scored on."""
    K, G = len(kitchen.pool), len(live.layout)
    own = kitchen.individual_values()  # (K, N)
    samples = own.shape[1]
    live.theta.copy_(live.mean(listen=kitchen.listen))
    uniform = kitchen.score_live(live, weights.uniform(K, G), with_loss=False).values
    best, chosen = torch.empty(samples, dtype=torch.float64), torch.empty(samples, dtype=torch.float64)
    for members, (inside, outside) in zip(greedies, folds, strict=True):
        best[outside] = own[int(own[:, inside].mean(dim=1).argmax()), outside]
        live.theta.copy_(live.mean(list(members)))
        W = weights.chosen(K, G, members)
        chosen[outside] = kitchen.score_live(live, W, indices=outside, with_loss=False).values
    return {"best": best, "uniform": uniform, "greedy": chosen}


def greedy_soups(
    kitchen: Kitchen,
    live: Live,
    settings: Settings,
    insides: list[Tensor],
    store: StateStore | None = None,
) -> list[tuple[int, ...]]:
    """The members of the greedy soup of each set of samples; as an earlier process chose them, if one did."""
    saved = None if store is None else store.load()
    if saved is not None:
        return [tuple(members) for members in saved[1]["starts"]]
    soups = []
    for number, inside in enumerate(insides):
        label = f"greedy soup {number + 1} of {len(insides)}"
        soups.append(
            greedy(kitchen, live, indices=inside, ties=settings.greedy_ties, by_content=True, label=label)
        )
    return [soup.chosen for soup in soups]


def _baseline(kitchen: Kitchen, live: Live, settings: Settings, name: str) -> Tensor:
    K, G = len(kitchen.pool), len(live.layout)
    if name == "uniform":
        return weights.uniform(K, G)
    if name == "best":
        return weights.chosen(K, G, [int(kitchen.individual_values().mean(dim=1).argmax())])
    return greedy(kitchen, live, ties=settings.greedy_ties).W

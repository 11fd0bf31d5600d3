"""Which kinds of folds should take turns? `python experiments/turns.py {prepare,learn,judge,choose} ZOO ...`

    prepare ZOO                  the ingredients' own scores and the greedy soup, once
    learn ZOO --seed S --kind K  all folds of one kind (learners/turns.py has the kinds)
    judge ZOO --seed S           every mixture of the kinds that were learned, on dev and on unused training samples
    choose ZOO ...               the best mixture over all zoos and seeds; the last line names it

Test data is not read. What is learned and judged lies in experiments/runs/ZOO/turns; `choose -o FILE` keeps the table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from learners.problem import Problem
from learners.turns import KINDS, MIXTURES, fold_weights, mixed, turns
from search import dev_data, unused
from torch import Tensor

from stockpot.methods.kitchen import Kitchen
from stockpot.methods.starts import greedy_members
from stockpot.recipe import load_recipe
from stockpot.recipe.build import build_pool, build_settings, build_task
from stockpot.soup import weights
from stockpot.task import Scores

UNUSED = {
    "cifar10-efficientnet": 5_000,
    "fashion-vit": 15_000,
    "imdb-minilm": 2_000,
}  # that fine-tuning left over
FIRST = "g"  # what the others are compared with


class Zoo:
    def __init__(self, home: Path, name: str, stated: Sequence[str]) -> None:
        self.name, self.file = name, home / name / "recipe.yaml"
        self.stated = [*stated, "data.report=null"]
        self.folder = home / "runs" / name / "turns"
        self.folder.mkdir(parents=True, exist_ok=True)

    def settings(self, seed: int) -> Any:
        recipe = load_recipe(self.file, [*self.stated, f"output.seed={seed}", "method.guard=false"])
        return build_settings(recipe, "crossfit")

    def kitchen(self) -> Kitchen:
        recipe = load_recipe(self.file, self.stated)
        return Kitchen(build_pool(recipe), build_task(recipe, report=False))


def prepare(zoo: Zoo) -> None:
    kitchen = zoo.kitchen()
    with kitchen.live(kitchen.layout("tensor")) as live:
        members = greedy_members(kitchen, live, zoo.settings(0), None, "greedy soup")
    content = {"values": kitchen.individual_values(), "greedy": list(members)}
    torch.save(content, zoo.folder / "prepared.pt")
    print(f"{zoo.name}: greedy soup of {len(members)}", flush=True)


def learn(zoo: Zoo, seed: int, kind: str) -> None:
    kitchen = zoo.kitchen()
    members = _remember(zoo, kitchen)
    began = time.perf_counter()
    with kitchen.live(kitchen.layout("tensor")) as live:
        W = fold_weights(kitchen, live, zoo.settings(seed), KINDS[kind], members)
    torch.save(W, zoo.folder / f"folds-{seed}-{_safe(kind)}.pt")
    print(f"{zoo.name} {seed} {kind}: {time.perf_counter() - began:.0f} s", flush=True)


def judge(zoo: Zoo, seed: int, left_over: int) -> None:
    found = {}
    for kind in KINDS:
        file = zoo.folder / f"folds-{seed}-{_safe(kind)}.pt"
        if file.is_file():
            found[kind] = torch.load(file, weights_only=True)
    if not found:
        raise _missing(f"folds of {zoo.name} with seed {seed}", f"learn {zoo.name} --seed {seed}")
    recipe = load_recipe(zoo.file, zoo.stated)
    parts = [dev_data(zoo.file, zoo.stated, "dev")]
    if left_over:
        parts.append(unused(zoo.file, zoo.stated, left_over))
    problem = Problem(build_pool(recipe), build_task(recipe, report=False), parts[0])
    members = _remember(zoo, problem.kitchen)
    values: dict[str, Tensor] = {}
    loss: dict[str, float] = {}
    with problem:
        K, G = problem.K, problem.G

        def scored(name: str, soups: Sequence[Tensor]) -> None:
            """Judged one by one, the mean of all."""
            each = [_joined(problem.scores_on((W - 1 / K).float().to(problem.device), parts)) for W in soups]
            values[name] = torch.stack([one.values for one in each]).mean(dim=0).float()
            loss[name] = sum(one.loss for one in each) / len(each)
            print(
                f"{zoo.name} {seed} {name:8s} {100 * float(values[name].mean()):.3f} {loss[name]:.4f}",
                flush=True,
            )

        scored("greedy", [weights.chosen(K, G, members)])
        scored("uniform", [weights.uniform(K, G)])
        for mixture in MIXTURES:
            if set(mixture) <= set(found):
                folds = len(found[mixture[0]])
                scored(mixture, [mixed(found, kinds) for kinds in turns(mixture, folds)])
        scored("all of all", [torch.stack(list(found.values())).mean(dim=(0, 1))])
    torch.save({"values": values, "loss": loss}, zoo.folder / f"judged-{seed}.pt")


def choose(zoos: Sequence[Zoo], out: Path | None) -> None:
    """Highest accuracy over the zoos, which count alike; of those within a standard error of it, the lowest loss."""
    rows: dict[str, dict[str, Any]] = {}
    gains: dict[str, list[Tensor]] = {}  # name -> per zoo, sample by sample, mean over the seeds
    for zoo in zoos:
        judged = [torch.load(file, weights_only=True) for file in sorted(zoo.folder.glob("judged-*.pt"))]
        if not all(FIRST in one["values"] for one in judged or [{"values": ()}]):
            raise _missing(f"every seed of {zoo.name} judged, kind {FIRST} among them", f"judge {zoo.name}")
        names = [name for name in judged[0]["values"] if all(name in one["values"] for one in judged)]
        for name in names:
            own = torch.stack([one["values"][name] for one in judged]).mean(dim=0)
            greedy = torch.stack([one["values"]["greedy"] for one in judged]).mean(dim=0)
            gains.setdefault(name, []).append((own - greedy).double())
            lower = [one["loss"][name] / one["loss"]["greedy"] - 1 for one in judged]
            rows.setdefault(name, {})[zoo.name] = {
                "accuracy": float(own.double().mean()),
                "over_greedy": _mean_and_error([gains[name][-1]]),
                "loss_over_greedy": sum(lower) / len(lower),
                "seeds": len(judged),
            }
    rows = {name: row for name, row in rows.items() if len(row) == len(zoos)}
    for name, row in rows.items():
        row["all"] = {
            "over_greedy": _mean_and_error(gains[name]),
            "over_first": _mean_and_error([a - b for a, b in zip(gains[name], gains[FIRST], strict=True)]),
            "loss_over_greedy": sum(row[zoo.name]["loss_over_greedy"] for zoo in zoos) / len(zoos),
        }
    candidates = [name for name in rows if name in MIXTURES]
    best = max(candidates, key=lambda name: rows[name]["all"]["over_greedy"][0])
    near = []
    for name in candidates:
        less, error = _mean_and_error([a - b for a, b in zip(gains[best], gains[name], strict=True)])
        if less <= error:
            near.append(name)
    chosen = min(near, key=lambda name: rows[name]["all"]["loss_over_greedy"])
    for name in sorted(rows, key=lambda name: -rows[name]["all"]["over_greedy"][0]):
        row = rows[name]
        each = ", ".join(
            f"{zoo.name} {_points(row[zoo.name]['over_greedy'])} {100 * row[zoo.name]['loss_over_greedy']:+.2f} %"
            for zoo in zoos
        )
        mark = "*" if name in near else " "
        print(
            f"{mark} {name:10s} {_points(row['all']['over_greedy'])}, over {FIRST} {_points(row['all']['over_first'])},"
            f" loss {100 * row['all']['loss_over_greedy']:+.2f} % ({each})"
        )
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"chosen": chosen, "near": near, "mixtures": rows}, indent=1) + "\n")
    print(f"best: {chosen}")


def _mean_and_error(parts: Sequence[Tensor]) -> tuple[float, float]:
    """Of parts that count alike."""
    mean = sum(float(part.mean()) for part in parts) / len(parts)
    variance = sum(float(part.var()) / len(part) for part in parts)
    return mean, math.sqrt(variance) / len(parts)


def _points(pair: tuple[float, float]) -> str:
    return f"{100 * pair[0]:+.3f} ({100 * pair[1]:.3f})"


def _joined(scores: Sequence[Scores]) -> Scores:
    values = torch.cat([one.values for one in scores])
    return Scores(values, sum(one.loss * one.n for one in scores) / len(values))


def _remember(zoo: Zoo, kitchen: Kitchen) -> tuple[int, ...]:
    """What `prepare` found."""
    file = zoo.folder / "prepared.pt"
    if not file.is_file():
        raise _missing(f"the ingredients' scores of {zoo.name}", f"prepare {zoo.name}")
    content = torch.load(file, weights_only=True)
    kitchen.remember([Scores(values) for values in content["values"]], 0.0)
    return tuple(content["greedy"])


def _missing(what: str, command: str) -> SystemExit:
    return SystemExit(
        f"error: expected {what}, found none.\n  Fix: run `python experiments/turns.py {command}` first."
    )


def _safe(kind: str) -> str:
    """File systems may take g and G for the same."""
    return f"whole-{kind.lower()}" if kind.isupper() else kind


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["prepare", "learn", "judge", "choose"])
    parser.add_argument("zoo", nargs="+")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=[*KINDS])
    parser.add_argument(
        "--unused", type=int, metavar="N", help="judge on so many unused training samples, too"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE")
    parser.add_argument("--home", type=Path, default=Path(__file__).parent, metavar="DIR")
    options = parser.parse_args(arguments)
    zoos = [Zoo(options.home.resolve(), name, options.set) for name in options.zoo]
    if options.what == "choose":
        choose(zoos, options.out)
        return 0
    for zoo in zoos:
        if options.what == "prepare":
            prepare(zoo)
        elif options.what == "learn":
            for kind in options.kind:
                learn(zoo, options.seed, kind)
        else:
            left_over = UNUSED.get(zoo.name, 0) if options.unused is None else options.unused
            judge(zoo, options.seed, left_over)
    return 0


if __name__ == "__main__":
    sys.exit(main())

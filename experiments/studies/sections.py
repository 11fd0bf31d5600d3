"""The sections of docs/results.md: what each asks, which runs answer it, and where its table and figure come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from studies import tables
from studies.loaded import Results
from studies.markdown import machine
from studies.plans import DEFAULT, PAPER


@dataclass(frozen=True)
class Section:
    """`body` gives one zoo's lines, or none where nothing was measured."""

    slug: str
    title: str
    about: str
    studies: tuple[str, ...]  # whose runs it shows besides `main`
    body: Callable[[Results], list[str]]
    figure: str | None = None  # what the figure shows
    lasting: bool = (
        False  # not about the present default alone: earlier results will do where there are no newer ones
    )

    def of(self, zoo: Results) -> Results:
        """The results it shows of a zoo."""
        return zoo.with_most_of(self.studies) if self.lasting else zoo


def provenance(zoo: Results, studies: Sequence[str]) -> list[str]:
    """The command that repeats a section, and where and when its runs were made."""
    used = [name for name in studies if name == "main" or zoo.study(name)]
    runs = [run for name in used for run in zoo.study(name).values()]
    lines = [f"`python experiments/study.py {zoo.zoo} --only {' '.join(used)}`"]
    lines += sorted({machine(run) for run in runs})
    return ["<br>".join(f"<sub>{line}</sub>" for line in lines), ""]


SECTIONS = (
    Section(
        "methods",
        "Tables 1 and 2: every method",
        "Test accuracy is the mean over the seeds, *over seeds* the largest minus the smallest of them; where the study"
        f" `seeds` was run, {DEFAULT} has more. An epoch is one pass over the fitting data (samples learned from"
        " or evaluated, over their number); time per epoch is the construction time over the epochs, so it holds"
        f" everything a method does. Of {DEFAULT} only what is learned from is counted, not the search for its starts."
        " Times and memory are of seed 0. In the paper's columns: accuracy (time per epoch x"
        " epochs, construction time, peak memory). Its ViT-L/14 on ImageNet with K = 8 has no zoo beside it;"
        " [experiments/paper](../experiments/paper/) has the recipe.",
        ("main", "seeds"),
        tables.methods,
        "Test accuracy of every method with its 95 % interval; ticks are the seeds, the dashed line is the best single"
        " model, the hollow dot is the ensemble, which is no soup.",
    ),
    Section(
        "removed",
        "Table 3: the best ingredients left out",
        "Ingredients are ranked by their own accuracy on the fitting data. Test accuracy in %, seed 0.",
        ("main", "removed"),
        tables.removed,
        f"Test accuracy after leaving out the best ingredients; bars: 95 % intervals of {DEFAULT} and greedy.",
        lasting=True,
    ),
    Section(
        "coefficients",
        "Mixing weights",
        "All weights of a soup, over ingredients and tensors, seed 0. Learned-Soup's lie in (0, 1) by construction.",
        ("main",),
        tables.coefficients,
        "How the mixing weights are distributed (logarithmic); orange: below 0 or above 1; dashed: an even mix.",
    ),
    Section(
        "cost",
        "Accuracy against the cost of fine-tuning",
        "The first ingredients of the search, then more of them. Fine-tuning time adds up the trials' own seconds, of"
        " which several may have run at once. Test accuracy in %, seed 0.",
        ("main", "cost"),
        tables.cost,
        f"Test accuracy with the first ingredients of the search; bars: 95 % intervals of {DEFAULT} and greedy.",
        lasting=True,
    ),
    Section(
        "ablations",
        "Ablations: b, T and J",
        f"{PAPER} with other block sizes b, numbers of visited blocks T and steps per block J; everything else as in"
        " `main`, seed 0. b = K is hl+. Changes are paired with `main` on the same test samples, in points, with 95 %"
        " intervals. The paper: less than 0.1 points over b, and minor gains with larger T and J (figures without"
        " numbers).",
        ("main", "blocks", "visits", "inner", "steps"),
        tables.ablations,
        f"Change of {PAPER}'s test accuracy against `main`, with 95 % intervals.",
        lasting=True,
    ),
    Section(
        "decentralise",
        "Decentralisation on and off",
        "Directions from the mean of the models, against free weights of the models themselves (the paper's"
        " appendix D).",
        ("main", "decentralise"),
        tables.decentralise,
        lasting=True,
    ),
    Section(
        "statistics",
        "BatchNorm statistics",
        "For the zoo with BatchNorm: statistics measured again on the fitting data, averaged like weights, or copied"
        " from the first ingredient; in brackets the change against the first column, in points. Seed 0.",
        ("main", "statistics"),
        tables.statistics,
        lasting=True,
    ),
    Section(
        "directions",
        "Models rounded while learning",
        "On a GPU `main` keeps the models as bf16 while it learns; here exactly (fp32) and with 8 bits, too. The soup"
        " is always built from the files. Differences in points, paired, with 95 % intervals.",
        ("main", "directions"),
        tables.directions,
        lasting=True,
    ),
    Section(
        "presets",
        "The paper's text and the authors' code",
        "`preset: paper` is what the paper says, `preset: authors` what the released code does instead; see the"
        " [recipe reference](recipe.md).",
        ("main", "presets"),
        tables.presets,
        lasting=True,
    ),
    Section(
        "sensitivity",
        "Sensitivity to learning rate and steps",
        f"{DEFAULT} with nothing else changed, and {PAPER} with the paper's settings beside it. Test accuracy in %,"
        " of seed 0, or the mean of several where the row says so; changes are of seed 0, as above.",
        ("main", "rates", "steps", "inner"),
        tables.sensitivity,
        f"Test accuracy of {DEFAULT} and {PAPER} over learning rates and steps, with 95 % intervals; {PAPER}'s of an"
        " earlier time where the tables say so.",
    ),
)

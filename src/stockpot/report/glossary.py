"""Words a newcomer needs, and what each method does, in one line each."""

from __future__ import annotations

METHODS = {
    "best": "the single best model: what one would take without a soup",
    "uniform": "the plain average of all models",
    "greedy": "the average of the models that helped when added one by one",
    "ensemble": "averages the outputs of all models: no soup, and as slow as all of them together",
    "learned": "one learned weight per model, between 0 and 1",
    "learned+": "learned weights per part of the model, between 0 and 1",
    "hl": "one learned weight per model, free to extrapolate",
    "hl+": "learned weights per part of the model, free to extrapolate",
    "mehl": "like hl, but holds only a few models in memory at a time",
    "mehl+": "like hl+, but holds only a few models in memory at a time",
    "crossfit": "like hl+, but from greedy soups, on several folds, stopped on data it did not see, then averaged",
}

TERMS = (
    (
        "Soup",
        "One model whose weights are a weighted mix of the weights of several fine-tuned models. It has the size and"
        " the speed of a single model.",
    ),
    (
        "Ingredient",
        "One of the fine-tuned models that go into the soup. All started from the same pre-trained model.",
    ),
    (
        "Mixing weight",
        "How much of an ingredient goes into the soup, for the whole model or for one part of it. The weights of all"
        " ingredients add up to one.",
    ),
    (
        "Extrapolated",
        "A mixing weight below 0 or above 1. The soup then lies outside of the ingredients: it moves away from one of"
        " them, or further along than any of them went.",
    ),
    (
        "Fitting data",
        "The examples that were used to choose the mixing weights. Scores on them flatter the soup.",
    ),
    (
        "Held-out",
        "Examples set aside while weights are learned, to notice when learning begins to memorise. Cross-fitting lets"
        " every example be held out once. Scores on them are a little too good, because they also said when to stop"
        " and, where learning set out from a greedy soup, helped to choose that.",
    ),
    (
        "Report data",
        "Examples that were not used for any decision. They were scored once, at the end, so their scores are honest.",
    ),
    (
        "95 % interval",
        "Where the score would probably lie on more data of the same kind. Differences are paired: both models are"
        " compared example by example, which is sharper than comparing two intervals.",
    ),
    (
        "Guard",
        "The last check of cross-fitting: if a simple soup or a single model does better on held-out data, that one is"
        " returned instead.",
    ),
)

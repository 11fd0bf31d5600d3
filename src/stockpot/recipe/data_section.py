"""The data section of a recipe: where samples are, which columns are what, and how they are judged."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from stockpot.recipe.values import Bytes, Code, Names, OfOneKind, Pixels, PythonCode, Report, Section, ShortSplit, Split

# Metrics whose columns only some data has: any of these keys, and how to write them.
_NEEDED: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(("multiple_choice", "multiple_choice_normalised"), (("choices",), "prompt, choices and answer")),
    "exact_match": (("completion", "messages"), "messages, or prompt and completion"),
    "entity_f1": (("words",), "words and tags"),
    "bits_per_byte": (("text", "completion"), "text, or prompt and completion: their bytes are known"),
    **dict.fromkeys(
        ("token_accuracy", "token_f1"),
        (("text", "messages", "prompt", "tokens", "words"), "text, messages, prompt and completion, or words and tags"),
    ),
}
_OF_NUMBERS = ("r2", "negative_mse", "negative_mae", "pearson", "spearman")

Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming"]
# The names of `stockpot.task.METRICS`, whose module needs torch; a test holds the two together.
MetricName = Literal[
    "accuracy", "loss", "perplexity", "macro_f1", "micro_f1", "balanced_accuracy",
    "r2", "negative_mse", "negative_mae", "pearson", "spearman", "roc_auc", "nats_per_token", "bits_per_byte",
    "token_accuracy", "token_f1", "entity_f1", "multiple_choice", "multiple_choice_normalised", "exact_match",
]  # fmt: skip


class Preprocessing(Section):
    """What is given here replaces what the model says about its own input."""

    size: Pixels | None = None
    """Height and width the model sees."""
    resize: int | None = Field(default=None, ge=1)
    """Shorter side before the centre crop. Default: squeezed straight to `size`."""
    mean: tuple[float, ...] | None = None
    """Per channel, for pixels scaled to [0, 1]."""
    std: tuple[Annotated[float, Field(gt=0)], ...] | None = None
    """Per channel, for pixels scaled to [0, 1]."""
    interpolation: Interpolation | None = None
    """How images are resized."""
    channels: Literal[1, 3] | None = None
    """1 for grey, 3 for colour."""


class Limits(Section):
    """Guards against files that unfold to far more than they look like. Raise one that real data meets."""

    rows: int = Field(default=10_000_000, ge=1)
    """Samples in one file."""
    pixels: int = Field(default=2**26, ge=1)
    """Pixels of one image."""
    bytes: Bytes = 2**26
    """What a compressed file may unfold to beyond 100 times its size."""


class Data(OfOneKind):
    """The samples coefficients are learned on (`fit`) and results are reported on (`report`)."""

    kinds = ("images", "table", "dataset", "arrays", "python")
    images: str | None = None
    """Folder with one sub-folder of images per class. Needs `stockpot[images]`."""
    table: str | None = None
    """CSV, TSV, JSONL or Parquet file, or the folder such files are in. Parquet needs `stockpot[tables]`. Or documents
    for a language model: a folder of `.txt` files, or one such file with `separator`; they are the column `text`."""
    dataset: str | None = None
    """Hugging Face dataset on disk (`save_to_disk`); parts are its splits. Needs `stockpot[tables]`."""
    arrays: str | None = None
    """`.npz` or `.safetensors` file, a folder of `.npy` files, or the folder such files are in. Arrays without a named
    part: `x` (or the only other array) and `y`, `label`, `labels` or `target`. A part named `test` is a file
    `test.npz`, or the arrays `x_test` and `y_test` (also `test_x`, `test_y`); so are `x_train`, `y_train` of a part
    named `train`."""
    python: Code | None = None
    """`module:function`, called with `train`, `fit` or `report`; returns tensors, a Dataset, a DataLoader, or None
    where there is no such split."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the python function."""
    text: Names | None = None
    """Column with text; two columns for pairs of texts. A causal language model learns all of it."""
    messages: str | None = None
    """For causal language models: column with chats, lists of messages with role and content. They go through the
    tokenizer's chat template, and the assistant's tokens are learned."""
    prompt: str | None = None
    """For language models: column with what comes before `completion`; not learned."""
    completion: str | None = None
    """Column with what the model is to answer; its tokens are learned. Causal models learn the end of text after it."""
    choices: Names | None = None
    """For multiple choice by a causal language model: column with lists of options, or one column for each option. An
    option stands directly behind `prompt`, so one of them has the blank between."""
    answer: str | None = None
    """Column with the right one of `choices`: its number (from 0), its letter (from A) or its text. It is learned."""
    generate: int | None = Field(default=None, ge=1)
    """For metric `exact_match`: in how many samples of each split, drawn by `split_seed`, answers are generated and
    judged, which takes most of the time of such a run. Default: all."""
    words: str | None = None
    """For token classification: column with lists of words."""
    tags: str | None = None
    """Column with lists of tags, one for each of `words`: names or numbers. A word's first token has its tag."""
    max_length: int | None = Field(default=None, ge=2)
    """Most tokens of a sequence. Default: as many as model and tokenizer take; for `long_texts: split` and `pack` at
    most 1024."""
    long_texts: Literal["refuse", "truncate", "split", "pack"] = "refuse"
    """What happens to longer ones: `refuse`; `truncate`, and the number of them is said; or `split` into several
    sequences (a causal language model's `text` only), which count as one group. `pack` also joins short ones, an end of
    text between them, as far as whole ones fit."""
    separator: str | None = Field(default=None, min_length=1)
    """What separates the documents in `.txt` files, such as `<|endoftext|>`. Default: each file is one document."""
    group: str | None = None
    """Column that says what a sample belongs to: a patient, document or speaker. Splits and folds never divide a group,
    and intervals, differences and the guard count groups."""
    image: str | None = None
    """Column with images or paths of images."""
    features: Names | None = None
    """Column or columns with numbers."""
    tokens: str | None = None
    """Column with token ids, all of one length; `attention_mask` is taken along if there is one."""
    label: str | Names | None = None
    """Column with what is predicted, or for target `number` and `multi` several. Default: `label`, `labels`, `y` or
    `target`."""
    target: Literal["class", "number", "multi"] = "class"
    """What a label is. `class`: the name or the whole number of one class. `number`: a measurement, for regression.
    `multi`: 0 or 1 for each of several classes, or a list of the names of those that apply. Nothing is guessed: other
    labels are refused."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in the order of the head. Default: the model's own names, or all names in the data,
    sorted."""
    train: ShortSplit | None = None
    """Samples that `finetune` trains on."""
    fit: ShortSplit | None = None
    """Samples the method may look at. A fraction (0.5), a number of samples, a named part (a file, sub-folder or
    split), or a mapping. Default: half."""
    report: Report | None = None
    """Samples touched once, at the end. Never overlaps `fit`. Default: the other half; none if only `fit` is given.
    Several sets by name, such as `{test: test, shifted: {path: other.csv}}`, are all scored; the first one counts.
    `{lm_eval: [arc_easy, hellaswag]}`, alone or among them, are tasks of lm-evaluation-harness."""
    split_seed: int = Field(default=0, ge=0, lt=2**32)
    """Which samples fall into which fraction."""
    limits: Limits = Limits()
    """What a file may hold before it is refused."""
    preprocessing: Preprocessing = Preprocessing()
    """Replaces parts of what the model says about its own input."""
    batch_size: int = Field(default=256, ge=1)
    """Samples scored at a time; fewer where their logits would take more than 1 GiB, as those of language models do."""
    memory_limit: Bytes = 8 * 2**30
    """Decoded data that may be kept in memory, such as `8GiB`."""
    cache: str | None = None
    """Folder for decoded images: they are kept there in files, mapped instead of held in memory (so that `memory_limit`
    does not count them), and found again by later commands. Default: none."""
    metric: MetricName | PythonCode | None = None
    """What is reported and compared: one of these words, or `{python: module:name}` of a function that gives one score
    per sample, or of a `Metric`. Higher is better; `loss` and `perplexity` are negated. Default: `r2` for target
    `number`, `micro_f1` for `multi`, `multiple_choice` where there are `choices`, for `words` `entity_f1` if the tags
    are `O`, `B-X`, `I-X`, else `token_f1`, `nats_per_token` for language models, otherwise `accuracy`."""
    loss: PythonCode | None = None
    """`{python: module:function}` called with model and batch. Default: the model's own loss, or by `target`
    cross-entropy, the squared error or binary cross-entropy."""

    @property
    def splits(self) -> dict[str, Split]:
        """All of them by name, such as `fit`, `report` or, of several sets, `report.shifted`."""
        report = self.report if isinstance(self.report, dict) else {"": self.report}
        named: dict[str, Any] = {"train": self.train, "fit": self.fit}
        named |= {f"report.{name}" if name else "report": split for name, split in report.items()}
        return {name: split for name, split in named.items() if isinstance(split, Split)}

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        # Defaults that depend on other keys are written out, so that the resolved recipe states them.
        if not isinstance(given, dict):
            return given
        usual = {"number": "r2", "multi": "micro_f1"}.get(str(given.get("target")))
        texts = ("text", "tokens", "messages", "prompt", "words")
        if given.get("choices") is not None:
            usual = "multiple_choice"
        elif usual is None and (given.get("label") is not None or not any(given.get(name) for name in texts)):
            usual = "accuracy"  # otherwise the model says it
        given = {"metric": usual, **given}
        splits = any(given.get(name) is not None for name in ("train", "report")) or "fit" in given
        return given if splits or given.get("python") is not None else {**given, "fit": 0.5, "report": 0.5}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        splits = self.splits
        if self.python is not None:
            if splits:
                raise ValueError(f"{next(iter(splits))}: the python function makes the splits itself")
            if self.group is not None:
                raise ValueError("group: let the python function return stockpot.task.Data.of(samples, groups=...)")
            return self
        if self.fit is None:
            raise ValueError("fit: required when train or report is given")
        kinds = ("text", "messages", "prompt", "image", "features", "tokens", "words")
        inputs = [name for name in kinds if getattr(self, name) is not None]
        if len(inputs) > 1:
            raise ValueError(f"expected at most one of {', '.join(kinds)}, found {' and '.join(inputs)}")
        follows = [name for name in ("completion", "choices") if getattr(self, name) is not None]
        if len(follows) != (self.prompt is not None):
            raise ValueError("prompt: expected prompt and completion together, or prompt, choices and answer")
        for one, other in (("choices", "answer"), ("words", "tags")):
            if (getattr(self, one) is None) != (getattr(self, other) is None):
                raise ValueError(f"{other}: expected {one} and {other} together")
        if self.generate is not None and self.metric != "exact_match":
            raise ValueError("generate: only for metric: exact_match, which generates answers")
        if self.long_texts in ("split", "pack") and inputs != ["text"]:
            raise ValueError("long_texts: expected refuse or truncate: only text can be split, and data.text names it")
        if self.long_texts == "pack" and self.group is not None:
            raise ValueError("long_texts: expected split, not pack, with group: a sequence would be of several groups")
        if self.separator is not None and inputs != ["text"]:
            raise ValueError("separator: only for documents, which data.text: text names")
        if self.text is not None and len(self.text) > 2:
            raise ValueError(f"text: expected one or two columns, found {len(self.text)}")
        if self.target != "class" and self.images is not None:
            raise ValueError("target: expected class, which folders of images are sorted by")
        if isinstance(self.label, tuple) and self.target == "class":
            raise ValueError("label: several columns need target: number or target: multi")
        self._check_metric(kinds)
        _check_disjoint(splits)
        return self

    def _check_metric(self, kinds: tuple[str, ...]) -> None:
        """A metric by name needs what it is computed from; the task would say so too, after the data was read."""
        keys, words = _NEEDED.get(str(self.metric), (kinds, ""))
        if words and not any(getattr(self, key) is not None for key in keys):
            raise ValueError(f"metric: {self.metric} needs data.{words}; write them, or another metric")
        if self.metric in _OF_NUMBERS and self.target != "number":
            raise ValueError(f"metric: {self.metric} needs target: number, for labels that are measurements")
        fitting = {"number": (*_OF_NUMBERS, "loss"), "multi": ("micro_f1", "macro_f1", "loss")}.get(self.target)
        if fitting is not None and isinstance(self.metric, str) and self.metric not in fitting:
            raise ValueError(f"metric: expected one of {', '.join(fitting)} for target: {self.target}")


def _check_disjoint(splits: dict[str, Split]) -> None:
    """Two splits may share a part only in fractions or counts that leave room for each other."""
    by_part: dict[tuple[str | None, str | None], dict[str, Split]] = {}
    for name, split in splits.items():
        if split.rows is None:
            by_part.setdefault((split.path, split.of), {})[name] = split
    for (path, part), sharing in by_part.items():
        whole = [name for name, s in sharing.items() if s.fraction is None and s.count is None]
        where = "the data" if part is None else f"part {part!r}"
        where += "" if path is None else f" of {path}"
        named = "".join(f"{key}: {value}, " for key, value in (("path", path), ("of", part)) if value is not None)
        if whole and len(sharing) > 1:
            raise ValueError(
                f"{' and '.join(sharing)} would share samples: {whole[0]} takes all of {where}; "
                f"give each a fraction, such as {{{named}fraction: 0.5}}"
            )
        total = sum(s.fraction or 0.0 for s in sharing.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the fractions of {' and '.join(sharing)} add up to {total:g}, more than {where} has")

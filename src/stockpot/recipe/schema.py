"""What a recipe may say, section by section. Nothing here loads torch.

The settings of `method` are those of `stockpot.soups.settings.Settings`: pydantic checks the types, bounds and
descriptions of that declaration, which are written nowhere else. `stockpot.soups.registry` decides which of them reach
which method.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PrivateAttr, create_model, model_validator
from typing_extensions import Self

from stockpot.errors import MethodError
from stockpot.files import at_home
from stockpot.recipe.data_section import Data
from stockpot.recipe.values import (
    Budget,
    Bytes,
    Code,
    Donor,
    FolderOrConfig,
    Names,
    Number,
    OfOneKind,
    PythonCode,
    Section,
    Space,
)
from stockpot.soups.registry import DEFAULT, METHODS, PRESETS, settings_for, settings_in_comparison
from stockpot.soups.settings import Declared, Setting, Settings, declared
from stockpot.zoo.plan import SPACES, Augmentation, Plan, Probe, Trial, checked, draw_trials

if TYPE_CHECKING:
    MethodName = str
    PresetName = str
else:
    MethodName = Literal[tuple(METHODS)]
    PresetName = Literal[tuple(PRESETS)]
Load = Callable[[PythonCode], Any]  # finds the function that a recipe names


def _field(name: str, kind: Any, setting: Setting, default: Any = None) -> tuple[Any, Any]:
    """One setting as recipes have it; without a default, absent means that something else decides."""
    limits = Field(strict=True, ge=setting.at_least, gt=setting.above, le=setting.at_most)
    about = setting.help.replace("none:", "null:").replace("a function", "`{python: module:function}`")
    united = typing.get_origin(kind) in (typing.Union, types.UnionType)
    options: list[Any] = []
    for option in typing.get_args(kind) if united else (kind,):
        if option in (int, float, bool):
            options.append(Annotated[option, Field(strict=True) if option is bool else limits])
        else:
            callable_ = typing.get_origin(option) not in (None, Literal)
            options.append(PythonCode if callable_ else option)
    if setting.unit == "bytes":
        options, about = [Bytes], f"{about} A size such as `8GiB`."
    if setting.unit == "seconds":
        options, about = [Budget], f"{about} A time such as `10min`."
    if name == "seed":
        about += " Default: `output.seed`."
    kinds = functools.reduce(operator.or_, [*options, None] if default is None else options)
    return kinds, Field(default, description=about)


_FIELDS = {name: _field(name, kind, setting) for name, (kind, setting) in declared().items()}
# Settings whose default is the same for every method and preset, so that a resolved recipe can state them.
_COMMON = {
    field.name: field.default
    for field in dataclasses.fields(Settings)
    if not any(field.name in method.defaults for method in METHODS.values())
    and field.name not in ("seed", "epochs", "weight_decay")
}


def _unloaded(code: PythonCode) -> Any:  # noqa: ARG001  (checking a recipe runs no code)
    """Some function from text to text."""
    return str


class _Stated(Section):
    def stated(self, load: Load | None = None) -> dict[str, Any]:
        """The settings that are given; null counts as given. Functions are loaded, or else written as in YAML."""
        given = {name: getattr(self, name) for name in _FIELDS if name in self.model_fields_set}
        return {
            name: value if not isinstance(value, PythonCode) else load(value) if load else value.model_dump()
            for name, value in given.items()
        }


class _Method(_Stated):
    """How mixing weights are found. A setting that is not given comes from the method and the preset."""

    name: MethodName = DEFAULT
    """The method `cook` uses."""
    preset: PresetName | None = Field(
        default=None, description="; ".join(f"`{name}`: {about}" for name, about in PRESETS.items()) + "."
    )
    methods: tuple[MethodName, ...] | None = Field(default=None, min_length=1)
    """The methods `compare` runs. Default: all, without those that would do the same as another one: mehl and mehl+
    where all models fit in one block."""
    each: dict[MethodName, MethodSettings] = Field(default_factory=dict)
    """Settings of single methods, such as `{mehl+: {steps: 500}}`; they win over those beside it. In a comparison
    `crossfit` takes its steps, rates, blocks and folds from here alone."""
    include: Names | None = None
    """Patterns of tensor names to mix. Default: all."""
    exclude: Names | None = None
    """Patterns of tensor names not to mix; they are copied from the donor."""
    donor: Donor = 0
    """Ingredient that gives what is not mixed: its name, or its number counted from 0."""

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        try:
            if self.preset is None or "name" in self.model_fields_set:  # a preset may be for `methods` alone
                self.settings()
            for name in self.compared:
                self.settings(name)
        except MethodError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def compared(self) -> tuple[MethodName, ...]:
        """The methods `compare` may run."""
        return self.methods or tuple(METHODS)

    def own(self, load: Load = _unloaded) -> dict[str, dict[str, Any]]:
        """The settings of single methods, as Python has them; `load` finds a function that one names."""
        return {name: section.stated(load) for name, section in self.each.items()}

    def for_cook(self, load: Load = _unloaded) -> dict[str, Any]:
        """The settings of the recipe's own method, as Python has them."""
        common, own = self.stated(load), self.own(load).get(self.name, {})
        for one, other in (("steps", "epochs"), ("epochs", "steps")):
            if own.get(one) is not None:
                common.pop(other, None)
        return {**common, **own}

    def settings(self, method: str | None = None, **defaults: Any) -> Settings:
        """What `cook` uses for the recipe's method, or `compare` for the one that is named."""
        if method is None:
            return settings_for(self.name, self.preset, **{**defaults, **self.for_cook()})
        return settings_in_comparison(method, self.preset, {**defaults, **self.stated(_unloaded)}, self.own())

    def resolved(self) -> dict[str, Any]:
        """Everything stated, and every default that does not depend on the method."""
        whole = self.model_dump(mode="json", exclude={"each", *_FIELDS})
        each = {name: section.stated() for name, section in self.each.items()}
        return {**whole, "each": each, **_COMMON, **self.stated()}


if TYPE_CHECKING:
    MethodSettings = _Stated
    Method = _Method
else:
    MethodSettings = create_model(
        "MethodSettings", __base__=_Stated, __doc__="Settings of one method of a comparison.", **_FIELDS
    )
    _Method.model_rebuild()
    Method = create_model("Method", __base__=_Method, __doc__=_Method.__doc__, **_FIELDS)


class PoolSection(Section):
    """The fine-tuned checkpoints that are mixed."""

    path: Names | None = None
    """Checkpoint files, folders of checkpoints or glob patterns, one or a list. Default: where `finetune` writes its
    checkpoints."""
    key: str | None = None
    """Where the weights are inside a nested file, as a dotted path (`state_dict`, `ema`). Default: found by itself."""
    rename: dict[str, str] | None = None
    """Prefixes of tensor names to replace, old to new: `{model.: ''}`."""
    mixed_dtypes: bool = False
    """Allow checkpoints of different floating-point types."""
    base: str | None = None
    """Of LoRA adapters: the folder of the model they were trained on, or its name in the Hugging Face cache. Default:
    what the adapters name."""
    nonfinite: Literal["refuse", "drop", "ignore"] = "refuse"
    """What to do with checkpoints that hold NaN or infinity: stop and name them (`refuse`), leave them out (`drop`), or
    do not look (`ignore`)."""


class Model(OfOneKind):
    """The model the checkpoints belong to: exactly one of the kinds, and how it runs."""

    kinds = ("transformers", "timm", "torchvision", "open_clip", "python")
    transformers: FolderOrConfig = None
    """Hugging Face transformers: a local model folder, a `config.json`, or the configuration itself as a mapping with
    `model_type`. Nothing is downloaded. Needs `stockpot[transformers]`."""
    timm: str | None = None
    """A model name of timm. Needs `stockpot[vision]`."""
    torchvision: str | None = None
    """A model name of torchvision. Needs `stockpot[vision]`."""
    open_clip: str | None = None
    """An OpenCLIP model name: its image encoder with a linear head. OpenAI's own weights need the names that end in
    `-quickgelu`. Needs `stockpot[clip]`."""
    python: Code | None = None
    """`module:function` that returns the `nn.Module`; looked for beside the recipe first."""
    auto_class: str | None = None
    """For `transformers`: the AutoModel class, such as `AutoModelForSequenceClassification`. Default: taken from the
    configuration's `architectures`."""
    tokenizer: str | None = None
    """For `transformers`: folder of the tokenizer. Default: the model folder."""
    classes: int | None = Field(default=None, ge=1)
    """Size of the head. Default: the model's own."""
    weights: str | None = None
    """A local checkpoint `finetune` starts from. `transformers` folders hold their own; cooking takes all weights from
    the pool."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments for the model's constructor or python function."""
    device: str = "auto"
    """`auto` (a GPU where there is one), `cpu`, `cuda`, `cuda:1`, `mps`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the model while methods work. `bfloat16` is for language models whose checkpoints are: half the memory,
    and on a GPU also of what is kept beside the model. `finetune` trains in float32, soups are computed in it."""
    autocast: Literal["none", "bfloat16", "float16"] = "none"
    """Compute type of mixed precision. Weights stay as they are."""
    statistics: Literal["recalibrate", "average", "copy"] = "recalibrate"
    """What happens to BatchNorm statistics of a soup: measured again on the fitting data, averaged like weights, or
    copied from the donor."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("auto_class", "tokenizer"):
            if getattr(self, name) is not None and self.kind != "transformers":
                raise ValueError(f"{name}: only for transformers models")
        if self.dtype != "float32" and self.kind == "python":
            raise ValueError("dtype: the python function returns the model in the type that it runs in")
        return self


if TYPE_CHECKING:
    ListedTrial = Section
else:
    _LISTED = {name: (Number | None, Field(None, description=f"As in `finetune.{name}`.")) for name in SPACES}
    ListedTrial = create_model("ListedTrial", __base__=Section, __doc__="Settings of one trial.", **_LISTED)


class _Finetune(Section):
    """Makes the pool: the head is trained alone first, then every trial trains all weights its own way.

    A search space is a number (fixed), a list (choices), or a range such as `{min: 1e-5, max: 1e-3, scale: log}`, whose
    scale is else `linear`."""

    dir: str = "pool"
    """Folder the checkpoints are written to."""
    trials: int = Field(default=12, ge=2)
    """Number of checkpoints."""
    probe: bool = True
    """Train the head alone first; every trial starts from that."""
    listed: tuple[ListedTrial, ...] | None = Field(default=None, min_length=2)
    """Settings of every trial, one mapping each, instead of a random search. What a mapping leaves out is drawn;
    `trials` is the length of the list."""

    @model_validator(mode="before")
    @classmethod
    def _count_listed(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("listed"), list):
            return {**given, "trials": len(given["listed"])}
        return given

    def drawn(self, seed: int) -> tuple[Trial, ...]:
        """The hyperparameters of every trial: a pure function of the recipe, the trial's number and the seed."""
        spaces = {name: getattr(self, name) for name in SPACES}
        listed = None if self.listed is None else [one.model_dump(exclude_none=True) for one in self.listed]
        return draw_trials(self.trials, seed=seed, listed=listed, spaces=spaces)

    def plan(self, seed: int) -> Plan:
        common, augmentation, probe = (
            {name: getattr(self, prefix + name) for name in names} for _, prefix, names in _SEARCH
        )
        given = Probe(**probe, seed=seed) if self.probe else None
        return Plan(self.drawn(seed), probe=given, augmentation=Augmentation(**augmentation), **common)


# What a search has beside its trials: where it is declared, how its keys begin, and which fields recipes have.
_SEARCH: tuple[tuple[type[Declared], str, tuple[str, ...]], ...] = (
    (Plan, "", ("batch_size", "optimizer", "warmup", "clip", "head")),
    (Augmentation, "", ("flip", "mixup")),
    (Probe, "probe_", ("epochs", "lr")),
)
if TYPE_CHECKING:
    Finetune = _Finetune
else:
    _SPACES = {
        name: (Space, Field(checked(SPACES[name]), description=setting.help))
        for name, (_, setting) in declared(Trial).items()
    }
    _OTHERS = {
        prefix + name: _field(prefix + name, *declared(of)[name], getattr(of, name))
        for of, prefix, names in _SEARCH
        for name in names
    }
    Finetune = create_model("Finetune", __base__=_Finetune, __doc__=_Finetune.__doc__, **_SPACES, **_OTHERS)


class Output(Section):
    """Where results go, and the seed everything random starts from."""

    dir: str = "run"
    """The run directory."""
    seed: int = Field(default=0, ge=0)
    """Seed of everything random except the split of the data."""
    max_shard_size: Bytes = 5 * 10**9
    """Soups above this size are written in several files."""
    form: Literal["auto", "merged", "adapter"] | Annotated[int, Field(ge=1)] = "auto"
    """What a soup of LoRA adapters is written as: `adapter` (exact, ranks added up), a number (an adapter of at most
    that rank), `merged` (a full model), or `auto`: the exact adapter where its rank is at most 512, else merged."""
    track: Literal["tensorboard", "mlflow", "wandb"] | None = None
    """A tracker that gets losses and scores. Needs `stockpot[tensorboard]`, `stockpot[mlflow]` or `stockpot[wandb]`."""
    overwrite: bool = False
    """Replace another run in that directory, as `--overwrite` does."""


class Recipe(Section):
    """From checkpoints and data to a soup. Paths are relative to the recipe file."""

    base: str | None = None
    """Folder that relative paths start from. Default: the recipe's own folder."""
    pool: PoolSection = PoolSection()
    """The checkpoints."""
    model: Model
    """The model they belong to."""
    data: Data
    """Samples to learn on and to report on."""
    method: Method = Method()
    """How mixing weights are found."""
    finetune: Finetune | None = None
    """How the pool is made, if it is not there yet."""
    output: Output = Output()
    """Where results go."""
    _folder: Path = PrivateAttr(default_factory=Path.cwd)

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.finetune is None and self.pool.path is None:
            raise ValueError("pool.path: required, unless there is a finetune section that makes the pool")
        if self.finetune is not None and self.data.train is None and self.data.python is None:
            raise ValueError("data.train: required by finetune: a fraction, a number of samples or a named part")
        return self

    @property
    def folder(self) -> Path:
        """Where relative paths start."""
        return self._folder

    def path(self, given: str) -> Path:
        """A path of the recipe as it is on this machine; works for glob patterns too."""
        return self._folder / at_home(given)

    def resolved(self) -> dict[str, Any]:
        """Every default filled in, in plain values; loads again from any folder as the same recipe."""
        whole = self.model_dump(mode="json", exclude={"method"})
        whole.update(base=str(self._folder), method=self.method.resolved())
        return {name: whole[name] for name in Recipe.model_fields if whole[name] is not None}

    def digest(self) -> str:
        """SHA-256 of what decides the result: neither where the files lie nor where the output goes."""
        content = self.resolved()
        del content["base"]
        del content["data"]["cache"]
        content["output"] = {"seed": self.output.seed}
        content["output"] |= {} if self.output.form == "auto" else {"form": self.output.form}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """For editors: completion and checking while a recipe is written."""
    schema = Recipe.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "stockpot recipe"}

"""`method`: how mixing weights are found.

The settings are those of `stockpot.soups.settings.Settings`: pydantic checks the types, bounds and descriptions of
that declaration, which are written nowhere else. `stockpot.soups.registry` decides which of them reach which method.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model, model_validator
from typing_extensions import Self

from stockpot.errors import MethodError
from stockpot.recipe.values import Bytes, Donor, Names, PythonCode, Seconds, Section
from stockpot.soups.registry import DEFAULT, METHODS, PRESETS, settings_for, settings_in_comparison
from stockpot.soups.settings import Setting, Settings, declared

if TYPE_CHECKING:
    MethodName = str
    PresetName = str
else:
    MethodName = Literal[tuple(METHODS)]
    PresetName = Literal[tuple(PRESETS)]
Load = Callable[[PythonCode], Any]  # finds the function that a recipe names


def _field(name: str, kind: Any, setting: Setting) -> tuple[Any, Any]:
    """One setting as recipes have it; absent means that method and preset decide."""
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
        options, about = [Seconds], f"{about} A time such as `10min`."
    if name == "seed":
        about += " Default: `output.seed`."
    return functools.reduce(operator.or_, [*options, None]), Field(None, description=about)


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

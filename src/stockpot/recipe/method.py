"""`method`: how mixing weights are found.

The settings are those of `stockpot.soups.settings.Settings`: types, bounds and descriptions are read from that
declaration and written nowhere else. Which of them reach which method is decided in `stockpot.soups.registry`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator
from typing_extensions import Self

from stockpot.errors import MethodError
from stockpot.recipe.values import Bytes, Names, PythonCode, Section, number_or_word, word_of, word_or_code
from stockpot.soups.registry import METHODS, PRESETS, settings_for, settings_in_comparison
from stockpot.soups.settings import Setting, Settings

MethodName: Any = word_of(METHODS)
PresetName: Any = word_of(PRESETS)


def _setting_field(name: str, declared: Any) -> tuple[Any, Any]:
    """Type and description of one setting, from its declaration; absent means that method and preset decide."""
    kind, setting = typing.get_args(declared)
    assert isinstance(setting, Setting)
    united = typing.get_origin(kind) in (typing.Union, types.UnionType)
    options = [o for o in (typing.get_args(kind) if united else (kind,)) if o is not type(None)]
    words = tuple(w for o in options if typing.get_origin(o) is Literal for w in typing.get_args(o))
    numbers = [o for o in options if o in (int, float, bool)]
    about = setting.help.replace("None", "null").replace("none:", "null:")
    limits: dict[str, Any] = {}
    made: Any
    if setting.unit == "bytes":
        made, about = Bytes, f"{about} A size such as `8GiB`."
    elif words and numbers:
        made = number_or_word(words, setting.at_least)
    elif words and len(options) > 1:
        made, about = word_or_code(words), about.replace("or a function", "or `{python: module:function}`")
    elif words:
        made = word_of(words)
    else:
        (made,) = numbers
        limits = {"ge": setting.at_least, "gt": setting.above, "le": setting.at_most}
    if name == "seed":
        about += " Default: `output.seed`."
    return made | None, Field(None, description=about, **limits)


_FIELDS = {
    name: _setting_field(name, hint)
    for name, hint in typing.get_type_hints(Settings, include_extras=True).items()
}
# Settings whose default is the same for every method and preset, so that a resolved recipe can state them.
_COMMON = {
    field.name: field.default
    for field in dataclasses.fields(Settings)
    if not any(field.name in method.defaults for method in METHODS.values())
    and field.name not in ("seed", "epochs", "weight_decay")
}


Load = Callable[[PythonCode], Any]  # finds the function that a recipe names


def _unloaded(code: PythonCode) -> Any:  # noqa: ARG001  (checking a recipe runs no code)
    """Some function from text to text."""
    return str


class _Stated(Section):
    def stated(self) -> dict[str, Any]:
        """The settings that are given; null counts as given."""
        found = {name: getattr(self, name) for name in _FIELDS if name in self.model_fields_set}
        if found.get("epochs") is not None and "steps" not in found:
            found["steps"] = None
        return found


if TYPE_CHECKING:
    MethodSettings = _Stated
else:
    MethodSettings = create_model(
        "MethodSettings", __base__=_Stated, __doc__="Settings of one method of a comparison.", **_FIELDS
    )


def _donor(value: object) -> object:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if number or (isinstance(value, str) and value):
        return value
    raise ValueError(f"expected the name or the number of an ingredient, found {value!r}")


Donor = Annotated[
    int | str,
    BeforeValidator(_donor),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}),
]


class _Method(_Stated):
    """How mixing weights are found. A setting that is not given comes from the method and the preset."""

    name: MethodName = Field("crossfit", description="The method `cook` uses.")
    preset: PresetName | None = Field(
        None, description="`paper` (the paper's text) or `authors` (what their released code does instead)."
    )
    methods: tuple[MethodName, ...] = Field(
        tuple(METHODS), min_length=1, description="The methods `compare` runs. Default: all."
    )
    each: dict[MethodName, MethodSettings] = Field(
        default_factory=dict,
        description="Settings of single methods, such as `{mehl+: {steps: 500}}`; they win over those beside it. "
        "In a comparison `crossfit` takes its steps, rates, blocks and folds from here alone.",
    )
    include: Names | None = Field(None, description="Patterns of tensor names to mix. Default: all.")
    exclude: Names | None = Field(
        None, description="Patterns of tensor names not to mix; they are copied from the donor."
    )
    donor: Donor = Field(
        0, description="Ingredient that gives what is not mixed: its name, or its number counted from 0."
    )

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        try:
            if self.preset is None or "name" in self.model_fields_set:  # a preset may be for `methods` alone
                self.settings()
            for name in self.methods:
                self.settings(name)
        except MethodError as error:
            raise ValueError(str(error)) from error
        return self

    def common(self, load: Load = _unloaded) -> dict[str, Any]:
        """The settings that stand beside `each`, as Python has them; `load` finds a function that one names."""
        return _loaded(self.stated(), load)

    def own(self, load: Load = _unloaded) -> dict[str, dict[str, Any]]:
        """The settings of single methods, as Python has them."""
        return {name: _loaded(section.stated(), load) for name, section in self.each.items()}

    def settings(self, method: str | None = None, load: Load = _unloaded, **defaults: Any) -> Settings:
        """What `cook` uses for the recipe's method, or `compare` for the one that is named."""
        common, own = {**defaults, **self.common(load)}, self.own(load)
        if method is not None:
            return settings_in_comparison(method, self.preset, common, own)
        return settings_for(self.name, self.preset, **{**common, **own.get(self.name, {})})

    def resolved(self) -> dict[str, Any]:
        """Everything stated, and every default that does not depend on the method."""
        whole = self.model_dump(mode="json", exclude={"each", *_FIELDS})
        each = {name: _plain(section.stated()) for name, section in self.each.items()}
        return {**whole, "each": each, **_COMMON, **_plain(self.stated())}


def _loaded(stated: dict[str, Any], load: Load) -> dict[str, Any]:
    return {k: load(v) if isinstance(v, PythonCode) else v for k, v in stated.items()}


def _plain(stated: dict[str, Any]) -> dict[str, Any]:
    return {k: v.model_dump() if isinstance(v, PythonCode) else v for k, v in stated.items()}


if TYPE_CHECKING:
    Method = _Method
else:
    Method = create_model("Method", __base__=_Method, __doc__=_Method.__doc__, **_FIELDS)

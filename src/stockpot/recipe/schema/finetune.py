"""`finetune`: how a pool is made from one pre-trained model."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator
from typing_extensions import Self

from stockpot.recipe.schema.base import Section, nearest
from stockpot.recipe.schema.space import Number, ShortSpace, Space

SEARCHED = ("lr", "weight_decay", "epochs", "label_smoothing", "augmentation", "seed")
_WHOLE = frozenset({"seed"})
_LOWEST = {"lr": 0, "weight_decay": 0, "epochs": 0, "label_smoothing": 0, "augmentation": 0, "seed": 0}


def _space(value: Any, about: str) -> Any:
    return Field(default_factory=lambda: Space.model_validate(value), description=about)


class Finetune(Section):
    """Makes the pool: the head is trained alone first, then every trial trains all weights its own way."""

    dir: str = Field("pool", description="Folder the checkpoints are written to.")
    trials: int = Field(12, ge=2, description="Number of checkpoints.")
    probe: bool = Field(True, description="Train the head alone first; every trial starts from that.")
    probe_epochs: float = Field(10, gt=0, description="Epochs of that.")
    probe_lr: float = Field(1e-3, gt=0, description="Learning rate of that.")
    head: str | None = Field(
        None, description="Name prefix of the head's tensors. Default: the model's last linear layer."
    )
    lr: ShortSpace = _space({"min": 1e-5, "max": 3e-4, "scale": "log"}, "Learning rate.")
    weight_decay: ShortSpace = _space({"min": 1e-4, "max": 0.5, "scale": "log"}, "Weight decay.")
    epochs: ShortSpace = _space({"min": 4, "max": 16}, "Epochs; a fraction of one is allowed.")
    label_smoothing: ShortSpace = _space({"choices": (0.0, 0.05, 0.1, 0.2)}, "Label smoothing.")
    augmentation: ShortSpace = _space(
        {"choices": (0.0, 0.25, 0.5, 1.0)}, "Strength of image augmentation; 0: none."
    )
    flip: bool = Field(
        False, description="Augmentation may mirror images left to right; wrong for digits and text."
    )
    mixup: float = Field(
        0.0,
        ge=0,
        description="Alpha of mixup at augmentation strength 1, and in proportion below; 0: none. "
        "Not for token ids or a loss of your own.",
    )
    seed: ShortSpace = _space({"min": 0, "max": 2**31 - 1}, "Seed of data order, dropout and augmentation.")
    listed: tuple[dict[str, Number], ...] | None = Field(
        None,
        min_length=2,
        description="Settings of every trial, one mapping each, instead of a random search. "
        "What a mapping leaves out is drawn as above; `trials` is the length of the list.",
    )
    batch_size: int = Field(128, ge=1, description="Samples per step.")
    optimizer: str = Field("adamw", pattern="^(adamw|sgd)$", description="`adamw` or `sgd`.")
    warmup: float = Field(0.1, ge=0, lt=1, description="Share of the steps with linear warm-up.")
    clip: float | None = Field(1.0, gt=0, description="Largest norm of the gradient. null: no limit.")
    parallel: int = Field(1, ge=1, description="Trials trained at once, where the device has room.")

    @model_validator(mode="before")
    @classmethod
    def _count_listed(cls, given: Any) -> Any:
        if isinstance(given, dict) and isinstance(given.get("listed"), list):
            return {**given, "trials": len(given["listed"])}
        return given

    @model_validator(mode="after")
    def _sensible(self) -> Self:
        for name in SEARCHED:
            if getattr(self, name).lowest() < _LOWEST[name]:
                raise ValueError(f"{name}: expected 0 or more, found {getattr(self, name).lowest()}")
        for index, settings in enumerate(self.listed or ()):
            for name, value in settings.items():
                if name not in SEARCHED:
                    close = nearest(name, SEARCHED)
                    hint = f"did you mean {close}?" if close else f"known: {', '.join(SEARCHED)}"
                    raise ValueError(f"listed.{index}.{name}: unknown key; {hint}")
                if value < _LOWEST[name]:
                    raise ValueError(f"listed.{index}.{name}: expected 0 or more, found {value}")
        return self

    def trial(self, index: int, seed: int) -> dict[str, int | float]:
        """The hyperparameters of one trial: a pure function of the recipe, the trial's number and the seed."""
        drawn = {
            name: getattr(self, name).draw(f"{seed}/{index}/{name}", name in _WHOLE) for name in SEARCHED
        }
        listed = self.listed[index] if self.listed is not None else {}
        return {**drawn, **listed}

"""A callback for the Trainer of Hugging Face transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from stockpot.adapters.code import need
from stockpot.callbacks import Collector, Every
from stockpot.errors import TaskError
from stockpot.task import Task
from stockpot.task.loss import is_causal

if TYPE_CHECKING:
    from transformers import TrainerCallback
else:
    TrainerCallback = need("transformers").TrainerCallback


class SoupCallback(Collector, TrainerCallback):
    """Collects ingredients while a Trainer trains, and cooks them when it is done.

    An ingredient is written at every save of the Trainer, every so many steps (`every=100`) or after every epoch
    (`every="epoch"`); the newest `keep` stay in `folder/ingredients`. When training is over, `folder/soup` is made of
    them by `method` on the Trainer's evaluation data, or by `task`, a function that makes a `Task` of the model.
    `method=None` only collects. `name` tells several trainings in one folder apart. `settings` are those of `cook`.

    Afterwards `result`, `soup` and `failure` say what came out. The model keeps its trained weights; with `load=True`
    it has the soup's.
    """

    def __init__(self, folder: str | Path, *, every: Every = "save", **options: Any) -> None:
        super().__init__(folder, every=every, **options)
        self._given = self._task is not None or self.method is None
        self._evaluated: str | None = None  # the evaluation set, or "" before its first; None outside of training

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._evaluated = ""
        asked = {"FSDP": args.fsdp, "DeepSpeed": args.deepspeed}
        sharded = next((how for how, given in asked.items() if given or _launched_with(how)), "")
        evaluates = str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"
        if self.every == "save" and str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            fix = "give every=100 (steps) or every='epoch', or let the Trainer save"
            raise self.wrong("every", "a Trainer that saves, for every='save'", "save_strategy 'no'", fix)
        adapters = hasattr(model, "peft_config")
        how = "give the Trainer an eval_dataset and eval_strategy='epoch'"
        if adapters:
            how = "the base of adapters has to be loaded anew: task=lambda model: Task(base_model, validation)"
            if self.load:
                fix = "leave load= out, and load the soup's adapter instead"
                raise self.wrong("load", "a model that takes the soup's weights", "one with adapters inside", fix)
        known = self._task is not None or (evaluates and not adapters)
        self.begin(state.global_step, args.world_size, sharded, known, how)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if isinstance(self.every, int) and state.global_step % self.every == 0:
            self._write(state, **more)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.every == "epoch":
            self._write(state, **more)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self.every == "save":
            self._write(state, **more)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, model: Any = None, eval_dataloader: Any = None,
        metrics: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """The first evaluation while training says what the soup is judged on."""
        ending = "_runtime"  # after the name of the evaluation set
        name = next((key.removesuffix(ending) for key in metrics or () if key.endswith(ending)), "eval")
        if self._evaluated is None or self.failure is not None or self._given:
            return
        try:
            if self._evaluated not in ("", name):
                fix = "say which: task=lambda model: Task(model, validation)"
                raise self.wrong("validation data", "one evaluation set", f"{self._evaluated} and {name}", fix)
            self._evaluated = name
            self.derived(lambda: self._derived(model, eval_dataloader))
        except TaskError as error:
            self.give_up(error)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._evaluated = None
        if state.is_world_process_zero:
            self.finish(model)

    def _write(self, state: Any, model: Any = None, processing_class: Any = None, **_: Any) -> None:
        if not state.is_world_process_zero:
            return

        def write(place: Path) -> None:
            model.save_pretrained(place)
            if hasattr(processing_class, "save_pretrained"):
                processing_class.save_pretrained(place)

        self.collect(model, state.global_step, write if hasattr(model, "save_pretrained") else None)

    def _derived(self, model: Any, loader: Any) -> Task:
        """The evaluation data as the Trainer collates it, with the model's own loss."""
        size = getattr(loader, "batch_size", None) or 32
        data = DataLoader(loader.dataset, batch_size=size, collate_fn=loader.collate_fn)
        return Task(model, data, metric="nats_per_token" if is_causal(model) else "accuracy", batch_size=size)


def _launched_with(how: str) -> bool:
    """Whether `accelerate launch` asks for it, of which the arguments of the Trainer say nothing."""
    return os.environ.get(f"ACCELERATE_USE_{how.upper()}", "").lower() == "true"

"""What the callbacks of all libraries share: ingredients that are written and kept, and the soup at the end."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from stockpot import files
from stockpot.cooking import cook
from stockpot.errors import RunError, StockpotError, TaskError
from stockpot.pool import Pool
from stockpot.soups.registry import DEFAULT, settings_for
from stockpot.soups.result import Result
from stockpot.task import Task
from stockpot.task.batches import users_code
from stockpot.zoo.folder import copied, load_weights, write_file

INGREDIENTS, SOUP = "ingredients", "soup"  # in the callback's folder
Every = int | Literal["save", "epoch"]
_NAME = r"[A-Za-z0-9][\w.-]{0,39}"


class Collector:
    """The ingredients of one training, and what is made of them; the callbacks say when things happen."""

    def __init__(
        self,
        folder: str | Path,
        *,
        every: Every,
        keep: int = 8,
        name: str = "",
        task: Task | Callable[[Any], Task] | None = None,
        method: str | None = DEFAULT,
        load: bool = False,
        **settings: Any,
    ) -> None:
        self.folder = Path(folder)
        self.every, self.keep, self.name = every, keep, name
        self.method, self.load, self.settings = method, load, settings
        self.result: Result | None = None  # what `cook` found, once training is over
        self.soup: Path | None = None  # where its soup was written
        self.failure: Exception | None = None  # why there is none
        self._task = task
        self._last: int | None = None  # step of the newest ingredient; None before training
        whole = isinstance(every, int) and not isinstance(every, bool)
        if (every < 1) if whole else (every not in ("save", "epoch")):  # type: ignore[operator]
            raise self.wrong("every", "a number of steps, 'save' or 'epoch'", repr(every), "use every=100")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            fix = "keep=8: the newest eight, one more while it is being written"
            raise self.wrong("keep", "a whole number of at least 1", repr(keep), fix)
        if name and not re.fullmatch(_NAME, name):
            raise self.wrong("name", "up to 40 letters, digits, dots and hyphens", repr(name), "use name='seed-1'")
        if method is not None:
            known = inspect.signature(cook).parameters
            settings_for(method, **{key: settings[key] for key in settings if key not in known or key == "preset"})

    def wrong(self, what: str, expected: str, found: str, fix: str) -> TaskError:
        return TaskError.of(f"SoupCallback, {what}", expected=expected, found=found, fix=fix)

    # Ingredients ----------------------------------------------------------------------------------------

    @property
    def ingredients(self) -> Path:
        return self.folder / INGREDIENTS

    def own(self) -> dict[str, int]:
        """This training's ingredients and their steps, in that order."""
        prefix = f"{re.escape(self.name)}-" if self.name else ""
        wanted = re.compile(rf"{prefix}step-(\d+)(\.safetensors)?")
        there = [entry.name for entry in self.ingredients.iterdir()] if self.ingredients.is_dir() else []
        found = {name: int(match[1]) for name in there if (match := wanted.fullmatch(name))}
        return dict(sorted(found.items(), key=lambda one: one[1]))

    def begin(self, step: int, processes: int, sharded: str, known: bool, how: str) -> None:
        """Refuse before training what could not be done after it. `known`: whether a task can be made."""
        if sharded:
            fix = "leave the callback out, and give the library's own checkpoints to `stockpot cook` afterwards"
            raise self.wrong("the model", "whole on every process", f"one that is sharded ({sharded})", fix)
        if processes > 1 and self.method is not None:
            fix = f"give method=None, and afterwards Pool.open({str(self.ingredients)!r}) to `cook`"
            raise self.wrong("cooking", "one process", f"{processes}", fix)
        there = self.own()
        if step == 0 and there:
            fix = "give another folder, a name= for each of several trainings, or remove these"
            expected = "a folder without ingredients of this name"
            raise RunError.of(str(self.ingredients), expected=expected, found=f"{len(there)} of them", fix=fix)
        if self.method is not None and not known:
            fix = f"{how}; or task=lambda model: Task(model, validation); or method=None, which only collects"
            raise self.wrong("task", "a task, or validation data of the trainer", "neither", fix)
        others = self.ingredients.is_dir() and {one.name for one in self.ingredients.iterdir()} - {*there}
        if self.method is not None and self.keep == 1 and not others:
            fix = "keep=8; or collect several trainings into this folder, of which the last one cooks"
            raise self.wrong("keep", "two ingredients for a soup, or those of other trainings", "one, keep=1", fix)
        files.make_directory(self.ingredients)
        if abandoned := [name for name, then in there.items() if then > step]:  # it goes on from before them
            files.clear(self.ingredients, abandoned, self.folder)
        self.failure, self._last = None, -1

    def collect(self, model: nn.Module, step: int, write: Callable[[Path], None] | None = None) -> None:
        """Write one ingredient, whole or not at all, and remove what is more than `keep`. `write` fills a folder."""
        if self._last in (step, None):  # such as what Lightning's search for a rate saves before training
            return
        self._last = step
        path = self.ingredients / f"{self.name}{self.name and '-'}step-{step:06d}"
        try:
            if write is None:
                tensors = copied(model.state_dict())
                files.require_space(path, sum(tensor.nbytes for tensor in tensors.values()), "an ingredient")
                write_file(path.with_name(f"{path.name}.safetensors"), tensors, {"format": "pt"}, self.folder)
            else:
                with files.directory(path, overwrite=True, root=self.folder) as place:
                    write(place)
            files.clear(self.ingredients, [*self.own()][: -self.keep], self.folder)
        except Exception as error:  # such as a disk that is full: training goes on
            warnings.warn(f"the ingredient of step {step} is missing: {error}", stacklevel=4)

    # The soup -------------------------------------------------------------------------------------------

    def derived(self, make: Callable[[], Task]) -> None:
        """Make the task from what the library has, unless the user gave one or none is needed."""
        if self._task is not None or self.method is None:
            return
        try:
            self._task = make()
        except StockpotError as error:
            reason = str(error).replace("\n", " ")
            fix = "give task=lambda model: Task(model, validation, loss=..., metric=...), or method=None"
            raise self.wrong("a task from the trainer's model and data", "one that fits", reason, fix) from error

    def finish(self, model: nn.Module) -> None:
        """Cook what was collected. It must not cost the training: where it fails, a warning says what to do."""
        if self.method is None or self.failure is not None:
            return
        try:
            self._cook(model)
        except Exception as error:  # of the user's functions too
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """No soup, and no end of the training either."""
        self.failure = error
        warnings.warn(f"no soup is made of {self.ingredients}: {error}\n  The ingredients are kept.", stacklevel=3)

    def _cook(self, model: nn.Module) -> None:
        assert self.method is not None
        base = None
        if adapters := getattr(model, "peft_config", None):
            base = next(iter(adapters.values())).base_model_name_or_path
        pool = Pool.open(self.ingredients, base=base)
        task = self._task
        if callable(task):
            with users_code("task= of SoupCallback", task, model):
                task = task(model)
        if task is None:
            fix = "evaluate at least once while training, or give task=lambda model: Task(model, validation)"
            raise self.wrong("task", "validation data by the end of training", "none", fix)
        shared = _places(model) & _places(task.model)  # it may be this one, be around it or be a part of it
        before = copied(model.state_dict()) if shared else None
        try:
            result = cook(pool, task, self.method, **self.settings)
            if result.soup is not None:
                self.soup = result.save(self.folder / SOUP, overwrite=True)
            self.result = result
        finally:
            if before is not None:
                load_weights(model, before, subject="the trained weights")
        if self.load and result.soup is not None:
            result.soup.load_into(model)


def _places(model: nn.Module) -> set[int]:
    """Where in memory the tensors of a model lie."""
    return {value.data_ptr() for value in model.state_dict().values() if isinstance(value, Tensor) and value.numel()}

"""From a checked recipe to the objects it describes. Torch is loaded here, inside the functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stockpot.errors import DataError, RecipeError, RunError, TaskError, describe
from stockpot.events import Listener, ignore
from stockpot.recipe.schema import Recipe
from stockpot.recipe.values import PythonCode, Split
from stockpot.soups.settings import Settings

if TYPE_CHECKING:
    from stockpot.adapters.inputs import ImageInput, LoadedModel
    from stockpot.pool import Pool
    from stockpot.task import Data, Task


def build_pool(recipe: Recipe, listen: Listener = ignore) -> Pool:
    """The opened, checked pool."""
    from stockpot.pool import Pool

    section = recipe.pool
    given = section.path
    if given is None:
        assert recipe.finetune is not None  # the schema has seen to it
        given = (recipe.finetune.dir,)
        folder = recipe.path(recipe.finetune.dir)
        if not folder.is_dir() or _is_empty(folder):
            raise RecipeError(
                describe(
                    f"finetune.dir {folder}",
                    expected="the checkpoints of this recipe's search",
                    found="an empty folder" if folder.is_dir() else "no such folder",
                    fix="run `stockpot finetune` with this recipe first, or name your checkpoints in pool.path",
                )
            )
    pool = Pool.open(
        *(str(recipe.path(path)) for path in given),
        key=section.key,
        rename=section.rename,
        mixed_dtypes=section.mixed_dtypes,
        listen=listen,
    )
    if section.nonfinite == "refuse":
        pool.verify_finite(listen)
    elif section.nonfinite == "drop":
        pool = pool.drop_nonfinite(listen)
    return pool


def _is_empty(folder: Path) -> bool:
    try:
        return not any(folder.iterdir())
    except OSError:  # opening the pool says why
        return False


def build_settings(recipe: Recipe, method: str | None = None) -> Settings:
    """What `cook` uses for the recipe's method, or `compare` for the one that is named."""
    load = functools.partial(_code, recipe)
    return recipe.method.settings(method, load, seed=recipe.output.seed)


def cook_arguments(recipe: Recipe, title: str = "", command: Sequence[str] = ()) -> dict[str, Any]:
    """What `stockpot.cooking.cook` is called with besides pool and task."""
    section, load = recipe.method, functools.partial(_code, recipe)
    build_settings(recipe)  # refused before anything is read
    own = section.own(load).get(section.name, {})
    return {"method": section.name, **_shared(recipe, "cook", title, command), **own}


def compare_arguments(
    recipe: Recipe, title: str = "", command: Sequence[str] = (), kind: str = "compare"
) -> dict[str, Any]:
    """What `stockpot.cooking.compare` is called with besides pool and task."""
    section, load = recipe.method, functools.partial(_code, recipe)
    return {"methods": section.methods, "each": section.own(load), **_shared(recipe, kind, title, command)}


def _shared(recipe: Recipe, kind: str, title: str, command: Sequence[str]) -> dict[str, Any]:
    from stockpot.run.directory import RecipeFacts

    section, run = recipe.method, recipe.path(recipe.output.dir)
    if run.resolve() == recipe.folder.resolve():
        raise RunError(
            describe(
                f"output.dir {recipe.output.dir!r}",
                expected="a directory of its own",
                found="the recipe's folder",
                fix="choose another directory, such as output.dir: runs/first",
            )
        )
    facts = RecipeFacts(
        title=title,
        kind=kind,
        command=tuple(command),
        digest=recipe.digest(),
        resolved=recipe.resolved(),
        code=code_digests(recipe),
        max_shard=recipe.output.max_shard_size,
    )
    return {
        "run": run,
        "overwrite": recipe.output.overwrite,
        "preset": section.preset,
        "include": section.include,
        "exclude": section.exclude,
        "donor": section.donor,
        "recipe": facts,
        "seed": recipe.output.seed,
        **section.common(functools.partial(_code, recipe)),
    }


def build_model(recipe: Recipe, pretrained: bool = False) -> LoadedModel:
    """The model on the CPU; `pretrained` also gives it the weights that `finetune` starts from."""
    from stockpot.adapters.models import load_model

    section = recipe.model
    loaded = load_model(
        section.kind,
        getattr(section, section.kind),
        folder=recipe.folder,
        classes=section.classes,
        options=section.options,
        weights=recipe.path(section.weights) if section.weights is not None else None,
        pretrained=pretrained,
        auto_class=section.auto_class,
        tokenizer=recipe.path(section.tokenizer) if section.tokenizer is not None else None,
        seed=recipe.output.seed,
    )
    own = section.kind == "python" and recipe.data.kind == "python"
    if not own or any(value is not None for value in recipe.data.preprocessing.model_dump().values()):
        _image(recipe, loaded).attach(loaded.model)  # touches nothing but uint8 images
    return loaded


def build_task(
    recipe: Recipe, listen: Listener = ignore, *, pretrained: bool = False, report: bool = True
) -> Task:
    """Model, metric and data, ready to be cooked with; without `report`, its samples are not even read."""
    from stockpot.task import Task

    loaded = build_model(recipe, pretrained)
    data = _splits(recipe, loaded, ("fit", "report") if report else ("fit",), listen)
    return Task(
        loaded.model,
        data["fit"],
        data.get("report"),
        **build_judge(recipe),
        statistics=recipe.model.statistics,
        memory_limit=_memory_limit(recipe),
        listen=listen,
    )


def build_judge(recipe: Recipe) -> dict[str, Any]:
    """How the model is run and scored, as keyword arguments that `Task` and `finetune` share."""
    section = recipe.data
    return {
        "loss": None if section.loss is None else _code(recipe, section.loss),
        "metric": section.metric if isinstance(section.metric, str) else _code(recipe, section.metric),
        "device": _device(recipe.model.device),
        "autocast": _dtype(recipe.model.autocast),
        "batch_size": section.batch_size,
    }


def build_train_data(recipe: Recipe, loaded: LoadedModel | None = None, listen: Listener = ignore) -> Data:
    """The samples `finetune` trains on."""
    from stockpot.task import Data

    if recipe.data.train is None and recipe.data.python is None:
        raise RecipeError("data.train: required by finetune: a fraction, a number of samples or a named part")
    loaded = loaded if loaded is not None else build_model(recipe)
    source = _splits(recipe, loaded, ("train",), listen)["train"]
    return Data.of(source, name="train data", memory_limit=_memory_limit(recipe), listen=listen)


def _splits(recipe: Recipe, loaded: LoadedModel, wanted: tuple[str, ...], listen: Listener) -> dict[str, Any]:
    from stockpot.adapters.code import call_code
    from stockpot.adapters.data import Columns, DataSource, read_splits

    section = recipe.data
    if section.python is not None:
        made = {name: call_code(section.python, recipe.folder, name, **section.options) for name in wanted}
        if made[wanted[0]] is None:
            raise DataError(
                describe(
                    f"python: {section.python}",
                    expected=f"data for {wanted[0]!r}",
                    found="None",
                    fix="return tensors, a Dataset or a DataLoader for it",
                )
            )
        return made
    shares = {
        name: _share(recipe, s)
        for name in ("train", "fit", "report")
        if (s := getattr(section, name)) is not None
    }
    source = DataSource(
        section.kind,
        recipe.path(getattr(section, section.kind)),
        Columns(section.text, section.image, section.features, section.tokens, section.label),
        shares,
        section.split_seed,
        section.classes,
        section.preprocessing.max_length,
        section.memory_limit,
        None if section.cache is None else recipe.path(section.cache),
    )
    return read_splits(source, loaded, _image(recipe, loaded), wanted, listen)


def _memory_limit(recipe: Recipe) -> int:
    """Decoded images in a cache are mapped from their files: the system reads and drops them as it likes."""
    return recipe.data.memory_limit if recipe.data.cache is None else sys.maxsize


def _image(recipe: Recipe, loaded: LoadedModel) -> ImageInput:
    from stockpot.adapters.inputs import ImageInput

    return (loaded.image or ImageInput()).override(recipe.data.preprocessing.model_dump())


def _share(recipe: Recipe, split: Split) -> Any:
    from stockpot.adapters.data import Share

    rows = None if split.rows is None else recipe.path(split.rows)
    return Share(split.of, split.fraction, split.count, rows)


def code_digests(recipe: Recipe) -> dict[str, str]:
    """Of the files beside the recipe whose functions it names."""
    from stockpot.adapters.code import code_digest

    grouping = [
        section.stated().get("granularity") for section in (recipe.method, *recipe.method.each.values())
    ]
    named = (recipe.data.loss, recipe.data.metric, *grouping)
    references = [recipe.model.python, recipe.data.python]
    references += [one.python for one in named if isinstance(one, PythonCode)]
    found = (code_digest(one, recipe.folder) for one in references if one is not None)
    return dict(one for one in found if one is not None)


def _code(recipe: Recipe, reference: PythonCode) -> Any:
    from stockpot.adapters.code import load_code

    return load_code(reference.python, recipe.folder)


def _device(name: str) -> str:
    import torch

    if name != "auto":
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise TaskError(
                describe(
                    f"model.device {name!r}",
                    expected="a device of this machine",
                    found=str(error).splitlines()[0],
                    fix="use auto or cpu",
                )
            ) from error
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _dtype(name: str) -> Any:
    import torch

    return None if name == "none" else getattr(torch, name)

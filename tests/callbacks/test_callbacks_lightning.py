"""The callback in the real Trainer of Lightning: what is collected, what is cooked, what is refused and when."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from stockpot import Pool, Soup, Task, average
from stockpot.callbacks.lightning import SoupCallback
from stockpot.cli.soups import export
from stockpot.errors import RunError, StockpotError, TaskError, WriteError
from stockpot.events import Event

# Of Lightning and torch about each other, not of ours.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*num_workers.*"),
    pytest.mark.filterwarnings("ignore:.*number of training batches.*"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:.*defined a `validation_step`.*"),
]


class Classifier(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("validation", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def loader(seed: int, n: int, **options: Any) -> DataLoader[Any]:
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, (x[:, 0] + x[:, 1] > 0).long()), batch_size=20, **options)


def train(
    folder: Path, callback: SoupCallback, module: pl.LightningModule | None = None, **options: Any
) -> tuple[pl.LightningModule, pl.Trainer]:
    module = Classifier() if module is None else module
    more = {"max_epochs": 4, "logger": False, "accelerator": "cpu", "enable_progress_bar": False}
    validation, ckpt = options.pop("validation", loader(1, 60)), options.pop("ckpt_path", None)
    callbacks = [callback, *options.pop("callbacks", [])]
    trainer = pl.Trainer(
        default_root_dir=folder / "logs", callbacks=callbacks, enable_model_summary=False, **{**more, **options}
    )
    trainer.fit(module, loader(0, 100, shuffle=True), validation, ckpt_path=ckpt)
    return module, trainer


def collected(folder: Path) -> list[str]:
    return sorted(entry.name for entry in (folder / "ingredients").iterdir())


def test_the_newest_epochs_become_a_soup_and_the_module_keeps_its_weights(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out", keep=3, steps=20)
    module, _ = train(tmp_path, callback)
    assert callback.failure is None
    assert collected(tmp_path / "out") == [f"step-0000{n}.safetensors" for n in (10, 15, 20)]  # of 5, 10, 15, 20
    assert callback.result is not None
    assert callback.result.method == "crossfit"
    assert callback.result.settings.steps == 20
    assert callback.result.held_out is not None
    assert callback.result.held_out.n == 60

    last = load_file(tmp_path / "out" / "ingredients" / "step-000020.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in module.state_dict().items())
    assert callback.soup == tmp_path / "out" / "soup"
    soup = Soup.load(callback.soup)
    assert len(soup.pool) == 3
    before = module.eval()(torch.ones(1, 8))
    soup.load_into(module)  # its names are those of the module
    assert not torch.equal(before, module(torch.ones(1, 8)))


def test_the_module_can_have_the_soups_weights_and_be_trained_on(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out", method="uniform", load=True)
    module, trainer = train(tmp_path, callback)
    assert callback.soup is not None
    saved = Soup.load(callback.soup).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())
    trainer.callbacks.remove(callback)
    trainer.fit_loop.max_epochs = 6
    trainer.fit(module, loader(0, 100), loader(1, 60))
    changed = [name for name, value in module.state_dict().items() if not torch.equal(value, saved[name])]
    assert "net.0.weight" in changed


def test_several_trainings_share_a_folder(tmp_path: Path) -> None:
    for seed, method in (("a", None), ("b", None), ("c", "greedy")):
        callback = SoupCallback(tmp_path / "out", keep=1, name=seed, method=method)
        train(tmp_path, callback, max_epochs=2)
        assert (callback.result is None) == (method is None)
    assert collected(tmp_path / "out") == [f"{name}-step-000010.safetensors" for name in "abc"]
    assert callback.result is not None
    assert callback.result.soup is not None
    assert callback.result.soup.pool.names == ("a-step-000010", "b-step-000010", "c-step-000010")


@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8, 12, 16, 20]), ("save", [10, 20]), ("epoch", [5, 10, 15, 20])])
def test_ingredients_are_written_by_steps_epochs_or_at_saves(tmp_path: Path, every: Any, steps: list[int]) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", every_n_epochs=2, save_top_k=-1)
    train(tmp_path, SoupCallback(tmp_path / "out", every=every, method=None), callbacks=[saves])
    assert collected(tmp_path / "out") == [f"step-{step:06d}.safetensors" for step in steps]
    assert len(Pool.open(tmp_path / "out" / "ingredients")) == len(steps)


def test_training_that_goes_on_goes_on_collecting_and_a_new_one_is_refused(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path / "saves", save_last=True)
    train(tmp_path, SoupCallback(tmp_path / "out", method=None), callbacks=[saves], max_epochs=2)
    again = SoupCallback(tmp_path / "out", method=None)
    train(tmp_path, again, callbacks=[saves], ckpt_path=tmp_path / "saves" / "last.ckpt")
    assert collected(tmp_path / "out") == [f"step-{step:06d}.safetensors" for step in (5, 10, 15, 20)]
    with pytest.raises(RunError, match=r"ingredients: expected a folder without .*, found 4 of them"):
        train(tmp_path, SoupCallback(tmp_path / "out", method=None))


class WithoutForward(Classifier):
    def forward(self, *given: Any) -> Any:
        raise NotImplementedError("this module has its loss in training_step")

    def training_step(self, batch: Any, index: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None: ...


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no validation data": ({}, {"validation": None}, "give the trainer's fit.. val_dataloaders; or task=lambda model"),
    "several": ({}, {"validation": [loader(1, 20), loader(2, 20)]}, "validation data: expected one loader, found 2"),
    "no logits": ({}, {"module": WithoutForward()}, r"(?s)a task from the trainer's model.*NotImplementedError.*task="),
    "one ingredient": ({"keep": 1}, {}, "keep: expected two ingredients for a soup, or those of other trainings"),
    "weights only": (
        {"every": "save"},
        {"callbacks": [ModelCheckpoint(save_weights_only=True)]},
        "every: expected a ModelCheckpoint that saves more than weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_said_before_training(tmp_path: Path, case: str) -> None:
    own, options, text = REFUSED[case]
    callback = SoupCallback(tmp_path / "out", **own)
    with pytest.raises(TaskError, match=text):
        train(tmp_path, callback, **options)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"every": 0}, "every: expected a number of steps, 'save' or 'epoch', found 0"),
        ({"every": "day"}, "every: expected a number of steps"),
        ({"keep": 0}, "keep: expected a whole number of at least 1, found 0"),
        ({"name": "a/b"}, "name: expected up to 40 letters"),
        ({"method": "grredy"}, "greedy"),
        ({"step": 10}, "steps"),
    ],
)
def test_arguments_are_checked_when_they_are_given(tmp_path: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(StockpotError, match=text):
        SoupCallback(tmp_path, **given)


def test_a_task_of_ones_own_is_made_when_training_is_over(tmp_path: Path) -> None:
    made = []

    def task(module: Any) -> Task:
        made.append(module)
        return Task(module.net, loader(1, 60))

    callback = SoupCallback(tmp_path / "out", task=task, method="greedy")
    module = Classifier()
    with pytest.warns(UserWarning, match=r"(?s)no soup is made of .*rename=.*ingredients are kept"):
        train(tmp_path, callback, module, validation=None)  # the names of `net` are not those of the module
    assert made == [module]
    assert callback.failure is not None
    assert callback.result is None
    assert len(collected(tmp_path / "out")) == 4

    own = SoupCallback(tmp_path / "own", task=lambda module: Task(module, loader(1, 60)), method="greedy")
    train(tmp_path, own, validation=None)
    assert own.result is not None


def test_a_failure_to_cook_does_not_cost_the_training(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out")
    with pytest.warns(UserWarning, match="no soup is made"):
        module, trainer = train(tmp_path, callback, max_epochs=1)
    assert trainer.state.finished
    assert torch.equal(
        load_file(tmp_path / "out" / "ingredients" / "step-000005.safetensors")["net.0.weight"],
        module.state_dict()["net.0.weight"],
    )


class Around(nn.Module):
    """A model of one's own, with the names and the very weights of the module."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.net = module.net

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def test_a_task_around_the_module_leaves_it_its_weights(tmp_path: Path) -> None:
    callback = SoupCallback(tmp_path / "out", task=lambda module: Task(Around(module), loader(1, 60)), method="uniform")
    module, _ = train(tmp_path, callback)
    last = load_file(tmp_path / "out" / "ingredients" / "step-000020.safetensors")
    assert callback.soup is not None
    assert all(torch.equal(value, last[name]) for name, value in module.state_dict().items())


def test_the_module_can_have_the_soup_of_another_models_task(tmp_path: Path) -> None:
    other = SoupCallback(
        tmp_path / "out", task=lambda _: Task(Around(Classifier()), loader(1, 60)), method="uniform", load=True
    )
    module, _ = train(tmp_path, other)
    assert other.soup is not None
    saved = Soup.load(other.soup).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in module.state_dict().items())


def test_where_cooking_fails_the_trained_weights_stay_also_if_the_soups_were_wanted(tmp_path: Path) -> None:
    def broken(model: Any, batch: Any) -> Tensor:
        raise ValueError("no such loss")

    callback = SoupCallback(tmp_path / "out", task=lambda one: Task(one, loader(1, 60), loss=broken), load=True)
    with pytest.warns(UserWarning, match="no such loss"):
        module, _ = train(tmp_path, callback)
    last = load_file(tmp_path / "out" / "ingredients" / "step-000020.safetensors")
    assert all(torch.equal(value, last[name]) for name, value in module.state_dict().items())


def test_a_search_for_the_rate_before_training_collects_nothing(tmp_path: Path) -> None:
    class Searched(Classifier):
        lr = 0.01

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    callback, module = SoupCallback(tmp_path / "out", every="save", method=None), Searched()
    trainer = pl.Trainer(
        default_root_dir=tmp_path, max_epochs=2, logger=False, accelerator="cpu", enable_model_summary=False,
        enable_progress_bar=False, callbacks=[callback, ModelCheckpoint(tmp_path / "saves", save_top_k=-1)],
    )  # fmt: skip
    Tuner(trainer).lr_find(module, loader(0, 100), loader(1, 60), num_training=5)
    trainer.fit(module, loader(0, 100), loader(1, 60))
    assert collected(tmp_path / "out") == ["step-000005.safetensors", "step-000010.safetensors"]


def test_a_folder_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file of mine")
    with pytest.raises(WriteError, match="out"):
        train(tmp_path, SoupCallback(tmp_path / "out"))


def test_a_disk_that_is_full_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = SoupCallback(tmp_path / "out", method="uniform")
    room = shutil.disk_usage(tmp_path)
    written: list[int] = []

    def usage(place: Path) -> Any:
        written.append(1)
        return room._replace(free=0) if len(written) == 2 else room

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.warns(UserWarning, match=r"the ingredient of step 10 is missing: .*expected .* of free space"):
        _, trainer = train(tmp_path, callback)
    assert trainer.global_step == 20
    assert collected(tmp_path / "out") == [f"step-{step:06d}.safetensors" for step in (5, 15, 20)]
    assert callback.soup is not None


class BestInTheMiddle(Classifier):
    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.log("validation", float(abs(self.current_epoch - 1)))


def test_what_lightning_leaves_is_a_pool_of_runs(tmp_path: Path) -> None:
    """As its ModelCheckpoint and loggers leave it: which file stands for a run, and that it is said."""
    said: list[str] = []

    def listen(event: Event) -> None:
        if event.kind == "run":
            said.append(f"{Path(event.data['run']).name}: {event.data['checkpoint']}, {event.data['why']}")

    for seed in range(2):
        place = tmp_path / "kept" / f"seed{seed}"
        keep = ModelCheckpoint(place, monitor="validation", save_top_k=2, save_last=True)
        train(tmp_path, SoupCallback(tmp_path / f"out{seed}", method=None), BestInTheMiddle(), callbacks=[keep])
        assert Path(keep.best_model_path).name == "epoch=1-step=10.ckpt"
    assert Pool.open(tmp_path / "kept", listen=listen).names == ("seed0/epoch=1-step=10", "seed1/epoch=1-step=10")
    assert said == [f"seed{seed}: epoch=1-step=10.ckpt, its best, by ModelCheckpoint" for seed in range(2)]
    assert len(Pool.open(tmp_path / "kept" / "seed0")) == 2  # of one run its steps, and last.ckpt is none of them
    shutil.rmtree(tmp_path / "kept")

    for seed in range(2):
        logger = CSVLogger(tmp_path / "logs" / f"seed{seed}")
        train(tmp_path, SoupCallback(tmp_path / f"csv{seed}", method=None), logger=logger)
    for sources in ([tmp_path / "logs"], [f"{tmp_path}/logs/*"], [tmp_path / "logs" / f"seed{n}" for n in range(2)]):
        said.clear()
        assert len(Pool.open(sources, listen=listen)) == 2
        assert said == ["version_0: epoch=3-step=20.ckpt, its last"] * 2
    train(tmp_path, SoupCallback(tmp_path / "csv2", method=None), logger=CSVLogger(tmp_path / "logs" / "seed0"))
    names = ("version_0/epoch=3-step=20", "version_1/epoch=3-step=20")
    assert Pool.open(tmp_path / "logs" / "seed0").names == names


class Sized(Classifier):
    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.more = nn.Linear(2, width)


def test_an_exported_soup_is_a_file_of_lightning(tmp_path: Path) -> None:
    for seed in range(2):
        keep = ModelCheckpoint(tmp_path / "kept" / f"seed{seed}")
        train(tmp_path, SoupCallback(tmp_path / f"out{seed}", method=None), Sized(width=3), callbacks=[keep])
    from_files = average(tmp_path / "kept", tmp_path / "soup")
    export(tmp_path / "soup", tmp_path / "soup.ckpt")
    loaded = Sized.load_from_checkpoint(tmp_path / "soup.ckpt", weights_only=True)
    assert loaded.hparams["width"] == 3
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in from_files.state_dict().items())
    average(
        [tmp_path / f"out{seed}" / "ingredients" for seed in range(2)], tmp_path / "again"
    )  # without hyperparameters
    export(tmp_path / "again", tmp_path / "again.ckpt")
    assert Sized.load_from_checkpoint(tmp_path / "again.ckpt", weights_only=True, width=3).hparams["width"] == 3

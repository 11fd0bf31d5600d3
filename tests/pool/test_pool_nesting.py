"""Where the weights are found in the files that trainers write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool_files import state, write

from stockpot.errors import CheckpointError, PoolError
from stockpot.pool import Checkpoint, open_checkpoint

RAW = {"w": torch.zeros(2)}
EMA = {"w": torch.ones(2)}


def opened(tmp_path: Path, saved: Any, **how: Any) -> Checkpoint:
    path = tmp_path / "m.ckpt"
    torch.save(saved, path)
    return open_checkpoint(path, **how)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", "weights", "net"])
def test_known_keys_are_found(tmp_path: Path, key: str) -> None:
    found = opened(tmp_path, {"epoch": 3, key: RAW, "optimizer": {"state": {0: {"m": torch.ones(9)}}}})
    assert (found.key, list(found.specs)) == (key, ["w"])


@pytest.mark.parametrize("ema", ["state_dict_ema", "model_ema", "ema_state_dict", "ema"])
def test_raw_weights_win_over_averaged_ones_unless_asked(tmp_path: Path, ema: str) -> None:
    saved = {ema: EMA, "state_dict": RAW}
    plain = opened(tmp_path, saved)
    assert (plain.key, plain.other_keys, plain.tensor("w").tolist()) == ("state_dict", (ema,), [0, 0])
    average = opened(tmp_path, saved, key="ema")
    assert (average.key, average.other_keys, average.tensor("w").tolist()) == (ema, ("state_dict",), [1, 1])
    alone = opened(tmp_path, {ema: EMA, "epoch": 1})
    assert alone.key == ema


def test_a_flat_state_dict_is_itself(tmp_path: Path) -> None:
    found = opened(tmp_path, {"model": torch.ones(1), "ema": torch.ones(2)})
    assert (found.key, list(found.specs)) == (None, ["ema", "model"])


def test_a_tensor_beside_the_weights_does_not_hide_them(tmp_path: Path) -> None:
    assert opened(tmp_path, {"best_score": torch.tensor(0.9), "model": RAW}).key == "model"


def test_the_users_path_wins(tmp_path: Path) -> None:
    saved = {"state_dict": RAW, "trainer": {"student": {"w": torch.full((2,), 5.0)}}, "a.b": {"c": EMA}}
    assert opened(tmp_path, saved, key="trainer.student").tensor("w").tolist() == [5, 5]
    assert opened(tmp_path, saved, key="a.b.c").tensor("w").tolist() == [1, 1]
    assert opened(tmp_path, saved).key == "state_dict"


def test_four_keys_deep_is_deeper_than_real_files_go(tmp_path: Path) -> None:
    three = {"model": {"module": {"state_dict": RAW}}}
    assert opened(tmp_path, three).key == "model.module.state_dict"
    with pytest.raises(CheckpointError):
        opened(tmp_path, {"net": three})


def test_nested_known_keys_give_a_dotted_path(tmp_path: Path) -> None:
    found = opened(tmp_path, {"model": {"state_dict": RAW, "ema": EMA}})
    assert (found.key, found.other_keys) == ("model.state_dict", ("model.ema",))


def test_entries_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    found = opened(tmp_path, {"state_dict": {"w": torch.ones(1), "epoch": 3, "note": None, 5: torch.ones(1)}})
    assert list(found.specs) == ["w"]
    assert found.ignored == ("epoch", "note", "5")


@pytest.mark.parametrize(
    ("saved", "key", "words"),
    [
        ({"state_dict": RAW}, "teacher", "weights under the key 'teacher', found nothing there"),
        ({"state_dict": RAW}, "teacher", "Fix: use one of the keys with weights: state_dict."),
        ({"state_dict": RAW, "epoch": 3}, "epoch", "an object of type int there"),
        ({"state_dict": RAW}, "ema", "weights under the key 'ema', found nothing there"),
        (
            {"student": RAW, "epoch": 3},
            None,
            "Fix: name the place of the weights, for example key='student'.",
        ),
        ([torch.ones(2)], None, "an object of type list"),
        ({}, None, "an empty mapping"),
        ({5: torch.ones(1)}, None, "no tensors at all"),
    ],
)
def test_weights_that_are_not_there(tmp_path: Path, saved: Any, key: str | None, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        opened(tmp_path, saved, key=key)
    assert words in str(caught.value)


def test_a_key_for_a_flat_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.safetensors", state())
    with pytest.raises(
        CheckpointError, match=r"under the key 'ema', found a flat checkpoint \(safetensors\)"
    ):
        open_checkpoint(path, key="ema")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_wrapper_prefixes_go_when_all_names_have_them(tmp_path: Path, prefix: str, suffix: str) -> None:
    path = write(tmp_path / f"m{suffix}", {prefix + name: tensor for name, tensor in state().items()})
    found = open_checkpoint(path)
    assert set(found.specs) == set(state())
    assert found.tensor("steps").item() == 7
    write(path, {prefix + "a": torch.ones(1), "b": torch.ones(1)})
    assert set(open_checkpoint(path).specs) == {prefix + "a", "b"}


def test_a_name_that_is_only_a_wrapper_keeps_it(tmp_path: Path) -> None:
    assert list(open_checkpoint(write(tmp_path / "m.pt", {"module.": torch.ones(1)})).specs) == ["module."]


def test_rename_by_the_longest_prefix_or_a_function(tmp_path: Path) -> None:
    path = write(tmp_path / "m.pt", {f"module.{name}": torch.ones(1) for name in ("net.a", "net.x.b", "c")})
    by_map = open_checkpoint(path, rename={"net.": "", "net.x.": "deep."})
    assert list(by_map.specs) == ["a", "c", "deep.b"]
    by_function = open_checkpoint(path, rename=lambda name: name.upper())
    assert list(by_function.specs) == ["C", "NET.A", "NET.X.B"]


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"a.": "", "b.": ""}, "'a.w' and 'b.w' both become 'w'"),
        (lambda name: None, "a name for the tensor 'a.w' from rename, found None"),
        ({"a.w": ""}, "a name for the tensor 'a.w' from rename, found ''"),
    ],
)
def test_renaming_that_loses_names_is_refused(tmp_path: Path, rename: Any, words: str) -> None:
    path = write(tmp_path / "m.pt", {"a.w": torch.ones(1), "b.w": torch.ones(1)})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path, rename=rename)
    assert words in str(caught.value)


def test_rename_of_the_wrong_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match=r"rename: expected a map of prefixes or a function, found 'model\.'"):
        open_checkpoint(tmp_path / "m.pt", rename="model.")  # type: ignore[arg-type]


def test_averaged_weights_are_known_anywhere_on_their_path(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"params_ema": {"model": {"w": torch.ones(1)}}}, path)
    assert open_checkpoint(path, key="ema").key == "params_ema.model"


def test_the_advice_names_a_place_with_tensors(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"epoch": {"number": 3}, "trainer": {"w": torch.ones(1)}}, path)
    with pytest.raises(CheckpointError, match="for example key='trainer'"):
        open_checkpoint(path)


def test_what_was_found_instead_is_outlined(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    for saved, words in (
        ({"epoch": 3, 7: "x"}, "found a mapping with the keys epoch, 7"),
        ({}, "found an empty mapping"),
        ([1], "found an object of type list"),
    ):
        torch.save(saved, path)
        with pytest.raises(CheckpointError, match=words):
            open_checkpoint(path)

"""A soup on disk: written whole or not at all, found again, rebuilt byte for byte."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stockpot import files, folders
from stockpot.errors import DigestError, PoolError, SoupError, WriteError
from stockpot.events import Event
from stockpot.layout import Layout
from stockpot.pool import Pool
from stockpot.pool.checkpoint import _DTYPES
from stockpot.pool.source import spec_of
from stockpot.soup import Soup, rebuild
from stockpot.soup import contents as soup_contents
from zoo import Tied, fine_tunes, layout_of, mlp, normed, same, write


def some_soup(pool: Pool, granularity: str = "tensor", **options: Any) -> Soup:
    layout = layout_of(pool, granularity)
    a = torch.randn(len(pool), len(layout), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W = 1 / len(pool) + 0.3 * (a - a.mean(dim=0))
    return Soup(pool, layout, W, about={"method": "by hand", "lr": 0.1, "beta": 1.25}, **options)


RULES: tuple[Any, ...] = ("average", "copy")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("max_shard", ["5GB", 90])
@pytest.mark.parametrize("build", [mlp, Tied, normed])
def test_rebuilding_gives_the_same_bytes(
    tmp_path: Path, build: Any, max_shard: int | str, dtype: torch.dtype | None
) -> None:
    pool = write(tmp_path / "pool", fine_tunes(build, 3))
    statistics = {"1.running_mean": torch.rand(8), "1.running_var": torch.rand(8)} if build is normed else None
    saved = some_soup(pool, statistics=statistics).save(tmp_path / "soup", dtype=dtype, max_shard=max_shard)
    again = rebuild(saved, tmp_path / "again")
    assert contents(saved) == contents(again)
    assert ("model.safetensors" in contents(saved)) == (max_shard == "5GB")


def test_rebuilding_from_moved_renamed_reordered_and_converted_ingredients(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    saved = some_soup(pool).save(tmp_path / "soup")
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for k, name in enumerate(["c", "a", "b"]):
        state = load_file(tmp_path / "pool" / f"model_{k}.safetensors")
        if name == "a":
            torch.save(state, moved / "a.pt")
        else:
            save_file(state, moved / f"{name}.safetensors")
    save_file({n: v + 1 for n, v in state.items()}, moved / "unrelated.safetensors")
    shutil.rmtree(tmp_path / "pool")
    loaded = Soup.load(saved, ingredients=moved)
    assert loaded.pool.names == ("c", "a", "b")
    again = rebuild(saved, tmp_path / "again", ingredients=moved)
    assert contents(again)["model.safetensors"] == contents(saved)["model.safetensors"]
    first, second = (json.loads((folder / "soup.json").read_text()) for folder in (saved, again))
    assert [i["digest"] for i in first.pop("ingredients")] == [i["digest"] for i in second.pop("ingredients")]
    assert first == second


def test_load_gives_back_everything_a_soup_is(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(normed, 3))
    layout = layout_of(pool, "module", exclude="4.*", donor=2)
    W = torch.tensor([[0.1, 1.1], [0.2, -0.3], [0.7, 0.2]], dtype=torch.float64)
    for rule in RULES:
        soup = Soup(pool, layout, W, statistics_rule=rule, about={"method": "x", "beta": 0.7})
        saved = soup.save(tmp_path / "soup", overwrite=True)
        for loaded in (Soup.load(saved), Soup.load(saved, ingredients=Pool.open(tmp_path / "pool"))):
            assert torch.equal(loaded.W, W)
            assert loaded.layout == layout
            assert loaded.statistics_rule == rule
            assert loaded.about == {"method": "x", "beta": 0.7}
            assert same(loaded.state_dict(), soup.state_dict())


def test_records_of_soups_that_this_version_would_make_otherwise_are_refused(tmp_path: Path) -> None:
    """Free weights are gone, and "copied" once meant the heaviest ingredient's statistics."""
    pool = write(tmp_path / "pool", fine_tunes(normed, 3))
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    for change, found in (({"free": True}, "need not sum to one"), ({"statistics": "copied"}, "'copied'")):
        value = json.loads((saved / "soup.json").read_text())
        (saved / "soup.json").write_text(json.dumps({**value, **change}))
        with pytest.raises(SoupError, match=f"expected a soup as this version makes them, found .*{found}"):
            Soup.load(saved)
        (saved / "soup.json").write_text(json.dumps({**value, "free": False, "temperature": None}))
        Soup.load(saved)


def test_duplicates_and_a_renamed_pool_are_matched(tmp_path: Path) -> None:
    states = [{f"wrapped.{n}": v for n, v in state.items()} for state in fine_tunes(mlp, 2)]
    write(tmp_path, [states[0], states[1], states[0]])
    pool = Pool.open(tmp_path, rename={"wrapped.": ""})
    soup = Soup(pool, Layout.of(pool, "model"), torch.tensor([[0.5], [0.2], [0.3]]))
    saved = soup.save(tmp_path / "soup")
    loaded = Soup.load(saved)
    assert loaded.pool.names == pool.names
    assert same(loaded.state_dict(), soup.state_dict())


def test_changed_ingredients_are_refused(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    saved = some_soup(pool).save(tmp_path / "soup")
    digest = pool.digests()[1]
    changed = tmp_path / "pool" / "model_1.safetensors"
    state = load_file(changed)
    state["0.bias"][0] += 1e-6
    save_file(state, changed)
    with pytest.raises(DigestError) as caught:
        rebuild(saved, tmp_path / "again")
    text = str(caught.value)
    assert "1 of 3 ingredients: expected the content the soup was made of, found other content or no file" in text
    assert f"model_1 ({changed.resolve()}): sha256 {digest[:16]}..." in text
    assert "Fix: restore the original checkpoints, or say where they are now: --pool, or ingredients=" in text
    assert all(line.strip(" .") for line in text.splitlines())
    assert not (tmp_path / "again").exists()


def test_missing_ingredients_are_named(tmp_path: Path) -> None:
    saved = some_soup(write(tmp_path / "pool", fine_tunes(mlp, 3))).save(tmp_path / "soup")
    (tmp_path / "pool" / "model_2.safetensors").unlink()
    with pytest.raises(PoolError, match=r"model_2\.safetensors[\s\S]*moved, say where they are now: --pool"):
        Soup.load(saved)
    with pytest.raises(PoolError, match="nowhere") as caught:
        Soup.load(saved, ingredients=tmp_path / "nowhere")
    assert "--pool" not in str(caught.value)  # said already


def test_shards_have_an_index_and_are_a_model_directory(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    soup = some_soup(pool)
    saved = soup.save(tmp_path / "soup", max_shard=200)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": pool.nbytes}
    assert index["weight_map"].keys() == pool.specs.keys()
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) > 1
    for name, file in index["weight_map"].items():
        with safe_open(saved / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), soup.state_dict()[name])
            assert opened.metadata() == {"format": "pt"}
    # A tensor larger than a shard has one of its own; no other shard is over the limit.
    assert sum(pool.specs[n].nbytes for n, file in index["weight_map"].items() if file == shards[0]) <= 200
    soup.save(tmp_path / "soups" / "one", max_shard=200)
    soup.save(tmp_path / "soups" / "two")
    both = Pool.open(tmp_path / "soups")
    assert both.digests()[0] == both.digests()[1]


def test_config_and_tokenizer_come_along_code_and_weights_do_not(tmp_path: Path) -> None:
    for k, state in enumerate(fine_tunes(mlp, 2)):
        folder = tmp_path / f"run_{k}"
        folder.mkdir()
        save_file(state, folder / "model.safetensors")
        for name in (
            "config.json",
            "tokenizer.json",
            "vocab.txt",
            "modeling_x.py",
            "optimizer.pt",
            "trainer_state.json",
        ):
            (folder / name).write_text(f"{k}")
    pool = Pool.open(str(tmp_path / "run_*"))
    saved = Soup.uniform(pool, Layout.of(pool, "model", donor=1)).save(tmp_path / "soup")
    brought = {"config.json", "tokenizer.json", "vocab.txt"}
    assert contents(saved).keys() == {*brought, "model.safetensors", "soup.json", "README.md"}
    assert (saved / "config.json").read_text() == "1"


@pytest.mark.parametrize("text", ['{"dtype": "float32", "text_config": {"torch_dtype": "float32"}, "x": 1}', "[]", "{"])
def test_a_config_names_the_dtype_that_the_soup_has(tmp_path: Path, text: str) -> None:
    """transformers loads a model in the type that its config names."""
    for k, state in enumerate(fine_tunes(mlp, 2)):
        (tmp_path / f"run_{k}").mkdir()
        save_file(state, tmp_path / f"run_{k}" / "model.safetensors")
        (tmp_path / f"run_{k}" / "config.json").write_text(text)
    soup = Soup.uniform(Pool.open(str(tmp_path / "run_*")))
    assert (soup.save(tmp_path / "same") / "config.json").read_text() == text
    half = (soup.save(tmp_path / "half", dtype=torch.float16) / "config.json").read_text()
    if "dtype" in text:
        assert json.loads(half) == {"dtype": "float16", "text_config": {"torch_dtype": "float16"}, "x": 1}
    else:
        assert half == text


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    """Every type, names that JSON escapes, and no values at all: soups of earlier versions rebuild byte for byte."""
    tensors: dict[str, torch.Tensor] = {"empty": torch.zeros(0, 4), "scalar": torch.tensor(1.0)}
    for number, dtype in enumerate(_DTYPES.values()):
        for name in ("\u00e9", 'z\n"\x7f'):
            tensors[f"{name}{number}"] = torch.ones(3, number % 3 + 1).to(dtype)
    tensors["strided"] = torch.arange(6.0).view(2, 3).T
    specs = {name: spec_of(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    soup_contents.write_weights(tmp_path, specs, tensors.items())
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()


def full(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("moment", ["weights", "digests", "record", "rename"])
def test_a_failing_save_leaves_nothing_behind_and_an_existing_soup_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existing: bool
) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    target = tmp_path / "out" / "soup"
    target.parent.mkdir()
    before = contents(Soup.uniform(pool).save(target)) if existing else {}
    pool = Pool.open(tmp_path / "pool")  # digests not known yet

    def listen(event: Event) -> None:
        if moment == "weights" and event.data["what"] == "building the soup" and event.data["done"] > 200:
            full()
        if moment == "digests" and event.data["what"] == "hash":
            full()

    soup = Soup(pool, Layout.of(pool, "model"), torch.tensor([[0.2], [0.3], [0.5]]))
    if moment == "record":
        monkeypatch.setattr(files, "write_json", full)
    if moment == "rename":
        # As on most systems but Linux.
        monkeypatch.setattr(folders, "_exchange", lambda folder, first, second: False)
        original = os.replace

        def replace(source: str, target: str, **where: Any) -> None:
            if re.fullmatch(r"\.soup\.[0-9a-f]{16}\.writing", source):
                full()
            original(source, target, **where)

        monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(WriteError, match="expected room and permission to write, found No space left"):
        soup.save(target, overwrite=existing, max_shard=200, listen=listen)
    monkeypatch.undo()
    assert sorted(p.name for p in target.parent.iterdir()) == (["soup"] if existing else [])
    assert not existing or contents(target) == before
    soup.save(target, overwrite=existing)
    assert contents(target) != before


def test_no_room_is_said_in_our_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soup = Soup.uniform(write(tmp_path / "pool", fine_tunes(mlp, 2)))
    monkeypatch.setattr(soup_contents, "raw_bytes", full)
    with pytest.raises(WriteError, match="expected room and permission to write, found No space left"):
        soup.save(tmp_path / "soup")
    assert not (tmp_path / "soup").exists()


def test_what_a_kill_between_the_two_renames_left_is_put_back(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 2))
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    before = contents(saved)
    saved.rename(tmp_path / ".soup.0123456789abcdef.replaced")
    (tmp_path / ".soup.0123456789abcdef.writing").mkdir()
    with pytest.raises(SoupError, match="expected a new directory, found something that already exists"):
        Soup.uniform(pool).save(saved)
    assert contents(saved) == before
    Soup.uniform(pool).save(saved, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pool", "soup"]


def test_overwriting_is_asked_for(tmp_path: Path) -> None:
    soup = Soup.uniform(write(tmp_path / "pool", fine_tunes(mlp, 2)))
    soup.save(tmp_path / "soup")
    with pytest.raises(SoupError, match=r"replace it: --overwrite \(in Python overwrite=True\)"):
        soup.save(tmp_path / "soup")
    (tmp_path / "soup" / "extra").write_text("old")
    soup.save(tmp_path / "soup", overwrite=True)
    assert not (tmp_path / "soup" / "extra").exists()


def spoil(folder: Path, change: Any) -> None:
    value = json.loads((folder / "soup.json").read_text())
    change(value)
    (folder / "soup.json").write_text(json.dumps(value))


def test_records_that_cannot_be_used(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(normed, 2))
    soup = some_soup(pool, statistics={"1.running_mean": torch.zeros(8)})

    def refused(change: Any, text: str) -> None:
        folder = soup.save(tmp_path / "soup", overwrite=True)
        change(folder)
        with pytest.raises(SoupError, match=text):
            Soup.load(folder)

    refused(lambda f: (f / "soup.json").unlink(), r"expected a saved soup with a soup\.json, found none")
    refused(lambda f: (f / "soup.json").write_text("{"), "expected a readable soup record")
    refused(lambda f: (f / "soup.json").write_text("[]"), "expected a soup record of format 1, found 'list'")
    refused(lambda f: spoil(f, lambda v: v.update(format=9)), "format 1, found 9.*\n.*update stockpot")
    refused(lambda f: spoil(f, lambda v: v.pop("W")), "expected a complete soup record, found KeyError: 'W'")
    refused(lambda f: spoil(f, lambda v: v["W"][0].pop()), "complete soup record, found ValueError")
    refused(lambda f: (f / "statistics.safetensors").unlink(), r"statistics\.safetensors: .* found nothing")
    refused(lambda f: (f / "statistics.safetensors").write_bytes(b"no"), "expected a whole safetensors file, found")


def test_a_pool_renamed_by_a_function_cannot_be_reopened_from_a_record(tmp_path: Path) -> None:
    write(tmp_path / "pool", fine_tunes(mlp, 2))
    pool = Pool.open(tmp_path / "pool", rename=lambda name: f"x.{name}")
    saved = Soup.uniform(pool).save(tmp_path / "soup")
    with pytest.raises(SoupError, match="a Python function, which is not stored"):
        Soup.load(saved)


@pytest.mark.parametrize(
    ("text", "size"), [("2GB", 2 * 10**9), ("1.5 MiB", 1572864), ("300", 300), ("7kb", 7000), (12, 12)]
)
def test_sizes(text: str | int, size: int) -> None:
    assert soup_contents.shard_size(text) == size


def test_a_size_that_is_none() -> None:
    with pytest.raises(SoupError, match="size 'big': expected a number of bytes such as 2000000"):
        soup_contents.shard_size("big")


def test_the_soup_is_as_readable_as_any_file_of_the_user(tmp_path: Path) -> None:
    pool = write(tmp_path / "pool", fine_tunes(mlp, 3))
    folder = Soup.uniform(pool).save(tmp_path / "soup")
    (tmp_path / "mine").touch()
    usual = (tmp_path / "mine").stat().st_mode
    assert {file.name: file.stat().st_mode for file in folder.iterdir() if file.stat().st_mode != usual} == {}


def test_an_export_is_the_saved_weights_and_nothing_else(tmp_path: Path) -> None:
    soup = some_soup(write(tmp_path / "pool", fine_tunes(mlp, 3)))
    saved, exported = soup.save(tmp_path / "saved"), soup.export(tmp_path / "exported")
    assert contents(exported) == {"model.safetensors": (saved / "model.safetensors").read_bytes()}
    with pytest.raises(SoupError, match="expected a new directory"):
        soup.export(tmp_path / "exported")


def test_a_record_names_files_and_no_patterns(tmp_path: Path) -> None:
    """A stranger's pattern would search the whole disk."""
    saved = Soup.uniform(write(tmp_path / "pool", fine_tunes(mlp, 2))).save(tmp_path / "soup")
    pattern = str(tmp_path / "pool" / "*.safetensors")
    spoil(saved, lambda value: [entry.update(path=pattern) for entry in value["ingredients"]])
    with pytest.raises(PoolError, match="no files match"):
        Soup.load(saved)
    odd = tmp_path / "od[d]*" / "pool"
    soup = Soup.uniform(write(odd, fine_tunes(mlp, 2)))
    assert same(Soup.load(soup.save(tmp_path / "odd")).state_dict(), soup.state_dict())


@pytest.mark.parametrize("name", ["soup.json", "statistics.safetensors"])
@pytest.mark.parametrize("kind", ["link", "dangling", "fifo", "device", "directory"])
def test_what_leads_out_of_a_soup_or_never_ends_is_not_read(tmp_path: Path, name: str, kind: str) -> None:
    pool = write(tmp_path / "pool", fine_tunes(normed, 2))
    saved = some_soup(pool, statistics={"1.running_mean": torch.zeros(8)}).save(tmp_path / "soup")
    (saved / name).rename(tmp_path / "elsewhere")
    if kind == "fifo":
        os.mkfifo(saved / name)
    elif kind == "directory":
        (saved / name).mkdir()
    else:
        target = {"link": tmp_path / "elsewhere", "dangling": tmp_path / "none", "device": Path("/dev/zero")}[kind]
        (saved / name).symlink_to(target)
    with pytest.raises(SoupError, match=r"symbolic link|regular file|a directory|Is a directory"):
        rebuild(saved, tmp_path / "again")
    assert not (tmp_path / "again").exists()

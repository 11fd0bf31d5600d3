"""`stockpot export` and `stockpot push`: a soup in other forms, and what would be sent of it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cli.conftest import Answer, Stockpot


@pytest.fixture
def folders(folder: Path) -> list[Path]:
    """The pool as Hugging Face folders."""
    made = []
    for file in sorted((folder / "pool").glob("*.safetensors")):
        made.append(folder / "models" / file.stem)
        made[-1].mkdir(parents=True)
        shutil.copy(file, made[-1] / "model.safetensors")
        (made[-1] / "config.json").write_text("{}")
    return made


def test_a_soup_goes_out_and_comes_back_in_other_forms(folder: Path, folders: list[Path], stockpot: Stockpot) -> None:
    assert stockpot("average", *folders, "--weights", "1,1,1,5", "--out", folder / "soup").code == 0
    soup = load_file(folder / "soup" / "model.safetensors")
    answer = stockpot("export", folder / "soup", folder / "merge.yaml")
    assert answer.code == 0, answer.err
    assert "    weight: 0.625" in (folder / "merge.yaml").read_text()
    answer = stockpot("average", folder / "merge.yaml", "--out", folder / "again")
    assert answer.code == 0, answer.err
    again = load_file(folder / "again" / "model.safetensors")
    assert all(torch.equal(soup[name], again[name]) for name in soup)
    for name, nested in (("a.pt", False), ("a.ckpt", True), ("a.pth.tar", True)):
        assert stockpot("export", folder / "soup", folder / name).code == 0
        state = torch.load(folder / name, weights_only=True)
        state = state["state_dict"] if nested else state
        assert all(torch.equal(soup[key], state[key]) for key in soup)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("export", "soup", "a.onnx"), "expected an ending among .yaml, .yml, .pt, .pth, .bin, .pth.tar, .ckpt, found"),
        (("export", "soup", "toy.py.pt"), "toy.py.pt exists; add --overwrite to replace it"),
        (("export", "nothing", "a.pt"), "expected a saved soup with a soup.json, found none"),
        (("average", "recipe.yaml", "--out", "x"), "expected merge_method: linear, found None"),
        (("average", "recipe.yaml", "--decay", "0.5", "--out", "x"), "not with a mergekit configuration"),
        (("average", "none.yaml", "--out", "x"), "none.yaml: there is no such recipe"),
    ],
)
def test_wrong_forms(
    folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(folder)
    (folder / "toy.py.pt").touch()
    assert stockpot("average", "pool", "--out", "soup").code == 0
    answer = stockpot(*arguments)
    assert answer.code != 0
    assert text in re.sub(r"[\s│]+", " ", answer.err)
    assert (folder / "toy.py.pt").stat().st_size == 0


def test_a_dry_run_says_what_would_be_sent_and_needs_no_network(
    folder: Path, folders: list[Path], stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("huggingface_hub")

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("a dry run went to the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    for place in folders:
        (place / "config.json").write_text('{"_name_or_path": "org/base", "architectures": ["X"]}')
    assert stockpot("average", *folders, "--out", folder / "soup").code == 0
    answer = stockpot("push", folder / "soup", "me/soup", "--dry-run")
    assert answer.code == 0, answer.err
    assert [line.split()[0] for line in answer.out.splitlines()[1:4]] == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert "soup.json" not in answer.out
    assert "base models: org/base; tags: merge, model-soup" in answer.out
    assert "Nothing was sent." in answer.out


def test_a_soup_by_itself_has_no_methods_to_choose_from(folder: Path, stockpot: Stockpot) -> None:
    assert stockpot("average", folder / "pool", "--out", folder / "soup").code == 0
    assert "every byte is the same" in stockpot("rebuild", folder / "soup").out
    answer = stockpot("rebuild", folder / "soup", "--method", "hl+")
    assert "expected a run, where --method chooses, found no run" in answer.err


def test_what_cannot_be_pushed(folder: Path, stockpot: Stockpot) -> None:
    pytest.importorskip("huggingface_hub")
    answer = stockpot("push", folder / "pool", "me/soup", "--dry-run")
    assert "expected a saved soup with its card, found no README.md" in answer.err
    (folder / "README.md").write_text("# A project of mine")
    answer = stockpot("push", folder, "me/soup", "--dry-run")
    assert "expected a saved soup with its card, found no soup.json" in answer.err
    assert stockpot("average", folder / "pool", "--out", folder / "soup").code == 0
    answer = stockpot("push", folder / "soup", "a/b/c", "--dry-run")
    assert answer.code == 2
    assert "a/b/c" in answer.err


def test_without_a_network_a_push_says_so(folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class ConnectError(Exception):
        """As httpx has it: no OSError."""

    def refused(*_: object, **__: object) -> None:
        raise ConnectError("[Errno -2] Name or service not known")

    monkeypatch.setattr(hub, "create_repo", refused)
    assert stockpot("average", folder / "pool", "--out", folder / "soup").code == 0
    answer = stockpot("push", folder / "soup", "me/soup")
    assert "expected the Hub to take it, found [Errno -2] Name or service not known" in answer.err
    assert "check the name and the network" in answer.err


def test_names_that_are_patterns_send_no_other_files(
    folder: Path, stockpot: Stockpot, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = pytest.importorskip("huggingface_hub")
    assert stockpot("average", folder / "pool", "--out", folder / "soup").code == 0
    (folder / "soup" / "s*.json").write_text("{}")
    (folder / "soup" / "notes").mkdir()
    sent: list[str] = []

    def upload(*, folder_path: Path, allow_patterns: list[str], **_: str) -> str:
        there = [str(file.relative_to(folder_path)) for file in folder_path.rglob("*")]
        sent.extend(hub.utils.filter_repo_objects(there, allow_patterns=allow_patterns))
        return "there"

    monkeypatch.setattr(hub, "create_repo", lambda *_, **__: None)
    monkeypatch.setattr(hub, "upload_folder", upload)
    assert stockpot("push", folder / "soup", "me/soup").code == 0
    assert sorted(sent) == ["README.md", "model.safetensors", "s*.json"]


def test_the_card_of_a_run_has_the_table_of_scores(compared: Answer, shared: Path) -> None:
    (card,) = (shared / "run" / "methods").glob("*/soup/README.md")
    results = card.read_text().split("## Results\n")[1]
    assert "| best |" in results
    assert "95 % interval" in results
    assert results.strip() in (shared / "run" / "report.md").read_text()

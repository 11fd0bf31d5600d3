"""A sample of `make torture`'s damaged files, the files that once went wrong, and proof that the judge can say no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from stockpot.errors import CheckpointError
from stockpot.pool import open_checkpoint
from torture import decoders
from torture.mutated_files import AS_ITS_BYTES, REFUSED, WHOLE, WrongError, judge
from torture.mutations import Original, originals

CORPUS = sorted(path for path in (Path(__file__).parent / "corpus").iterdir() if path.suffix != ".md")
TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_what_once_went_wrong_is_refused(path: Path) -> None:
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_sample_of_damaged_files() -> None:
    places = os.pathsep.join((str(TESTS.parent / "src"), str(TESTS), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, "-m", "torture.mutated_files", "--count", "320", "--seed", "7"],
        env={**os.environ, "PYTHONPATH": places},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "320 damaged files, seed 7, 0 failures" in done.stdout


def _original(path: Path) -> Original:
    return Original("x", path, ("",), lambda p, key: decoders.safetensors(p.read_bytes()))


def test_the_judge_knows_right_from_wrong(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "a.safetensors")
    path = tmp_path / "a.safetensors"
    honest = decoders.safetensors(path.read_bytes())
    assert judge(_original(path), path, honest) == WHOLE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # in the data: nothing in the file can tell
    path.write_bytes(content)
    assert judge(_original(path), path, honest) == AS_ITS_BYTES
    liar = Original("x", path, ("",), lambda p, key: honest)
    with pytest.raises(WrongError, match=r"other tensors than its bytes say: \['w'\]"):
        judge(liar, path, {})
    path.write_bytes(content[:-1])
    assert judge(_original(path), path, honest) == REFUSED


def test_decoders_and_package_agree_on_whole_files(tmp_path: Path) -> None:
    for original in originals(tmp_path / "o"):
        if original.openable:
            assert judge(original, original.path, original.read(original.path, original.key)) == WHOLE
        else:
            assert judge(original, original.path, {}) == REFUSED

"""The forecast for several GPUs: its pieces are those of the files, its check is the one that the page shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stockpot.soups.forecast import Pieces, Size, Work, _memory, _scaled, arranged, work_of

TOP = Path(__file__).parents[2]
PAGE = (TOP / "docs" / "scaling.md").read_text()
RESULTS = TOP / "benchmarks" / "results"
TOKENS = 512  # of a sample
GB = 10**9


def llama(parameters: int, block: int, tensors: int, largest: int = 1, batch: int = 64) -> Work:
    """A language model in bf16 of a pool of eight, learned with from batches of 512 tokens."""
    return Work(parameters, 2, 8, block, tensors, tensors, largest, 1, batch, 2.0 * parameters * TOKENS)


LLAMA = {"7B": llama(6_738_415_616, 8, 291, 202_383_360), "70B": llama(68_976_648_192, 8, 723, 855_654_400)}


def test_pieces_are_what_was_measured() -> None:
    large = json.loads((RESULTS / "llm_step_7b.json").read_text())
    rate = 6 * large["7b"]["parameters"] * 8 * TOKENS / large["7b"]["plain"]["graph_ms"] * 1e3
    assert Pieces().rate == pytest.approx(rate, rel=0.01)
    small = json.loads((RESULTS / "llm_step.json").read_text())["0.3b"]
    assert Pieces().launch == pytest.approx(small["plain"]["eager_ms"] / 1e3 / small["0.3b bf16"]["groups"], rel=0.01)
    kernels = json.loads((RESULTS / "kernels.json").read_text())
    slowest = min(one[name]["tb_s"] for one in kernels["results"] for name in ("project", "mix"))
    assert Pieces().bandwidth == pytest.approx(slowest * 1e12, rel=0.02)


CHECKED = {  # case: file, shape, block, directions
    "7b int8, 2 at a time": ("llm_step_7b.json", "7b", 2, torch.int8),
    "1b bf16": ("llm_step.json", "1b", 8, torch.bfloat16),
    "1b int8": ("llm_step.json", "1b", 8, torch.int8),
    "0.3b bf16": ("llm_step.json", "0.3b", 8, torch.bfloat16),
}


@pytest.mark.parametrize("case", CHECKED)
def test_the_model_against_steps_that_were_measured(case: str) -> None:
    file, shape, block, dtype = CHECKED[case]
    found = json.loads((RESULTS / file).read_text())[shape]
    work = llama(found["parameters"], block, 1, batch=8)
    held = _memory(work, 1, dtype)
    for part in ("directions", "soup", "model"):
        assert held[part] / 2**30 == pytest.approx(found[case]["parts_gib"][part], abs=0.01)
    seconds = _scaled(work, 1, 1, dtype, held, True, Pieces()).seconds
    assert seconds is not None
    off = seconds[0] * 1e3 / found[case]["ms"] - 1
    row = f"| {case} | {found[case]['ms']:.1f} ms | {seconds[0] * 1e3:.1f} ms | {100 * off:+.0f} % |".replace(
        "-", "\u2212"
    )
    assert row in PAGE
    assert -0.4 < off < 0


def test_the_tables_of_the_page_are_what_the_model_says() -> None:
    for name, work in LLAMA.items():
        for ranks in (8, 64):
            for block in (8, 2):
                found = arranged(replace(work, block=block), ranks, 80 * GB)
                assert found.seconds is not None
                way = "data" if found.way == "data" else f"shards, {found.together} together"
                time = " to ".join(f"{one:.2f}" for one in sorted(set(found.seconds))) + " s"
                fsdp = f"{found.fsdp / GB:.1f} GB" if found.fsdp else "–"
                fits = f"{found.total / GB:.0f} GB" if found.fits else f"does not fit: {found.total / GB:.0f} GB"
                row = (
                    f"| {name} | {ranks} | {block} | {way} | {found.directions} | {fits} |"
                    f" {found.coefficients / 1e3:.1f} kB | {fsdp} | {found.ddp / GB:.1f} GB |"
                    f" {time if found.fits else '–'} |"
                )
                assert row in PAGE


def test_what_fits_alone_is_not_divided_and_folds_are_side_by_side() -> None:
    work = llama(10**8, 8, 150)
    assert arranged(work, 8, 80 * GB).way == "data"
    folds = arranged(replace(work, folds=4), 4, 80 * GB)
    assert (folds.way, folds.coefficients) == ("folds", 0)
    assert arranged(replace(work, folds=4), 3, 80 * GB).way == "data"  # a rank would wait half of the time
    assert arranged(work, 8, GB).together > 1
    assert not arranged(work, 8, GB // 20).fits


def test_a_block_is_what_has_one_number_in_its_name() -> None:
    names = {"embed.weight": 5, "layers.0.a": 3, "layers.0.b.1": 4, "layers.1.a": 3, "norm": 2}
    work = work_of(Size(4, 17, 68), width=4, block=9, groups=2, folds=1, batch=8, names=names, forward=None)
    assert (work.largest, work.block, work.tensors) == (7, 4, 5)
    assert arranged(work, 2, GB).seconds is None

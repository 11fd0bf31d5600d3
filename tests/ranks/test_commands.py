"""Every command that ranks share, and calls from a script, under torchrun and in the environment of Slurm's srun."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ranks.conftest import Torchrun

HERE = Path(__file__).parent
WHERE = "pool/model_0.safetensors"


def commands(out: str) -> list[list[str]]:
    """Of every kind one, and one that is refused."""
    wrong = ["missing.yaml"] if out != "srun" else ["recipe.yaml", "--set", "data.batch_size=2RANK"]
    made = ["--set", f"finetune.dir={out}-made"]
    return [
        ["evaluate", WHERE, "recipe.yaml", "--json"],
        ["evaluate", WHERE, "recipe.yaml", "--on", "fit"],
        ["finetune", "finetune.yaml", *made],
        ["cook", "recipe.yaml", "--out", out, "--set", "method.name=greedy"],
        ["compare", "recipe.yaml", "--out", f"{out}-compared"],
        ["evaluate", WHERE, *wrong],  # the last, as a command that fails is in life
    ]


def said(shared: Path, name: str, ranks: list[str]) -> list[dict[str, Any]]:
    found = [json.loads((shared / f"{name}-{rank}.json").read_text()) for rank in ranks]
    return [{key.split()[0] + str(i): one for i, (key, one) in enumerate(each.items())} for each in found]


@pytest.fixture(scope="module")
def alone(shared: Path, torchrun: Torchrun) -> dict[str, Any]:
    done = torchrun(1, what=[str(HERE / "commands.py")], SAID="one", COMMANDS=json.dumps(commands("one")))
    assert done.returncode == 0, done.stderr
    return said(shared, "one", ["alone"])[0]


def by_torchrun(shared: Path, torchrun: Torchrun) -> list[dict[str, Any]]:
    done = torchrun(2, what=[str(HERE / "commands.py")], SAID="torchrun", COMMANDS=json.dumps(commands("torchrun")))
    assert done.returncode == 0, done.stderr
    return said(shared, "torchrun", ["0", "1"])


def by_srun(shared: Path) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "SLURM"))}
    given = {**known, "OMP_NUM_THREADS": "1", "SAID": "srun", "COMMANDS": json.dumps(commands("srun")), **slurm}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "commands.py")],
            cwd=shared, env={**given, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        for one in started:
            _, errors = one.communicate(timeout=120)
            assert one.returncode == 0, errors
    finally:
        for one in started:
            one.kill()
    return said(shared, "srun", ["0", "1"])


def check_compared(run: Path, wanted: Path) -> None:
    """The same soups and scores, and the same files; of what is the same to the last bit the same bytes."""
    made = [{str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()} for folder in (run, wanted)]
    assert made[0] == made[1]
    for method in ("best", "uniform", "greedy", "hl-plus", "mehl-plus", "learned-plus", "crossfit"):
        one, other = (folder / "methods" / method for folder in (run, wanted))
        found, right = (load_file(folder / "weights.safetensors") for folder in (one, other))
        assert (found["W"] - right["W"]).abs().max() <= 1e-12, method
        assert all(found[name].equal(right[name]) for name in right if name != "W"), method  # scores of each sample
        if method in ("best", "uniform", "greedy"):
            assert (one / "soup.json").read_bytes() == (other / "soup.json").read_bytes(), method
    results = [json.loads((folder / "results.json").read_text()) for folder in (run, wanted)]
    assert results[0] == results[1]


def test_four_ranks_make_the_soups_of_one_process(shared: Path, alone: dict[str, Any], torchrun: Torchrun) -> None:
    assert alone["compare5"]["code"] == 0
    done = torchrun(4, "compare", "recipe.yaml", "--out", "four")
    assert done.returncode == 0, done.stderr
    check_compared(shared / "four", shared / "one-compared")
    assert "4 ranks on one host" in done.stderr
    assert done.stdout.count("Report: ") == 1  # only the first rank speaks


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_every_command_does_in_two_processes_what_it_does_in_one(
    launcher: str, shared: Path, torchrun: Torchrun, alone: dict[str, Any]
) -> None:
    first, second = by_torchrun(shared, torchrun) if launcher == "torchrun" else by_srun(shared)
    for name in ("cook", "compare"):
        for found in (first, second):
            for row, wanted in zip(found["script0"][name], alone["script0"][name], strict=True):
                assert row == pytest.approx(wanted, abs=1e-12)
    for name in ("evaluate1", "evaluate2", "finetune3", "cook4", "compare5"):
        assert (first[name]["code"], second[name]["code"]) == (0, 0), first[name]["err"] + second[name]["err"]
        assert second[name]["out"] == second[name]["err"] == "", name  # the first one speaks
        assert "2 ranks on one host (gloo): " in first[name]["err"], name
    score, wanted = (json.loads(found["evaluate1"]["out"])["score"] for found in (first, alone))
    assert score == {**wanted, "loss": pytest.approx(wanted["loss"], abs=1e-12)}
    assert first["evaluate2"]["out"] == alone["evaluate2"]["out"]
    assert (first["evaluate6"]["code"], second["evaluate6"]["code"]) == (1, 1)
    here = socket.gethostname()
    wanted = {"torchrun": "missing.yaml", "srun": f"data.batch_size: 20 on rank 0 ({here}), 21 on rank 1 ({here})"}
    assert (first["evaluate6"]["err"] + second["evaluate6"]["err"]).count(wanted[launcher]) == 1
    for trial in ("trial_000", "trial_001", "trial_002"):
        found, wanted = (load_file(shared / f"{out}-made" / f"{trial}.safetensors") for out in (launcher, "one"))
        assert all(found[tensor].equal(wanted[tensor]) for tensor in wanted), trial
    check_compared(shared / f"{launcher}-compared", shared / "one-compared")
    for file in ("weights.safetensors", "soup.json", "soup/model.safetensors"):  # greedy: the same W to the last bit
        one, other = (shared / out / "methods/greedy" / file for out in (launcher, "one"))
        assert one.read_bytes() == other.read_bytes(), file

"""A search that is really killed, processes and all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from stockpot.errors import RunError
from stockpot.zoo import Plan, Trial, finetune, training
from stockpot.zoo.folder import Folder, read_records
from zoo import mlp, samples

SCRIPT = """
import sys
import torch
from stockpot.zoo import Plan, Trial, finetune, training

def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    x = torch.randn(64, 4)
    trials = tuple(Trial(lr=1e-3, epochs=1000000, seed=n) for n in range(2))

    def listen(event):
        if event.kind == "epoch":
            print(event.data["trial"], flush=True)

    plan = Plan(trials, batch_size=64, probe=None)
    finetune(model, (x, (x[:, 0] > 0).long()), None, sys.argv[1], plan, parallel=2, save_every=0.0, listen=listen)

if __name__ == "__main__":
    main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_worker_outlives_a_killed_search(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pool")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as search:
        assert search.stdout is not None
        seen: set[str] = set()
        while len(seen) < 2:
            seen.add(search.stdout.readline().strip())
        assert seen == {"trial_000", "trial_001"}
        state = tmp_path / "pool" / "search" / "trial_001.safetensors"
        deadline = time.monotonic() + 20
        while not state.is_file() and time.monotonic() < deadline:
            time.sleep(0.05)
        children = _members(search.pid) - {search.pid}
        assert len(children) >= 2
        os.kill(search.pid, signal.SIGKILL)
        assert _all_gone(search.pid)
    assert state.is_file()


def _all_gone(session: int) -> bool:
    """Whether no process of a session is left, after a while on a busy machine."""
    deadline = time.monotonic() + 20
    while _members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not _members(session)


def _members(session: int) -> set[int]:
    """Living processes of a session."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.add(int(folder.name))
    return found


def test_a_worker_that_is_killed_is_missed_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "pool")]
    states = [tmp_path / "pool" / "search" / f"trial_00{number}.safetensors" for number in range(2)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as search:
        deadline = time.monotonic() + 60
        while not all(state.is_file() for state in states) and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = [pid for pid in _members(search.pid) - {search.pid} if _is_worker(pid)]
        assert len(workers) == 2
        os.kill(workers[0], signal.SIGKILL)
        _, err = search.communicate(timeout=60)
    assert search.returncode == 1
    assert "LearningError: parallel trials: expected workers that live until the last trial" in err
    assert "found one that died with exit code -9" in err
    assert "run again to continue, nothing is lost" in err
    assert _all_gone(search.pid)
    for state in states:  # the other one saved before it went
        assert course(state)["step"] > 0


def course(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return dict(json.loads(file.metadata()["values"])["course"])


def _is_worker(pid: int) -> bool:
    return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_second_search_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    plan = Plan((Trial(lr=0.1, epochs=1),), batch_size=48, probe=None)
    with (
        Folder(tmp_path / "pool").locked(),
        pytest.raises(RunError, match=f"found one in use by process {os.getpid()}"),
    ):
        finetune(mlp(), samples(48), None, tmp_path / "pool", plan)


ORPHAN = """
import sys, time
from pathlib import Path
from stockpot.zoo.folder import Folder
from stockpot.zoo.folder import read_records
Folder(Path(sys.argv[1])).join()
print("joined", flush=True)
time.sleep(60)
"""


def test_a_search_waits_for_workers_of_a_dead_one(tmp_path: Path) -> None:
    """They may be in the middle of a write; two writers of one temporary name would make nonsense."""
    folder = tmp_path / "pool"
    (folder / "search").mkdir(parents=True)
    stray = folder / "search" / ".trial_000.safetensors.writing"
    stray.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(folder)], stdout=subprocess.PIPE, text=True
    ) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline() == "joined\n"
        entered = threading.Event()

        def search() -> None:
            with Folder(folder).locked():
                entered.set()

        thread = threading.Thread(target=search)
        thread.start()
        assert not entered.wait(0.5)
        assert stray.exists()
        orphan.kill()
        thread.join(30)
        assert entered.is_set()
    assert not stray.exists()


def test_another_metric_loss_or_precision_is_refused(tmp_path: Path) -> None:
    plan = Plan((Trial(lr=0.1, epochs=1),), batch_size=48, probe=None)
    model, out = mlp(), tmp_path / "pool"
    finetune(model, samples(48), samples(48), out, plan)

    def halved(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1]) / 2

    with pytest.raises(RunError, match=r"judge\.loss: null there, \".*halved\" now"):
        finetune(model, samples(48), samples(48), out, plan, loss=halved)
    with pytest.raises(RunError, match=r"judge\.autocast: null there, \"torch.bfloat16\" now"):
        finetune(model, samples(48), samples(48), out, plan, autocast=torch.bfloat16)


def test_a_stop_in_the_middle_of_a_trial_is_saved_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the losses of an epoch have been looked at only in part."""
    plan = Plan((Trial(lr=0.1, epochs=3),), batch_size=4, probe=None)
    torch.manual_seed(0)
    model = mlp()
    finetune(model, samples(48), None, tmp_path / "whole", plan)
    steps, interruptions, step = 0, 0, training._step
    spent: list[float] = []

    def stepping(*args: Any) -> torch.Tensor:
        nonlocal steps
        steps += 1
        if steps in (5, 17, 30):
            os.kill(os.getpid(), signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(training, "_step", stepping)
    while True:
        try:
            finetune(model, samples(48), None, tmp_path / "parts", plan)
            break
        except KeyboardInterrupt:
            interruptions += 1
            saved = course(tmp_path / "parts" / "search" / "trial_000.safetensors")
            assert saved["step"] == steps
            spent.append(saved["seconds"])
    assert (steps, interruptions) == (36, 3)  # no step was taken twice
    spent.append(read_records(tmp_path / "parts")[0].seconds)
    assert spent == sorted(spent)  # earlier processes count
    assert spent[0] > 0
    for name in ("trial_000.safetensors", "trial_000.json"):
        whole, parts = ((tmp_path / which / name).read_bytes() for which in ("whole", "parts"))
        if name.endswith(".json"):
            whole, parts = (json.dumps({**json.loads(x), "seconds": 0}).encode() for x in (whole, parts))
        assert parts == whole

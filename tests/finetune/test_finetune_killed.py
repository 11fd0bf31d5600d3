"""A search that is really killed, processes and all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from stockpot.finetune import Plan, Trial, finetune

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
        deadline = time.monotonic() + 20
        while _members(search.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _members(search.pid) == set()
    assert state.is_file()


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

"""Several processes over one folder, some of them really killed: every trial is made once, to the same bits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from safetensors import safe_open

from stockpot import files
from stockpot.errors import RunError
from stockpot.events import Event
from stockpot.zoo import claims, training
from stockpot.zoo.claims import Claims
from stockpot.zoo.folder import Folder, read_record, read_records
from stockpot.zoo.plan import Plan, Trial
from stockpot.zoo.search import finetune
from zoo import mlp, samples

TRIALS = 4
SCRIPT = """
import sys
import torch
from stockpot.zoo.plan import Plan, Probe, Trial
from stockpot.zoo.search import finetune

if sys.argv[4:]:  # another host, over a file system that shows locks to nobody else
    from stockpot import files
    from stockpot.zoo import claims

    files._lock = lambda handle: True
    claims.here, claims.BEAT, claims.SILENT = lambda: sys.argv[4], 0.05, float(sys.argv[5])

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
x = torch.randn(64, 4)
out, trials, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

def listen(event):
    if event.kind in ("trial", "epoch", "waiting"):
        print(event.kind, event.data.get("trial"), flush=True)

plan = Plan(tuple(Trial(lr=1e-3, epochs=epochs, seed=n) for n in range(trials)), batch_size=16, probe=Probe(2))
finetune(model, (x, (x[:, 0] > 0).long()), None, out, plan, save_every=0.0, listen=listen)
"""


def process(out: Path, trials: int = TRIALS, epochs: int = 40, *host: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(out), str(trials), str(epochs), *host]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def pipe(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def until(process: subprocess.Popen[str], line: str) -> None:
    for said in pipe(process):
        if said.strip() == line:
            return
    pytest.fail(f"ended without {line!r}")


def checkpoints(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.safetensors")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The checkpoints that one process makes."""
    out = tmp_path_factory.mktemp("alone") / "pool"
    with process(out) as only:
        only.communicate(timeout=120)
    assert only.returncode == 0
    found = checkpoints(out)
    assert len(found) == TRIALS
    return found


def test_processes_share_the_trials_and_make_the_same_pool(tmp_path: Path, alone: dict[str, bytes]) -> None:
    out = tmp_path / "pool"
    both = [process(out), process(out)]
    said = [one.communicate(timeout=120)[0].splitlines() for one in both]
    assert [one.returncode for one in both] == [0, 0]
    began = [line for lines in said for line in lines if line.startswith("trial ")]
    assert sorted(began) == [f"trial trial_{n:03d}" for n in range(TRIALS)]  # each once, by one of them
    assert checkpoints(out) == alone


@pytest.mark.skipif(sys.platform == "win32", reason="no locks that die with their process")
def test_what_a_killed_process_leaves_is_taken_over_by_one_that_waits(tmp_path: Path, alone: dict[str, bytes]) -> None:
    out = tmp_path / "pool"
    with process(out) as first:
        until(first, "epoch trial_000")
        os.kill(first.pid, signal.SIGSTOP)  # it holds the trial, and gets no further
        with process(out) as second:
            until(second, "waiting None")
            assert len(read_records(out)) == TRIALS - 1
            os.kill(first.pid, signal.SIGKILL)
            rest = second.communicate(timeout=120)[0]
        assert second.returncode == 0
        assert "trial trial_000" in rest.splitlines()
    assert first.wait() == -signal.SIGKILL
    assert checkpoints(out) == alone


def test_hosts_that_do_not_see_each_others_locks_share_the_trials(tmp_path: Path, alone: dict[str, bytes]) -> None:
    out = tmp_path / "pool"
    both = [process(out, TRIALS, 40, host, "60") for host in ("one -", "two -")]
    said = [one.communicate(timeout=120)[0].splitlines() for one in both]
    assert [one.returncode for one in both] == [0, 0]
    began = [line for lines in said for line in lines if line.startswith("trial ")]
    assert sorted(began) == [f"trial trial_{n:03d}" for n in range(TRIALS)]
    assert sum("epoch probe" in lines for lines in said) == 1
    assert checkpoints(out) == alone
    assert not list(out.rglob(".*.claim"))


def test_what_a_host_leaves_that_is_heard_no_more_is_taken_over(tmp_path: Path, alone: dict[str, bytes]) -> None:
    out = tmp_path / "pool"
    with process(out, TRIALS, 40, "one -", "60") as first:
        until(first, "epoch trial_000")
        first.kill()
    host, boot, number, _ = (out / "search" / ".trial_000.claim").read_text().split()
    assert (host, boot, int(number)) == ("one", "-", first.pid)
    with process(out, TRIALS, 40, "two -", "1") as second:
        said = second.communicate(timeout=120)[0].splitlines()
    assert second.returncode == 0
    assert [line for line in said if not line.startswith("epoch")] == [
        *(f"trial trial_{n:03d}" for n in range(1, TRIALS)), "waiting None", "trial trial_000"
    ]  # fmt: skip
    assert checkpoints(out) == alone
    assert not list(out.rglob(".*.claim"))


def test_a_host_that_is_heard_is_left_alone_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_lock", lambda handle: True)
    monkeypatch.setattr(claims, "BEAT", 0.01)
    monkeypatch.setattr(claims, "SILENT", 0.5)
    others, file = Claims(tmp_path), tmp_path / ".a.claim"
    with Claims(tmp_path).held(tmp_path, "a") as ours:
        assert ours
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            with others.held(tmp_path, "a") as theirs:
                assert not theirs
            time.sleep(0.1)
        file.unlink()  # a host that has not heard of us takes it over
        file.write_text("two - 7 7\n")
    assert file.read_text() == "two - 7 7\n"


@pytest.mark.parametrize(("made", "said"), [("fifo", "not a regular file"), ("long", "more than such a file has")])
def test_a_claim_that_is_none_is_refused(tmp_path: Path, made: str, said: str) -> None:
    if made == "fifo":
        os.mkfifo(tmp_path / ".a.claim")
    else:
        (tmp_path / ".a.claim").write_text("x" * 5000)
    wanted = pytest.raises(RunError, match=f"who works on a trial, in a line, found .*{said}")
    with wanted, Claims(tmp_path).held(tmp_path, "a"):
        pass


@pytest.mark.parametrize("line", ["epoch probe", "epoch trial_000", "trial trial_002"])
def test_a_killed_search_goes_on_to_the_same_bits(tmp_path: Path, alone: dict[str, bytes], line: str) -> None:
    out = tmp_path / "pool"
    with process(out) as killed:
        until(killed, line)
        killed.kill()
    (out / f".trial_001.json.{16 * 'a'}.writing").write_text("half")  # what a kill in the middle of a write leaves
    with process(out) as again:
        again.communicate(timeout=120)
    assert again.returncode == 0
    assert checkpoints(out) == alone
    assert not list(out.glob(".*.writing"))


def test_half_written_files_of_others_at_work_are_left_alone(tmp_path: Path) -> None:
    plan = Plan((Trial(lr=0.1, epochs=1), Trial(lr=0.2, epochs=1)), batch_size=48, probe=None)
    out = tmp_path / "pool"
    finetune(mlp(), samples(48), None, out, plan)
    stray = out / f".trial_001.json.{16 * 'a'}.writing"
    stray.write_text("another process is writing this")
    folder = Folder(out, 2)
    with folder.claimed("trial_001") as ours, folder.prepared_alone(lambda event: None):
        assert ours
        assert stray.exists()
    with folder.prepared_alone(lambda event: None):
        assert not stray.exists()


def test_while_another_process_prepares_the_search_this_one_waits(tmp_path: Path) -> None:
    plan = Plan((Trial(lr=0.1, epochs=1),), batch_size=48, probe=None)
    out = tmp_path / "pool"
    out.mkdir()
    lock = files.Lock(out)
    lock.acquire()
    events: list[str] = []

    def listen(event: Event) -> None:
        events.append(event.kind)
        if event.kind == "waiting":
            assert not (out / "search").exists()
            lock.release()

    finetune(mlp(), samples(48), None, out, plan, listen=listen)
    assert events.index("waiting") < events.index("finetune")


def test_a_trial_that_another_process_has_just_finished_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the records and the claim."""
    from stockpot.zoo import search

    plan = Plan((Trial(lr=0.1, epochs=1),), batch_size=48, probe=None)
    torch.manual_seed(0)
    model, out = mlp(), tmp_path / "pool"
    finetune(model, samples(48), None, out, plan)
    looked, read = 0, read_record

    def late(folder: Path, name: str) -> Any:
        nonlocal looked
        looked += 1
        return None if looked <= 2 else read(folder, name)  # for the space that is needed, and at the start

    monkeypatch.setattr(search, "read_record", late)
    kinds: list[str] = []
    records = finetune(model, samples(48), None, out, plan, listen=lambda event: kinds.append(event.kind))
    assert len(records) == 1
    assert "trial" not in kinds


def course(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        return dict(json.loads(file.metadata()["values"])["course"])


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


def test_a_stop_in_the_middle_of_a_trial_is_saved_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_interruption_while_a_claim_begins_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt), Claims(tmp_path).held(tmp_path, "trial_000"):
            pass
    assert not list(tmp_path.glob("*.claim"))
    with Claims(tmp_path).held(tmp_path, "trial_000") as ours:
        assert ours

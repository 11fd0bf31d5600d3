"""Several runs at once: what is skipped, what waits, what fails; with a stand-in for stockpot, so that it is quick."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import study
from studies import plans
from studies.running import command, finished
from studies.zoo import Zoo
from study_zoo import make

# Writes the record of a finished run; fails where the run's name says so. Tells the order in which runs began.
STAND_IN = """
import json, sys, time
from pathlib import Path

def begin(told, name):
    with open({began!r}, "a") as file:
        file.write(told + "\\n")
    time.sleep({pause})
    if name in {failing!r}:
        print("error: the stand-in fails")
        sys.exit(1)

if sys.argv[1].endswith("pretrain.py"):
    zoo = Path(sys.argv[1]).parent
    begin(zoo.name + "/pretraining", "pretraining")
    (zoo / "start.safetensors").touch()
    sys.exit()
if "finetune" in sys.argv:
    zoo = Path(sys.argv[sys.argv.index("finetune") + 1]).parent
    print("a process begins", flush=True)
    claim = zoo / "claim"  # of several processes the first does the work, and the others wait for its end
    try:
        claim.mkdir()
    except FileExistsError:
        if {dying!r}:
            sys.exit("error: killed")
        while not list(claim.iterdir()):
            time.sleep(0.02)
        sys.exit(not (claim / "made").exists())
    end = "lost"
    try:
        begin(zoo.name + "/pool", "pool")
        (zoo / "hidden").rename(zoo / "pool")
        end = "made"
    finally:
        (claim / end).mkdir()
    sys.exit()
words = sys.argv[sys.argv.index("compare"):]
out = Path(words[words.index("--out") + 1])
sys.path.insert(0, {source!r})
from stockpot.recipe import load_recipe

begin(out.name, out.name)
pairs = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
recipe = load_recipe(words[1], pairs)
out.mkdir(parents=True, exist_ok=True)
names = [path.rsplit("/", 1)[-1] for path in recipe.pool.path or ()]
names = names if len(names) > 1 else [f"model_{{k}}.safetensors" for k in range(5)]
scores = [{{"path": f"pool/{{name}}", "fit": {{"value": k / 10}}}} for k, name in enumerate(names)]
(out / "pool.json").write_text(json.dumps({{"ingredients": [{{**one, "fit": None}} for one in scores]}}))
time.sleep({pause})
(out / "pool.json").write_text(json.dumps({{"ingredients": scores}}))
if out.name == {patient!r}:
    for _ in range(100):
        if len(open({began!r}).readlines()) > 1:
            break
        time.sleep(0.1)
    with open({began!r}, "a") as file:
        file.write(out.name + " ends\\n")
(out / "results.json").write_text(json.dumps({{"failed": {failed!r}}}))
(out / "run.json").write_text(json.dumps({{"status": "done", "recipe_digest": recipe.digest()}}))
"""


class Bench:
    """A zoo with the stand-in in place of Python."""

    def __init__(self, folder: Path) -> None:
        self.home = make(folder / "experiments")
        self.began = folder / "began.txt"
        self.script = folder / "stand_in.py"

    def run(
        self,
        *only: str,
        failing: tuple[str, ...] = (),
        failed: dict[str, str] | None = None,
        pause: float = 0,
        zoos: tuple[str, ...] = ("tiny",),
        pools: bool = False,
        patient: str = "",  # ends only after another has begun
        dying: bool = False,  # all but one of the processes that fine-tune together
    ) -> int:
        source = str(Path(study.__file__).parents[1] / "src")
        text = STAND_IN.format(
            source=source,
            began=str(self.began),
            failing=failing,
            failed=failed or {},
            pause=pause,
            patient=patient,
            dying=dying,
        )
        self.script.write_text(text)
        self.began.write_text("")
        for claim in self.home.glob("*/claim"):
            shutil.rmtree(claim)
        python = shlex.join([sys.executable, str(self.script)])
        return study.main(
            [
                *zoos,
                *(["--pools"] if pools else []),
                "--home",
                str(self.home),
                "--python",
                python,
                "--jobs",
                "2",
                "--only",
                *only,
            ]
        )

    @property
    def order(self) -> list[str]:
        return self.began.read_text().splitlines()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_runs_that_need_the_ranking_wait_for_it(bench: Bench) -> None:
    assert bench.run("removed", "main-0", pause=0.3) == 0
    assert bench.order[0] == "main-0"
    assert set(bench.order[1:]) == {"removed-1", "removed-2", "removed-3"}
    record = (bench.home / "runs" / "tiny" / "removed-2.log").read_text()
    assert "model_0.safetensors" in record
    assert "model_4.safetensors" not in record  # the best


def test_nobody_waits_for_more_than_the_scores(bench: Bench) -> None:
    """main-0 goes on for as long as nobody has begun who needs its scores."""
    assert bench.run("main-0", "removed-1", pause=0.2, patient="main-0") == 0
    assert bench.order == ["main-0", "removed-1", "main-0 ends"]


def test_all_zoos_have_their_first_study_before_one_has_its_second(bench: Bench) -> None:
    make(bench.home, "other")
    assert bench.run("main-1", "main-0", "other/cost-4", zoos=("tiny", "other")) == 0
    runs = bench.home / "runs"
    assert {path.name for path in runs.glob("*/*") if path.is_dir()} == {"main-0", "main-1", "cost-4"}
    assert not (runs / "tiny" / "cost-4").exists()
    assert sorted(bench.order[:2]) == ["main-1", "main-1"]
    assert sorted(bench.order[2:4]) == ["main-0", "main-0"]
    assert bench.order[4] == "cost-4"


def hide_pool(zoo: Path) -> None:
    """As before `stockpot finetune`; the stand-in brings it back."""
    (zoo / "pool").rename(zoo / "hidden")
    recipe = zoo / "recipe.yaml"
    text = recipe.read_text().replace("report: test}", "report: test, train: train}")
    recipe.write_text(text + "finetune: {dir: pool, trials: 5}\n")


def test_a_zoos_runs_wait_for_its_pool_and_know_what_is_in_it(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    hide_pool(bench.home / "tiny")
    assert bench.run("cost-2", "main-0", pools=True, pause=0.3) == 0
    assert bench.order[0] == "tiny/pool"
    assert sorted(bench.order[1:]) == ["cost-2", "main-0"]
    assert "model_1.safetensors" in (bench.home / "runs" / "tiny" / "cost-2.log").read_text()
    assert "pool: " in capsys.readouterr().out


@pytest.mark.parametrize("dying", [False, True])
def test_processes_share_a_pools_trials_and_one_that_sees_their_end_is_enough(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, dying: bool
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    hide_pool(bench.home / "tiny")
    assert bench.run("main-0", pools=True, pause=0.3, dying=dying) == 0
    assert bench.order == ["tiny/pool", "main-0"]
    assert (bench.home / "runs" / "tiny" / "pool.log").read_text().count("a process begins") == 3


def test_what_the_pool_turns_out_not_to_need_is_left_out(bench: Bench) -> None:
    """Before it is there, nobody knows whether its models have BatchNorm."""
    hide_pool(bench.home / "tiny")
    assert bench.run("statistics", "main-0", pools=True) == 0
    assert bench.order == ["tiny/pool", "main-0"]


def test_without_its_pool_no_run_of_a_zoo_begins_and_other_zoos_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    make(bench.home, "other")
    for name in ("tiny", "other"):
        hide_pool(bench.home / name)
    half = bench.home / "tiny" / "pool"
    half.mkdir()
    for name in ("model_0.safetensors", "model_1.safetensors"):
        (bench.home / "tiny" / "hidden" / name).rename(half / name)
    # The first pool cannot be completed: the stand-in finds its folder taken.
    assert bench.run("main-0", "removed-1", zoos=("tiny", "other"), pools=True) == 1
    told = capsys.readouterr()
    assert "tiny main-0: not begun, because its pool is not complete" in told.out
    assert "not finished: tiny pool, tiny main-0, tiny removed-1" in told.err
    assert bench.order.count("main-0") == bench.order.count("removed-1") == 1  # the other zoo's
    assert not (bench.home / "runs" / "tiny" / "main-0").exists()


def with_pretraining(zoo: Path) -> None:
    (zoo / "pretrain.py").touch()
    recipe = zoo / "recipe.yaml"
    text = recipe.read_text().replace('"model:build"}', '"model:build", weights: start.safetensors}')
    recipe.write_text(text)


def test_a_pool_waits_for_what_it_starts_from_and_that_is_made_once(bench: Bench) -> None:
    make(bench.home, "other")
    for name in ("other", "tiny"):
        hide_pool(bench.home / name)
    with_pretraining(bench.home / "tiny")
    assert bench.run("main-0", zoos=("other", "tiny"), pools=True, pause=0.3) == 0
    assert sorted(bench.order[:2]) == ["other/pool", "tiny/pretraining"]
    assert bench.order.index("tiny/pool") > bench.order.index("tiny/pretraining")
    assert bench.order.count("main-0") == 2
    (bench.home / "tiny" / "pool").rename(bench.home / "tiny" / "hidden")
    assert bench.run("cost-2", pools=True) == 0
    assert bench.order == ["tiny/pool", "cost-2"]


def test_without_what_it_starts_from_a_zoo_is_left_and_others_go_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    make(bench.home, "other")
    for name in ("other", "tiny"):
        hide_pool(bench.home / name)
    with_pretraining(bench.home / "tiny")
    assert bench.run("main-0", failing=("pretraining",), zoos=("tiny", "other"), pools=True) == 1
    told = capsys.readouterr()
    assert "tiny pretraining: failed after 0 s: error: the stand-in fails" in told.out
    assert "tiny main-0: not begun, because its pre-training failed" in told.out
    assert "not finished: tiny pretraining, tiny pool, tiny main-0" in told.err
    assert sorted(bench.order) == ["main-0", "other/pool", "tiny/pretraining"]


def test_a_run_of_fewer_models_than_there_are_now_is_not_finished(bench: Bench) -> None:
    pool = bench.home / "tiny" / "pool"
    (pool / "model_4.safetensors").rename(pool.parent / "later.safetensors")
    zoo = Zoo.open(bench.home, "tiny")
    assert zoo.models == 4
    bench.run("main-0")  # whose stand-in writes of five
    assert not finished(zoo, plans.main(zoo)[0])
    (pool.parent / "later.safetensors").rename(pool / "model_4.safetensors")
    zoo = Zoo.open(bench.home, "tiny")
    assert finished(zoo, plans.main(zoo)[0])


def test_a_ranking_of_other_models_is_refused(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("main-0") == 0
    pool = bench.home / "tiny" / "pool"
    (pool / "model_0.safetensors").rename(pool / "other.safetensors")
    assert bench.run("removed-1") == 1
    assert "model_0.safetensors, which is not" in capsys.readouterr().out


def test_finished_runs_are_skipped_and_changed_ones_are_not(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("main-0", "main-1") == 0
    assert bench.run("main") == 0
    assert bench.order == ["main-2"]
    assert "2 of 3 runs finished earlier" in capsys.readouterr().out
    recipe = bench.home / "tiny" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("steps: 8", "steps: 9"))
    zoo = Zoo.open(bench.home, "tiny")
    assert not any(finished(zoo, run) for run in plans.main(zoo))


def test_a_failing_run_does_not_stop_the_others(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("main", failing=("main-0",)) == 1
    assert sorted(bench.order) == ["main-0", "main-1", "main-2"]
    told = capsys.readouterr()
    assert "main-0: failed after" in told.out
    assert "error: the stand-in fails" in told.out
    assert "not finished: main-0" in told.err
    assert bench.run("main") == 0  # continues
    assert bench.order == ["main-0"]


def test_what_needs_a_failed_run_says_so(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("main-0", "removed-1", failing=("main-0",)) == 1
    assert "removed-1: failed before it began" in capsys.readouterr().out


def test_a_run_in_which_a_method_failed_is_no_finished_run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("main-0", failed={"learned+": "out of memory\n  fix: more"}) == 1
    assert "learned+: out of memory" in capsys.readouterr().out
    assert bench.run("main-0") == 0
    assert bench.order == ["main-0"]


def test_commands_name_no_path_of_the_machine(bench: Bench) -> None:
    zoo = Zoo.open(bench.home, "tiny")
    for run in plans.plan(zoo, ["main", "cost", "rates"]):
        words = command(zoo, run, ["python"])
        assert words[:5] == ["python", "-m", "stockpot", "compare", "experiments/tiny/recipe.yaml"]
        assert words[-1] == f"experiments/runs/tiny/{run.name}"
        assert not any(str(bench.home.parent) in word for word in words)


def test_it_stops_in_time_and_leaves_no_process(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run("main-0", failing=("main-0",))  # writes the script
    script = bench.script
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    python = shlex.join([sys.executable, str(script)])
    options = ["tiny", "--home", str(bench.home), "--python", python, "--only", "main-1", "--seconds", "2"]
    assert study.main(options) == 1
    assert "stopped after 2 s" in capsys.readouterr().out
    log = (bench.home / "runs" / "tiny" / "main-1.log").read_text().splitlines()
    number = next((int(line) for line in log if line.isdigit()), None)
    if number is not None:  # a busy machine may not have come so far
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)

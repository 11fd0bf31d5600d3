"""The scripts of docs/scaling.md can be read by those who are to run them, and their names fit each other."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stockpot.cli.app import app

PAGE = (Path(__file__).parents[2] / "docs" / "scaling.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
OBJECTS: list[Any] = [
    each
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    for each in yaml.safe_load_all(text)
]
JOBS = {each["metadata"]["name"]: each["spec"] for each in OBJECTS if each["kind"] == "Job"}
COMMANDS = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}


def container(job: str) -> Any:
    (found,) = JOBS[job]["template"]["spec"]["containers"]
    return found


def in_containers() -> list[str]:
    return [" ".join(container(name).get("args", container(name)["command"])) for name in JOBS]


def test_bash_can_read_every_script() -> None:
    assert len(SCRIPTS) == 4
    for text in [*SCRIPTS, *in_containers()]:
        done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), text


def test_every_script_calls_commands_that_there_are() -> None:
    called = re.findall(r"stockpot (\w+) recipe\.yaml", "\n".join([*SCRIPTS, *in_containers()]))
    assert sorted(called) == ["compare", "compare", "compare", "finetune", "finetune"]
    assert set(called) <= COMMANDS


def test_variables_of_a_script_are_slurms_or_its_own() -> None:
    for text in SCRIPTS:
        own = set(re.findall(r"(\w+)=\S", text))
        used = set(re.findall(r"\$\{?(\w+)", text)) | set(re.findall(r"\(\((.*?)\)\)", text))
        others = {name for name in used - own if not name[0].isdigit() and not name.startswith("20000")}
        assert all(name.startswith("SLURM_") for name in others), others


def test_the_jobs_of_kubernetes_fit_together() -> None:
    (service,) = (each for each in OBJECTS if each["kind"] == "Service")
    assert set(JOBS) == {"finetune", "soup"}
    soup, (line,) = JOBS["soup"], container("soup")["args"]
    assert service["metadata"]["name"] == soup["template"]["spec"]["subdomain"] == "soup"
    assert service["spec"]["selector"] == {"job-name": "soup"}
    assert "--master-addr soup-0.soup " in line
    assert soup["completionMode"] == "Indexed"
    assert f"--nnodes {soup['completions']} " in line
    assert soup["completions"] == soup["parallelism"]
    assert f"--nproc-per-node {container('soup')['resources']['limits']['nvidia.com/gpu']} " in line
    assert "\n" not in line  # one command, folded


@pytest.mark.parametrize("job", ["finetune", "soup"])
def test_every_volume_that_is_mounted_is_there(job: str) -> None:
    volumes = {each["name"] for each in JOBS[job]["template"]["spec"]["volumes"]}
    assert {each["name"] for each in container(job)["volumeMounts"]} == volumes

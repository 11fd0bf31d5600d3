"""Build wheel and sdist, install them into empty environments, and try them as a user would: `make release-check`.

    python release/check.py [--python 3.12 ...]

For every Python that is there: the library alone averages and cooks with its core dependencies, then the command line
comes with its extra and does the same. The sdist is tried on one of them, and there mypy checks the examples against
the installed types.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
VERSION = re.search(r'"(.+)"', (ROOT / "src/stockpot/_version.py").read_text())

LIBRARY = """
import sys
from pathlib import Path
import torch, stockpot
from stockpot import Pool, Task, cook
torch.manual_seed(0)
x = torch.randn(300, 8)
y = (x @ torch.randn(8, 3)).argmax(dim=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
base = {name: value.clone() for name, value in model.state_dict().items()}
Path("pool").mkdir()
for k in range(4):
    model.load_state_dict(base)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(20 + 5 * k):
        loss = torch.nn.functional.cross_entropy(model(x[:100]), y[:100])
        optimizer.zero_grad(); loss.backward(); optimizer.step()
    torch.save(model.state_dict(), f"pool/model_{k}.pt")
stockpot.average(["pool"], "plain")
result = cook(Pool.open("pool"), Task(model, (x[100:200], y[100:200]), (x[200:], y[200:])), steps=20)
result.soup.save("learned")
assert stockpot.__version__ == sys.argv[1], stockpot.__version__
heavy = {"transformers", "matplotlib", "typer", "pydantic", "stockpot.engine.kernels"} & sys.modules.keys()
assert not heavy, heavy
torch.save((x[100:200], y[100:200]), "fit.pt")
"""
MODEL = """
import torch
def model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
def data(split):
    return None if split == "train" else torch.load("fit.pt")
"""
RECIPE = """
pool: {path: pool}
model: {python: "mine:model"}
data: {python: "mine:data"}
method: {steps: 20}
output: {dir: run}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--python", nargs="*", default=PYTHONS, help="versions to try; those that are not there are told"
    )
    wanted = parser.parse_args().python
    assert VERSION is not None
    with tempfile.TemporaryDirectory(prefix="stockpot-release-") as place:
        wheel, sdist = build(Path(place))
        # The newest of all else, as users get it; torch's newest alone may be gigabytes for GPUs.
        torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        (Path(place) / "torch.txt").write_text(torch[0] if torch else "")
        found = {version: path for version in wanted if (path := interpreter(version)) is not None}
        for number, (version, path) in enumerate(found.items()):
            began = time.monotonic()
            tried(Path(place) / version, path, wheel, VERSION[1])
            said = "wheel"
            if number == len(found) - 1:
                tried(Path(place) / "sdist", path, sdist, VERSION[1])
                typed(Path(place) / "types", Path(place) / "sdist" / "env")
                said = "wheel, sdist, types"
            print(f"Python {version}: {said} in order ({time.monotonic() - began:.0f} s)", flush=True)
        missing = [version for version in wanted if version not in found]
        if missing or not found:
            print(f"not there, not tried: {', '.join(missing) or 'every Python'}")
        sys.exit(not found)


def build(place: Path) -> tuple[Path, Path]:
    """Wheel and sdist in dist/, the wheel made from the sdist, as `python -m build` does."""
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    call([sys.executable, "-m", "build", "--outdir", str(ROOT / "dist"), str(ROOT)], place)
    (wheel,), (sdist,) = (ROOT / "dist").glob("*.whl"), (ROOT / "dist").glob("*.tar.gz")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB; {sdist.name}: {sdist.stat().st_size / 1e6:.2f} MB")
    return wheel, sdist


def interpreter(version: str) -> str | None:
    """That Python, if it is there and runs; a name on the path may be a signpost to nothing."""
    path = shutil.which(f"python{version}")
    shims = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for one in [*([path] if path else []), *map(str, sorted(shims.glob(f"{version}.*/bin/python")))]:
        asked = subprocess.run(
            [one, "-c", "import sys; print(sys.version)"], capture_output=True, text=True, check=False
        )
        if asked.returncode == 0 and asked.stdout.startswith(f"{version}."):
            return one
    return None


def tried(folder: Path, python: str, package: Path, version: str) -> None:
    """The package in an environment of its own: the library alone, then the commands."""
    folder.mkdir()
    call([python, "-m", "venv", "env"], folder)
    own = str(folder / "env/bin/python")
    pip = [own, "-m", "pip", "install", "--quiet", "-c", str(folder.parent / "torch.txt")]
    call([*pip, str(package)], folder)
    call([own, "-c", LIBRARY, version], folder)
    call([*pip, f"{package}[cli]"], folder)
    (folder / "mine.py").write_text(MODEL)
    (folder / "recipe.yaml").write_text(RECIPE)
    command = str(folder / "env/bin/stockpot")
    assert version in call([command, "--version"], folder)
    call([command, "average", "pool", "--out", "averaged"], folder)
    cooked = json.loads(call([command, "cook", "recipe.yaml", "--json"], folder))
    assert cooked["soup"], cooked
    assert (folder / "run/report.html").is_file()
    call([command, "rebuild", "run"], folder)


def typed(folder: Path, env: Path) -> None:
    """What a user's own type checker says to the examples: nothing."""
    folder.mkdir()
    shutil.copytree(ROOT / "examples/tasks", folder / "tasks")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (folder / "readme.py").write_text("\n".join(blocks))
    python = str(env / "bin/python")
    call([python, "-m", "pip", "install", "--quiet", "mypy"], folder)
    call([python, "-m", "mypy", "--strict", "readme.py"], folder)
    for file in sorted((folder / "tasks").glob("*.py")):
        # regression.py reads data of scikit-learn, which is not installed here.
        call([python, "-m", "mypy", "--check-untyped-defs", "--ignore-missing-imports", file.name], file.parent)


def call(command: list[str], folder: Path) -> str:
    """Its output; where it fails, all that it said, and no traceback of ours."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}  # what is installed is tried, not what lies beside it
    own = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        shown = " ".join(part if len(part) < 200 else "..." for part in command)
        sys.exit(f"failed: {shown}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()

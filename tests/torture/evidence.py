"""What is on the disk: whole at any moment, and in the end the same as without interruptions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import safe_open

from stockpot.soup.card import CARD, RESULTS

_UNSTEADY = ("seconds", "peak_host", "peak_device")  # of clocks and memory
# Not compared: what happened, when and where, and pages drawn from that.
_TIMED = ("events.jsonl", "run.json", "recipe.yaml", "report.html", "report.md")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All whole lines of events.jsonl; the last one may be torn while a run is going on or after it was killed."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def damaged(folder: Path) -> list[str]:
    """Files that a reader would choke on. Names that say they are being written do not count."""
    found = []
    for file in sorted(folder.rglob("*")):
        inside = file.relative_to(folder).parts
        if not file.is_file() or any(_temporary(part) for part in inside):
            continue
        try:
            if file.suffix == ".json":
                json.loads(file.read_text())
            elif file.suffix == ".safetensors":
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  (no mapping)
                        opened.get_tensor(name)
            elif file.name == "events.jsonl":
                read_events(file)
            elif file.name == "report.html" and not file.read_text().rstrip().endswith("</html>"):
                raise ValueError("no end")
        except Exception as error:
            found.append(f"{'/'.join(inside)}: {type(error).__name__}: {error}")
    return found


def facts(folder: Path) -> dict[str, Any]:
    """Everything a finished command decided, by file; times and memory left out."""
    found: dict[str, Any] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.name.startswith(".") and file.name.endswith(".lock"):
            continue
        if file.is_dir():
            found[name] = "directory"
        elif file.name in _TIMED:
            found[name] = "there"
        elif file.name == CARD:  # its table of scores is the report's, with seconds in it
            found[name] = file.read_text().split(f"\n{RESULTS}\n")[0]
        elif file.name == "ingredients.safetensors":
            found[name] = _scores(file)
        elif file.suffix == ".json":
            found[name] = _steady(json.loads(file.read_text()))
        else:
            found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    run = folder / "run.json"
    if run.exists():
        value = json.loads(run.read_text())
        found["run.json"] = {k: value.get(k) for k in ("status", "fit_digest", "report_digests", "recipe_digest")}
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    lines = [f"{name}: missing" for name in expected if name not in found]
    lines += [f"{name}: left over" for name in found if name not in expected]
    return lines + [f"{name}: differs" for name in expected if name in found and expected[name] != found[name]]


def _temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith((".writing", ".replaced"))


def _scores(file: Path) -> Any:
    with safe_open(file, framework="pt") as opened:
        kept = json.loads(bytes(opened.get_tensor("values.json")))
        return [opened.get_tensor("tables").tolist(), kept["losses"]]


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in _UNSTEADY}
    return [_steady(item) for item in value] if isinstance(value, list) else value

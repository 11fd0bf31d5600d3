"""Claim: a browser shows the page without complaints and without asking the network for anything."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium needs no sandbox to open our own file. Its own services would ask for updates: no name resolves for them.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0"),
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH")


def visit(page: Path, folder: Path) -> tuple[str, str, list[str]]:
    """The page's elements, what the console said, and the addresses that were requested."""
    assert BROWSER is not None
    log = folder / "net.json"
    command = [
        BROWSER,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        f"--log-net-log={log}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = "\n".join(line for line in done.stderr.splitlines() if ":CONSOLE" in line)
    return done.stdout, console, _requests(log.read_text("utf-8", errors="replace"))


def _requests(log: str) -> list[str]:
    """What the page asked for. Requests of the browser itself have an initiator that is not an origin."""
    try:
        events = json.loads(log)["events"]
    except ValueError:  # cut off when the browser closed
        events = json.loads(log.strip().removesuffix(",") + "]}")["events"]
    found = [event.get("params", {}) for event in events]
    return [
        params["url"]
        for params in found
        if params.get("initiator", "not an origin") != "not an origin"
        and not params["url"].startswith(("file:", "data:"))
    ]


def test_no_console_message_and_no_request(complete: Path, tmp_path: Path) -> None:
    dom, console, addresses = visit(complete / "report.html", tmp_path)
    verdict = json.loads((complete / "results.json").read_text())["verdict"]
    assert all(line in dom for line in verdict.split("\n"))
    assert dom.count("<svg") == 6
    assert console == ""
    assert addresses == []


def test_the_browser_test_notices_both(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('oh no')</script><img src='http://localhost:9/x.png'>")
    _, console, addresses = visit(page, tmp_path)
    assert "oh no" in console
    assert "http://localhost:9/x.png" in addresses

"""Claim: a browser shows the page without complaints and without asking the network for anything."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from stockpot.cli.recipes import summary
from stockpot.report.reading import Run

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


def test_tables_sort_and_cells_tell_their_value(complete: Path, tmp_path: Path) -> None:
    """The page's policy lets its own script run, and no other: this test's needs a copy without the policy."""
    page = (complete / "report.html").read_text()
    assert '<html lang="en" class="live">' in visit(complete / "report.html", tmp_path)[0]
    ours = """<script>
        document.querySelector("table.results thead th:nth-child(2) button").click();
        const chart = document.querySelector("#chart-weights .wide svg"), box = chart.getBoundingClientRect();
        const told = JSON.parse(document.getElementById("cells").textContent);
        const scale = box.width / chart.viewBox.baseVal.width;
        chart.dispatchEvent(new PointerEvent("pointermove", {
            clientX: box.left + scale * (told.left + 1.5 * told.width),
            clientY: box.top + scale * (told.top + 2.5 * told.height)}));
    </script></body>"""
    changed = tmp_path / "copy.html"
    changed.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page).replace("</body>", ours))
    dom, console, _ = visit(changed, tmp_path)
    assert console == ""
    rows = {row["method"]: row["score"]["value"] for row in summary(complete, complete / "report.html")["methods"]}
    shown = re.findall(r'<th scope="row"><b>([^<]+)</b>', dom)
    assert len(shown) == len(rows)
    assert [rows[name] for name in shown] == sorted(rows.values(), reverse=True)
    found = Run(complete)
    assert found.showpiece is not None
    assert found.showpiece.W is not None
    k = found.best_first[2]
    value = f"{found.showpiece.W[k, 1]:.3f}".replace("-", "−")
    assert f"{found.names[k]}, {found.showpiece.groups[1]}: {value}</p>" in dom
    assert re.search(r"<title>crossfit: \S+ \(\S+ to \S+\)</title>", dom)


def test_the_browser_test_notices_both(tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>console.error('oh no')</script><img src='http://localhost:9/x.png'>")
    _, console, addresses = visit(page, tmp_path)
    assert "oh no" in console
    assert "http://localhost:9/x.png" in addresses

"""Open every page of the built site, and a report, in a browser; fail on anything that a reader would stumble over.

    python website/browse.py build/site --report demo/run/report.html [--shots DIR]

Failures are console errors, exceptions, requests that fail or leave this machine, pictures that do not show, links
and anchors that lead nowhere, and pages that are wider than a telephone's screen.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

from playwright.sync_api import Browser, Page, sync_playwright

WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
_FACTS = """() => ({
    links: [...document.querySelectorAll('a[href]')].map(a => a.href),
    ids: [...document.querySelectorAll('[id], a[name]')].map(e => e.id || e.name),
    blank: [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src),
    title: document.title,
})"""
_WIDER = """() => {
    const room = document.documentElement.clientWidth, taken = document.documentElement.scrollWidth;
    if (taken <= room + 1) return null;
    const wide = [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > room + 1);
    return `${taken} points on ${room}: ` + wide.slice(0, 3).map(e => e.tagName + '.' + e.className).join(', ');
}"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def serve(folder: Path) -> tuple[http.server.ThreadingHTTPServer, str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_address[1]}/"


def watched(browser: Browser, home: str, problems: list[str], **options: Any) -> Page:
    """A page that writes down what goes wrong on it; nothing is loaded from anywhere but `home` (and files)."""
    page = browser.new_context(**options).new_page()

    def note(what: str) -> None:
        problems.append(f"{page.url}: {what}")

    def local(route: Any) -> None:
        if route.request.url.startswith((home, "file:", "data:", "blob:")):
            route.continue_()
        else:
            note(f"asks for {route.request.url}")
            route.abort()

    page.route("**/*", local)
    page.on("console", lambda m: note(f"console {m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: note(f"exception: {error}"))
    page.on("requestfailed", lambda request: note(f"failed: {request.url}"))
    page.on("response", lambda answer: note(f"{answer.status}: {answer.url}") if answer.status >= 400 else None)
    return page


def visit(page: Page, url: str, problems: list[str]) -> dict[str, Any]:
    page.goto(url, wait_until="networkidle")
    facts: dict[str, Any] = page.evaluate(_FACTS)
    problems += [f"{url}: no picture: {source}" for source in facts["blank"]]
    if not facts["title"]:
        problems.append(f"{url}: no title")
    return facts


def check_width(page: Page, url: str, problems: list[str]) -> None:
    page.goto(url, wait_until="networkidle")
    wider = page.evaluate(_WIDER)
    if wider:
        problems.append(f"{url}: wider than the screen: {wider}")


def check_links(seen: dict[str, dict[str, Any]], home: str, problems: list[str], folder: Path) -> None:
    """Links between pages lead to a page, and to a place on it."""
    for url, facts in seen.items():
        for link in sorted(set(facts["links"])):
            where, anchor = urldefrag(link)
            if not link.startswith(home):
                continue
            if where not in seen and where not in (home + "index.html",):
                path = folder / unquote(urlparse(where).path).lstrip("/")
                if not path.is_file():
                    problems.append(f"{url}: link to {link}")
            elif anchor and where in seen and unquote(anchor) not in seen[where]["ids"] and anchor != "__top":
                problems.append(f"{url}: no place {link}")


def shots(browser: Browser, urls: dict[str, str], home: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name, url in urls.items():
        for scheme in ("light", "dark"):
            for size, view in (("wide", WIDE), ("narrow", NARROW)):
                page = watched(browser, home, [], viewport=view, color_scheme=scheme)
                page.goto(url, wait_until="networkidle")
                page.screenshot(path=str(out / f"{name}-{scheme}-{size}.png"), full_page=True)
                page.context.close()


def chromium() -> str:
    """The system's browser; playwright's own would be fetched from the network."""
    for name in (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"):
        found = name and shutil.which(name)
        if found:
            return found
    raise SystemExit("no Chromium found: install it (Debian: apt-get install chromium), or set CHROMIUM to its path")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path, help="the built site")
    parser.add_argument("--report", type=Path, action="append", default=[], help="a report.html, opened as a file")
    parser.add_argument("--shots", type=Path, help="where to put screenshots of some pages")
    options = parser.parse_args()
    problems: list[str] = []
    server, home = serve(options.site)
    pages = sorted(path.relative_to(options.site) for path in options.site.rglob("*.html"))
    urls = [home + p.as_posix().removesuffix("index.html") for p in pages if p.name != "404.html"]
    reports = {f"report-{n}": path.resolve().as_uri() for n, path in enumerate(options.report)}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = watched(browser, home, problems, viewport=WIDE)
        seen = {url: visit(page, url, problems) for url in urls}
        check_links(seen, home, problems, options.site)
        for url in reports.values():
            facts = visit(page, url, problems)
            inside = {urldefrag(link)[1] for link in facts["links"] if urldefrag(link)[0] == url and "#" in link}
            problems += [f"{url}: no place #{anchor}" for anchor in sorted(inside - set(facts["ids"]))]
        narrow = watched(browser, home, problems, viewport=NARROW)
        for url in [*urls, *reports.values()]:
            check_width(narrow, url, problems)
        if options.shots:
            some = {"home": home, "your-own-task": f"{home}your-own-task/", "python": f"{home}reference/python/"}
            shots(browser, {**some, **reports}, home, options.shots)
        browser.close()
    server.shutdown()
    print("\n".join(dict.fromkeys(problems)))
    print(f"{len(urls)} pages and {len(reports)} reports opened: {len(set(problems))} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

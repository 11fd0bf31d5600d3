"""Which files of the repository are pages of the site, and where a link of a page leads there.

The pages are written for the repository: their links are relative paths to other files of it. A file that is linked
from a page becomes a page, too: Markdown as it is, code as a block. So no link of the site leads out of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "bash", ".json": "json"}
_LINK = re.compile(r"(\]\()([^)\s]+)(\))|(src=\")([^\"]+)(\")")
_CODE = re.compile(r"(^```.*?^```|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


class LinkError(Exception):
    """A link leads to a file that the repository does not have, or that cannot be shown."""


def page_of(file: Path) -> str:
    """The site's source name of a repository's file."""
    if file.is_relative_to(DOCS):
        return file.relative_to(DOCS).as_posix()
    if file.suffix == ".ipynb":
        return f"notebooks/{file.stem}.md"  # made by notebooks.py
    name = f"repository/{file.relative_to(ROOT).as_posix()}"
    return name if file.suffix in (".md", ".svg", ".png") else f"{name}.md"


def target_of(link: str, page: Path) -> tuple[Path, str] | None:
    """The file and the anchor that a page's link names; None for a link out of the repository, or within the page."""
    if re.match(r"[a-z]+:|#", link):
        return None
    path, _, anchor = link.partition("#")
    file = Path(os.path.normpath(page.parent / path))
    if file.is_dir():
        file /= "README.md"
    if not file.is_file() or not file.is_relative_to(ROOT):
        raise LinkError(f"{page.relative_to(ROOT)} links to {link}, which is no file of the repository")
    return file, anchor


def rewritten(text: str, page: Path) -> str:
    """The page with its links as the site needs them: from page to page."""
    here = Path(page_of(page)).parent

    def moved(link: str) -> str:
        target = target_of(link, page)
        if target is None:
            return link
        file, anchor = target
        return os.path.relpath(page_of(file), here) + (f"#{anchor}" if anchor else "")

    parts = _CODE.split(text)  # every second one is code
    parts[::2] = [_LINK.sub(lambda m: _link(m, moved), part) for part in parts[::2]]
    return "".join(parts)


def linked_files(pages: list[Path]) -> list[Path]:
    """Every file outside of docs/ that these pages link to, directly or by way of each other."""
    found: dict[Path, None] = {}
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for link in _links(page.read_text(encoding="utf-8")):
            target = target_of(link, page)
            if target is None or target[0] in found or target[0].is_relative_to(DOCS):
                continue
            if target[0].suffix == ".ipynb":
                continue
            found[target[0]] = None
            if target[0].suffix == ".md":
                waiting.append(target[0])
    return sorted(found)


def shown(file: Path) -> str:
    """The page that shows a file of the repository."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix not in LANGUAGES:
        raise LinkError(f"{file.relative_to(ROOT)} is linked and cannot be shown as a page")
    fence = "~~~~" if "```" in text else "```"
    return f"# {file.name}\n\n`{file.relative_to(ROOT)}`\n\n{fence}{LANGUAGES[file.suffix]}\n{text}{fence}\n"


def _links(text: str) -> Iterator[str]:
    for n, part in enumerate(_CODE.split(text)):
        if n % 2 == 0:
            yield from (match[2] or match[5] for match in _LINK.finditer(part))


def _link(match: re.Match[str], moved: Callable[[str], str]) -> str:
    before, link, after = match.groups()[:3] if match[2] else match.groups()[3:]
    return f"{before}{moved(link)}{after}"

"""What mkdocs calls while it builds the site: adds pages that are not files of docs/, and moves links."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import links
import notebooks
import reference

_SOURCE: dict[str, Path] = {}  # name in the site -> the repository's file


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages, the notebooks, and every file of the repository that a page links to."""
    _SOURCE.clear()
    made = {**reference.pages(), **notebooks.pages(links.ROOT / "examples" / "notebooks")}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
        _SOURCE[name] = links.DOCS / name
    pages = [Path(str(file.abs_src_path)) for file in files.documentation_pages() if file.src_uri not in made]
    _SOURCE.update({links.page_of(page): page for page in pages})
    try:
        for file in links.linked_files([*pages, *(links.ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]):
            name = links.page_of(file)
            if file.suffix in (".svg", ".png"):
                files.append(File.generated(config, name, content=file.read_bytes()))
            else:
                files.append(File.generated(config, name, content=links.shown(file)))
            _SOURCE[name] = file
    except links.LinkError as error:
        raise PluginError(str(error)) from None
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with links from page to page."""
    try:
        return links.rewritten(markdown, _SOURCE[page.file.src_uri])
    except links.LinkError as error:
        raise PluginError(str(error)) from None

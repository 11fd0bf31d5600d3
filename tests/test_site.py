"""The documentation site, as far as it can be checked without building it: links, navigation, generated pages."""

from __future__ import annotations

from pathlib import Path

import links
import notebooks
import pytest
import reference
import yaml

import stockpot
from stockpot.soups.registry import METHODS
from stockpot.soups.settings import declared

ROOT = Path(__file__).parents[1]


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without making the Python object that it names."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def navigation() -> set[str]:
    sections = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)["nav"]
    pages = [page for section in sections for page in section.values()]
    return {name for page in pages for entry in ([{"": page}] if isinstance(page, str) else page)
            for name in entry.values()}  # fmt: skip


def test_every_link_of_every_page_leads_to_a_file() -> None:
    found = links.linked_files([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
    assert ROOT / "examples" / "tasks" / "segmentation.py" in found
    assert links.page_of(ROOT / "examples" / "notebooks" / "vision.ipynb") in navigation()
    assert all(links.shown(file) for file in found if file.suffix not in (".svg", ".png"))


def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), `[code](gone.md)`, [there](gone.md#place)")
    with pytest.raises(links.LinkError, match=r"page\.md links to gone\.md#place, which is no file"):
        links.linked_files([page])


def test_links_become_links_from_page_to_page() -> None:
    page = ROOT / "docs" / "tutorial.md"
    text = (
        "[a](../README.md#x), [b](recipe.md), [c](https://x.org), [d](../examples/tasks/survival.py)\n```\n[e](f)\n```"
    )
    assert links.rewritten(text, page) == (
        "[a](repository/README.md#x), [b](recipe.md), [c](https://x.org),"
        " [d](repository/examples/tasks/survival.py.md)\n```\n[e](f)\n```"
    )


def test_every_page_is_in_the_navigation_and_the_navigation_has_no_other() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    named = navigation()
    assert pages <= named
    generated = {*reference.pages(), *notebooks.pages(ROOT / "examples" / "notebooks")}
    assert generated <= named
    for name in named - pages - generated:
        assert (ROOT / name.removeprefix("repository/")).is_file(), name


def test_the_reference_names_every_setting_method_command_and_public_name() -> None:
    pages = reference.pages()
    for name in [*declared(), *METHODS]:
        assert f"`{name}`" in pages["reference/settings.md"]
    for name in ("average", "cook", "compare", "push"):
        assert f"## stockpot {name}\n" in pages["reference/commands.md"]
    assert "| `--weights` 0.2,0.8 |  | One for each model, in their order" in pages["reference/commands.md"]
    for name in set(stockpot.__all__) - {"__version__"}:
        assert name in pages["reference/python.md"]

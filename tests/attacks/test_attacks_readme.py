"""The page lists exactly the threats that are tested."""

from __future__ import annotations

import pytest

pytest.importorskip("pyarrow")

from attacks import readme


def test_the_page_is_up_to_date() -> None:
    assert readme.README.read_text(encoding="utf-8") == "\n".join(readme.lines())


def test_no_name_is_there_twice_and_there_are_enough() -> None:
    names = [threat.name for _, _, _, threats in readme.PARTS for threat in threats]
    assert len(set(names)) == len(names)
    refused = [threat for _, _, _, threats in readme.PARTS for threat in threats if threat.words is not None]
    assert len(refused) >= 25

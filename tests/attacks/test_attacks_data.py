"""Data of strangers, through the reader that a recipe would choose for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("PIL.Image")

from attacks.kit import Threat
from attacks.threats_data import ARRAYS, DATASETS, IMAGES, TABLES
from stockpot.adapters.binary import read_arrays, read_dataset
from stockpot.adapters.images import decode, read_image_folder
from stockpot.adapters.models import ImageInput
from stockpot.adapters.tables import read_table
from stockpot.errors import DataError


def _pictures(path: Path, part: str | None) -> Any:
    table = read_image_folder(path, part)
    return decode(table.columns["image"], ImageInput(size=(4, 4), resize=64))


CASES = [
    (read, threat)
    for read, threats in ((read_arrays, ARRAYS), (read_table, TABLES), (read_dataset, DATASETS), (_pictures, IMAGES))
    for threat in threats
]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("read", "threat"), CASES, ids=lambda value: str(value) if isinstance(value, Threat) else "")
def test_data_of_a_stranger_runs_nothing(
    read: Callable[[Path, str | None], Any], threat: Threat, tmp_path: Path
) -> None:
    path = threat.make(tmp_path)
    if threat.words is None:
        assert len(read(path, None)) == 2
        return
    with pytest.raises(DataError, match=re.escape(threat.words)) as caught:
        read(path, None)
    assert len(str(caught.value)) < 3000

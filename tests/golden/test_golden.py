"""Every method and preset gives the mixing weights it gave before the rebuild, to twelve digits."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from golden.pools import CASES, cooked, settings_of

GOLDEN = load_file(Path(__file__).parent / "weights.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_mixing_weights_are_those_from_before_the_rebuild(name: str) -> None:
    wanted = settings_of(name)
    assert {f"{name}/{label}" for label in wanted} == {key for key in GOLDEN if key.startswith(f"{name}/")}
    for label, W in cooked(name, wanted):
        kept = GOLDEN[f"{name}/{label}"]
        assert W.shape == kept.shape, label
        assert float((W - kept).abs().max()) < 1e-12, label

"""Every method gives the mixing weights it gave before the rebuild, to twelve digits.

Two things are said apart. `normed` has a bias in front of a BatchNorm, on which the loss does not depend: its gradient
is rounding alone, which AdamW divides by its own size. In the code that wrote the file, one unit in the last place of
the learning rate moves the weights of this one tensor by 3e-11 (hl+) and 2e-9 (crossfit), and no others; they are held
to 1e-8. And the preset `authors` is not here: it follows the released code now, which it did not before
(tests/soups/test_authors.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from golden.pools import CASES, cooked, settings_of

GOLDEN = load_file(Path(__file__).parent / "weights.safetensors")
WITHOUT_EFFECT = {"normed": "0.bias"}


@pytest.mark.parametrize("name", CASES)
def test_mixing_weights_are_those_from_before_the_rebuild(name: str) -> None:
    wanted = settings_of(name)
    kept = {key for key in GOLDEN if key.startswith(f"{name}/")}
    assert {f"{name}/{label}" for label in wanted} == kept
    for label, soup in cooked(name, wanted):
        off = (soup.W - GOLDEN[f"{name}/{label}"]).abs()  # (K, G)
        if name in WITHOUT_EFFECT and len(soup.layout) > 1:
            group = soup.layout.group_of[WITHOUT_EFFECT[name]]
            assert float(off[:, group].max()) < 1e-8, label
            off[:, group] = 0.0
        assert float(off.max()) < 1e-12, label

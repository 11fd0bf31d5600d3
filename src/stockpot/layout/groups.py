"""From a tensor's name to the name of its coefficient group."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

WHOLE_MODEL = "model"
_NUMBERED = re.compile(r"\d+|.*\D\d+")  # "7", "layer1", "encoder_layer_3"


def by_model(name: str) -> str:  # noqa: ARG001 - one group, whatever the tensor
    return WHOLE_MODEL


def by_block(name: str) -> str:
    """The transformer layer or residual stage a tensor belongs to.

    That is the name up to its first numbered part: `encoder.layer.3.attention.query.weight` -> `encoder.layer.3`,
    `layer1.0.conv1.weight` -> `layer1`. A tensor outside any numbered part stays with its module.
    """
    parts = name.split(".")
    # A root such as `wav2vec2` or `gpt2` has a number but is no block when numbered layers stand below it.
    below = [part.isdigit() for part in parts[1:-1]]
    skip_root = not parts[0].isdigit() and any(below) and not below[0]
    for position, part in enumerate(parts[:-1]):
        if position == 0 and skip_root:
            continue
        if _NUMBERED.fullmatch(part):
            return ".".join(parts[: position + 1])
    return by_module(name)


def by_module(name: str) -> str:
    return name.rpartition(".")[0] or name


def by_tensor(name: str) -> str:
    return name


GRANULARITIES: Mapping[str, Callable[[str], str]] = {
    "model": by_model,
    "block": by_block,
    "module": by_module,
    "tensor": by_tensor,
}

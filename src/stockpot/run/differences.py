"""What changed between two recipes, as lines a person can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Where files lie does not make a run another one; the seed does.
_WITHOUT = ("base", "output.dir", "output.max_shard_size", "output.tensorboard", "output.overwrite")
_SHOWN = 12


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    old, new = _flat(before), _flat(after)
    keys = [key for key in {**old, **new} if key not in _WITHOUT and old.get(key) != new.get(key)]
    lines = [f"{key}: {_text(old, key)} -> {_text(new, key)}" for key in keys]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            flat.update(_flat(inner, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = list(inner) if isinstance(inner, tuple) else inner
    return flat


def _text(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "not there"
    text = str(values[key])
    return text if len(text) <= 60 else f"{text[:57]}..."

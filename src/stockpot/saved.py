"""What the files of a model call its tensors, where these are not the model's own names.

From version 5 on, transformers gives some models' tensors other names in memory than in files, and joins some of them.
Everything here speaks of a pool, whose names are those of files, and asks the library what they are in the model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_KNOWN: WeakKeyDictionary[nn.Module, tuple[dict[str, str], frozenset[str]]] = WeakKeyDictionary()


def file_names(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Of a pool's names those that the model has under other ones, with these."""
    own = {*model.state_dict(), *dict(model.named_buffers(remove_duplicate=False))}
    strangers = [name for name in names if name not in own]
    whole = _saved(model)[0] if strangers else {}
    return {name: whole[name] for name in strangers if name in whole}


def by_file_names(model: nn.Module, names: Iterable[str], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A model's tensors, given by its own names, under those that a pool has for them."""
    other = {own: name for name, own in file_names(model, names).items()}
    return {other.get(name, name): value for name, value in tensors.items()}


def parts_in_files(model: nn.Module) -> frozenset[str]:
    """Names in files of what is joined in memory, such as the single experts of many."""
    return _saved(model)[1]


def _saved(model: nn.Module) -> tuple[dict[str, str], frozenset[str]]:
    """Names in files: of whole tensors, with the model's own; and of parts."""
    library = sys.modules.get("transformers.core_model_loading")  # it is there where such a model is
    convert = getattr(library, "revert_weight_conversion", None)
    if convert is None or not hasattr(model, "save_pretrained"):
        return {}, frozenset()
    if model not in _KNOWN:
        state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        blank = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
        try:
            saved = convert(model, dict(blank))
        except Exception:  # an inner function of that library, which another version may have changed
            saved = {}
        own = {id(value): name for name, value in blank.items()}
        whole = {name: own[id(value)] for name, value in saved.items() if id(value) in own}
        _KNOWN[model] = whole, frozenset(saved.keys() - whole.keys() - blank.keys())
    return _KNOWN[model]

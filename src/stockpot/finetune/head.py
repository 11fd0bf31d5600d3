"""Which parameters are the head."""

from __future__ import annotations

import difflib
from fnmatch import fnmatchcase

from torch import nn

from stockpot.errors import TaskError, describe


def find_head(model: nn.Module, pattern: str | None) -> tuple[str, ...]:
    """Names of the head's parameters: those the pattern, name or prefix fits, or the last linear layer's."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    if pattern is None:
        return _last_linear(model)
    prefix = pattern.rstrip(".")
    found = tuple(
        name
        for name in names
        if name == prefix or name.startswith(f"{prefix}.") or fnmatchcase(name, pattern)
    )
    if not found:
        places = sorted({name.rpartition(".")[0] or name for name in names})
        close = difflib.get_close_matches(prefix.removesuffix(".*"), places, n=3, cutoff=0.4)
        raise TaskError(
            describe(
                f"head {pattern!r}",
                expected=f"a name, prefix or pattern of parameters of {type(model).__name__}",
                found="none that fit",
                fix=f"did you mean {' or '.join(close)}"
                if close
                else f"the last ones are {', '.join(names[-3:])}",
            )
        )
    return found


def _last_linear(model: nn.Module) -> tuple[str, ...]:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise TaskError(
            describe(
                f"head of {type(model).__name__}",
                expected="a linear layer, as the last of the model",
                found="none",
                fix="name the head's parameters, or train without a probe",
            )
        )
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # a head may be tied
    return tuple(name for name in (f"{linear[-1]}.weight", f"{linear[-1]}.bias") if name in own)

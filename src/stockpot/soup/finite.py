"""A soup is never written with a value that its type cannot hold."""

from __future__ import annotations

import torch
from torch import Tensor

from stockpot.errors import SoupError, describe


def check_holds(mixed: Tensor, name: str, dtype: torch.dtype) -> None:
    """Whether every value of a mixed tensor is finite, and stays so in the type it will be stored in."""
    if not mixed.numel():
        return
    ends = torch.stack(torch.aminmax(mixed))  # NaN if there is one
    stored = ends.to(dtype).to(ends.dtype)
    if bool(stored.isfinite().all()):
        return
    if bool(ends.isfinite().all()):
        highest = torch.finfo(dtype).max
        worst = float(ends.abs().max())
        raise SoupError(
            describe(
                f"soup tensor {name}",
                expected=f"values that {str(dtype).removeprefix('torch.')} can hold, up to {highest:g}",
                found=f"one of {worst:g}",
                fix="lower lr so that the mixing weights stay small, or store the soup in a wider type"
                " (Soup.save(dtype=torch.float32))",
            )
        )
    raise SoupError(
        describe(
            f"soup tensor {name}",
            expected="finite values",
            found="NaN or infinity",
            fix="leave out ingredients whose weights are not finite (Pool.verify_finite names them,"
            " Pool.drop_nonfinite leaves them out; in a recipe, pool.nonfinite: drop), or lower lr",
        )
    )

"""Token ids (n, T)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

SHARE = 0.3  # of the tokens, dropped at strength 1


def drop_tokens(
    ids: Tensor, strength: float, mask_id: int | None, stream: Generator, attention: Tensor | None = None
) -> Tensor:
    """Put `mask_id`, or a token from elsewhere in the batch, where a token is dropped.

    Padding stays, and so does the first position, where encoders keep the token they classify by.
    """
    dropped = torch.rand(ids.shape, generator=stream, device=ids.device) < SHARE * strength
    dropped[:, 0] = False
    if attention is not None and attention.shape == ids.shape:
        dropped &= attention != 0
    if mask_id is not None:
        return ids.masked_fill(dropped, mask_id)
    elsewhere = torch.randint(0, len(ids), ids.shape, generator=stream, device=ids.device)
    return torch.where(dropped, ids.gather(0, elsewhere), ids)

"""Which keys a query may see before any score is computed: causality, padding, packed documents."""

import torch
from torch import Tensor


def visible_keys(
    queries: int,
    keys: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Return a boolean tensor [B or 1, 1, queries, keys], True where the query may see the key.

    The last query is aligned with the last key, so ``queries < keys`` is decoding with a cache.
    """
    query_position = torch.arange(keys - queries, keys, device=device)
    visible = (query_position[:, None] >= torch.arange(keys, device=device))[None, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if segment_ids is not None:
        query_segment = segment_ids[:, None, keys - queries :, None]
        visible = visible & (query_segment == segment_ids[:, None, None, :])
    return visible

"""Which keys a query may see before any score is computed: causality, padding, packed documents."""

import torch
from torch import Tensor


def check_masks(
    key_mask: Tensor | None, segment_ids: Tensor | None, batch: int, keys: int, device: torch.device
) -> None:
    """Raise a ValueError unless key_mask is boolean and segment_ids integer, both [batch, keys] on the device."""
    for name, mask in (("key_mask", key_mask), ("segment_ids", segment_ids)):
        if mask is None:
            continue
        if not isinstance(mask, Tensor):
            raise ValueError(f"{name} must be a tensor [B, Lk], got {type(mask).__name__}")
        if mask.shape != (batch, keys):
            raise ValueError(f"{name} must have the shape [B, Lk] = {[batch, keys]}, got {list(mask.shape)}")
        if mask.device != device:
            raise ValueError(f"{name} must be on the device of query, {device}, got {mask.device}")
    if key_mask is not None and key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be boolean, got {key_mask.dtype}")
    if segment_ids is not None and segment_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"segment_ids must be int32 or int64, got {segment_ids.dtype}")


def visible_keys(
    queries: int,
    keys: int,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    device: torch.device,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Return a boolean tensor [B or 1, 1, queries, keys], True where the query may see the key.

    The last query is aligned with the last key, so ``queries < keys`` is decoding with a cache; or with the last of the
    ``key_lengths [B]`` keys that a sequence has.
    """
    position = query_positions(queries, keys, key_lengths, device)
    visible = (position[:, :, None] >= torch.arange(keys, device=device))[:, None]
    if key_mask is not None:
        visible = visible & key_mask[:, None, None, :]
    if segment_ids is not None:
        query_segment = segment_ids.gather(1, position.clamp(min=0).expand(segment_ids.shape[0], -1))
        visible = visible & (query_segment[:, None, :, None] == segment_ids[:, None, None, :])
    return visible


def query_positions(queries: int, keys: int, key_lengths: Tensor | None, device: torch.device) -> Tensor:
    """[B or 1, queries]: the key that each query is aligned with."""
    position = torch.arange(keys - queries, keys, device=device)[None]
    return position if key_lengths is None else position - keys + key_lengths[:, None]

"""Which packed document each token belongs to, from whatever tools pass to say so."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.ops.threshold_relative.varlen import segments_of_lengths

FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""What `DataCollatorWithFlattening` adds for FlashAttention and for state-space models."""


def told_segments(batch: int, tokens: int, device: torch.device, arguments: dict[str, Any]) -> Tensor | None:
    """Segments ``[B, L]`` of the new tokens from the arguments in ``FLATTENED``, None if they say nothing.

    ``seq_idx [B, L]`` names them; ``cu_seq_lens_q [documents + 1]`` says where each begins in a single row.
    """
    if (names := arguments.get("seq_idx")) is not None:
        if names.shape != (batch, tokens):
            raise ValueError(
                f"seq_idx must have the shape [batch, new tokens] = {[batch, tokens]}, got {_shape(names)}"
            )
        return names.to(device)
    begins, of_keys = (arguments.get(name) for name in FLATTENED[:2])
    if begins is None and of_keys is None:
        return None
    if begins is None or (of_keys is not None and of_keys is not begins and not _same(begins, of_keys)):
        raise ValueError("cu_seq_lens_q must be given and equal to cu_seq_lens_k: rows are packed without a cache")
    if batch != 1:
        raise ValueError(f"cu_seq_lens_q must come with a batch of 1, which holds all documents, got {batch}")
    return segments_of_lengths(begins.to(device), tokens, "cu_seq_lens_q")[None]


def positioned_segments(
    position_ids: Tensor, key_mask: Tensor | None, batch: int, tokens: int, goes_on: bool | Tensor = False
) -> Tensor | None:
    """Segments ``[B, L]``: a document begins where a position does not continue that of the token before it.

    Padding belongs to no document. Behind padding a position may go on from the last token, or count the padding too.
    With ``goes_on``, which may differ from row to row ``[B, 1]``, there are tokens before these, and a first one at
    position 0 begins a document. None, which is faster, if there is one document.
    """
    if position_ids.shape not in ((batch, tokens), (1, tokens)):
        raise ValueError(
            f"position_ids must have the shape [batch, new tokens] = {[batch, tokens]}, got {_shape(position_ids)}"
        )
    if key_mask is None:
        begins = position_ids.diff(dim=1, prepend=position_ids[:, :1] - 1) != 1
    else:
        place = torch.arange(tokens, device=position_ids.device)
        last = F.pad(place.where(key_mask, -1).cummax(dim=1).values[:, :-1], (1, 0), value=-1)  # token before this one
        step = position_ids - position_ids.expand(batch, -1).gather(1, last.clamp(min=0))
        begins = key_mask & (last >= 0) & (step != 1) & (step != place - last)
    if goes_on is not False:
        first = position_ids == 0 if key_mask is None else key_mask & (position_ids == 0) & (last < 0)
        begins = begins | (first & goes_on)
    if not torch.compiler.is_compiling() and not begins.any():
        return None
    return begins.cumsum(dim=1).expand(batch, tokens)


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.compiler.is_compiling() or torch.equal(one, other)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

"""What `forward` is given beside tokens: which arguments it knows, what is padding, which documents are packed."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.hub.cache import TraLayer, TraStaticLayer
from tra.hub.packing import FLATTENED, positioned_segments, told_segments
from tra.lookup import lookup

ARGUMENTS = {
    "cache_position",  # of the tokens in the cache, which knows
    "ignore_index",
    "num_items_in_batch",
    "output_router_logits",  # of experts, which there are none of
    "return_dict",
    "shift_labels",
    "token_type_ids",
    "tokenizer",  # of stop strings, which `generate` hands on
    *FLATTENED,
}
"""What tools pass to any model beside the arguments that `forward` names."""


def refuse_arguments(given: dict[str, Any], forward: Callable[..., Any]) -> None:
    """Raise a ValueError for an argument that means nothing to `forward`, with the nearest that does."""
    if given.get("is_causal", True) is False:
        raise ValueError("is_causal must be True: every mechanism is causal, got False")
    for name in given:
        if name not in ARGUMENTS and name != "is_causal":
            named = {*inspect.signature(forward).parameters, "labels", "logits_to_keep"} - {"self", "kwargs"}
            lookup(dict.fromkeys([*named, *ARGUMENTS]), name, "argument")


def key_mask_of(attention_mask: Tensor | None, layer: TraLayer | None, batch: int, new: int) -> Tensor | None:
    """True for tokens and False for padding ``[B, keys]``; None, which is faster, if there is no padding.

    Beside a static cache a mask is of the tokens so far or of all places of the cache, and the result is of all places.
    """
    if attention_mask is None:
        return None
    compiling = torch.compiler.is_compiling()
    places = layer.max_cache_len if isinstance(layer, TraStaticLayer) else None
    if places is None or not compiling:  # while compiling, the length of a static cache is not known
        tokens = new + (0 if layer is None else int(layer.get_seq_length()))
        if attention_mask.shape not in ((batch, tokens), (batch, places)):
            whole = "" if places is None else f" or that of the whole cache, {[batch, places]}"
            raise ValueError(
                f"attention_mask must have the shape [batch, cached + new tokens] = {[batch, tokens]}{whole}, "
                f"0 for padding, got {list(attention_mask.shape)}"
            )
    key_mask = attention_mask if places is None else padded_mask(attention_mask, places)
    if key_mask is None or (not compiling and key_mask.all()):  # while compiling, the data cannot decide
        return None
    return key_mask.bool()


def padded_mask(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """A mask of the tokens so far as one of all places of a static cache, of which the rest is empty."""
    if attention_mask is None or attention_mask.dim() != 2 or attention_mask.shape[1] >= keys:
        return attention_mask
    if not torch.compiler.is_compiling() and attention_mask.all():
        return None
    return F.pad(attention_mask, (0, keys - attention_mask.shape[1]))


def documents(
    layer: TraLayer | None,
    embedded: Tensor,
    key_mask: Tensor | None,
    position_ids: Tensor | None,
    arguments: dict[str, Any],
) -> Tensor | None:
    """Segments ``[B, cached + L]`` from what says which documents are packed in a row, None if there is one document.

    What the first layer of the cache knows of earlier tokens holds; new tokens go on with the last document, unless
    their positions start again.
    """
    batch, new = embedded.shape[:2]
    fixed = isinstance(layer, TraStaticLayer)
    unknown = fixed and torch.compiler.is_compiling()  # how many tokens the cache holds
    cached = 0 if layer is None or unknown else int(layer.get_seq_length())
    told = told_segments(batch, new, embedded.device, arguments)
    if told is not None and cached and not fixed:
        raise ValueError("past_key_values must hold no tokens where cu_seq_lens_q or seq_idx divides a row")
    if told is None and position_ids is not None and not unknown:
        masked = None if key_mask is None else key_mask[:, cached : cached + new]
        told = positioned_segments(position_ids, masked, batch, new, goes_on=cached > 0)
    if fixed:
        if told is not None:
            raise ValueError(
                "past_key_values must not be a StaticCache for packed documents: it holds one for each row"
            )
        return None
    before = None if layer is None else layer.segments
    if not cached or (told is None and before is None):
        return told
    if before is None:
        before = torch.zeros(batch, cached, dtype=torch.long, device=embedded.device)
    if told is None:
        return torch.cat([before, before[:, -1:].expand(batch, new)], dim=1)
    return torch.cat([before, before[:, -1:] + told], dim=1)

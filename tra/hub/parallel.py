"""A batch of transformers' for processes that share its sequences."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tra.distributed import ContextParallel

IGNORED = -100
"""A label that does not count."""
DIVIDED = ("input_ids", "inputs_embeds", "attention_mask", "segment_ids", "labels", "shift_labels")
KEPT = ("num_items_in_batch", "return_dict", "logits_to_keep", "use_cache")


def shard_batch(shards: ContextParallel, batch: Mapping[str, Any]) -> dict[str, Any]:
    """This process's part of a batch ``[B, L]`` that all of them have, for a model within
    :func:`~tra.distributed.context_parallel`.

    The label of a shard's last token is in the next one, so labels are shifted here. The loss is divided by the labels
    of all processes: the sum of their losses, and of their gradients, is what one process has.

    Args:
        shards: the processes.
        batch: what the model is given: input_ids or inputs_embeds, attention_mask, labels, segment_ids.
    """
    for name in batch:
        if name not in DIVIDED + KEPT:
            raise ValueError(f"{name} cannot be divided among processes: packed documents are told by segment_ids")
    whole = {name: value for name, value in batch.items() if isinstance(value, Tensor) or name in KEPT}
    labels = whole.get("labels")
    if labels is not None:
        whole.setdefault("shift_labels", F.pad(labels, (0, 1), value=IGNORED)[:, 1:])
        whole.setdefault("num_items_in_batch", int((whole["shift_labels"] != IGNORED).sum()))
    divided = {name: shards.shard(value).contiguous() for name, value in whole.items() if name in DIVIDED}
    return {"use_cache": False, **whole, **divided}

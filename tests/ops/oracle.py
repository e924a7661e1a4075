"""Threshold relative attention as three loops over Python floats: slow, obvious, sharing no code with the package."""

import math

import torch
from torch import Tensor


def loop_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    scale: float | None = None,
    threshold: float = 0.0,
) -> Tensor:
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    scale = 1.0 / math.sqrt(width) if scale is None else scale
    q, k, v, g = (x.double().tolist() for x in (query, key, value, log_gate))
    out = torch.zeros(batch, heads, queries, value.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            group = h // (heads // key_heads)
            for i in range(queries):
                position = i + keys - queries
                logits: list[tuple[int, float]] = []
                count = 0
                for j in range(position, -1, -1):
                    if key_mask is not None and not key_mask[b, j]:
                        continue
                    if segment_ids is not None and segment_ids[b, j] != segment_ids[b, position]:
                        continue
                    score = scale * sum(x * y for x, y in zip(q[b][h][i], k[b][group][j], strict=True))
                    if score > threshold:
                        count += 1
                        logits.append((j, score + g[b][h][i] * count))
                if not logits:
                    continue
                largest = max(logit for _, logit in logits)
                total = sum(math.exp(logit - largest) for _, logit in logits)
                for j, logit in logits:
                    weight = math.exp(logit - largest) / total
                    out[b, h, i] += weight * torch.tensor(v[b][group][j], dtype=torch.float64)
    return out


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, keep: Tensor, scale: float | None = None
) -> Tensor:
    """The same with matrices, differentiable, in the dtype of its inputs, for a given choice of kept keys.

    With real-valued inputs two correct computations may disagree on the sign of a score near 0, and then on everything
    after it; handing over the choice compares the rest.
    """
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    distance = keep.flip(-1).cumsum(-1).flip(-1)
    logits = (query @ key.mT * scale + log_gate[..., None] * distance).masked_fill(~keep, -math.inf)
    empty = ~keep.any(-1, keepdim=True)
    return logits.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value

"""The mechanism as the paper's equations, in plain PyTorch: the oracle of every faster implementation.

It runs in any floating dtype (half precision computes in float32) on any device, visits every key and
holds tensors of size queries x keys. Shapes: B batch, H query heads, I queries, J keys, D key width,
E value width.
"""

import torch
from torch import Tensor

from tra.ops.threshold_relative.dropout import dropout_factor
from tra.ops.visibility import visible_keys


def attention_terms(
    query_BHID: Tensor,
    key_BHJD: Tensor,
    log_gate_BHI: Tensor,
    visible: Tensor,
    scale: float,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (keep, extra distance c - 1, logits), each [B, H, I, J]; logits are -inf where not kept.

    The logits are the paper's less g_i: softmax does not change when a row is shifted, and then the
    nearest kept key weighs exp(s), however strong the gate.
    """
    score = torch.einsum("bhid,bhjd->bhij", query_BHID, key_BHJD) * scale
    keep = visible & (score > threshold)
    kept_up_to = keep.cumsum(-1, dtype=torch.int32)
    distance = kept_up_to[..., -1:] - kept_up_to
    logits = score + log_gate_BHI[..., None] * distance.to(score.dtype)
    return keep, distance, logits.masked_fill(~keep, float("-inf"))


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    threshold: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, I, E] and each row's log normaliser [B, H, I], -inf for empty rows."""
    q, k, v, g, visible = _prepare(query, key, value, log_gate, key_mask, segment_ids)
    if q.numel() == 0:
        out = query.new_zeros(*query.shape[:3], value.shape[3])
        return out, g.new_full(query.shape[:3], float("-inf"))
    keep, _, logits = attention_terms(q, k, g, visible, scale, threshold)
    log_normaliser = logits.logsumexp(-1)
    weights = _normalise(logits, log_normaliser)
    if dropout_seed is not None:
        weights = weights * dropout_factor(dropout_seed, weights.shape, dropout, weights.dtype)
    out = weights @ v
    bad_value = ~value.isfinite().all(-1)
    if bad_value.any():
        bad_key = bad_value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)[:, :, None, :]
        out = out.masked_fill((keep & bad_key).any(-1, keepdim=True), float("nan"))
    bad_query = ~(query.isfinite().all(-1) & log_gate.isfinite())
    out = out.masked_fill(bad_query[..., None], float("nan"))
    return out.to(query.dtype), log_normaliser


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    out: Tensor,
    log_normaliser: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    threshold: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and log_gate; keep and distance are constants."""
    q, k, v, g, visible = _prepare(query, key, value, log_gate, key_mask, segment_ids)
    if q.numel() == 0:
        return (
            torch.zeros_like(query),
            torch.zeros_like(key),
            torch.zeros_like(value),
            torch.zeros_like(log_gate),
        )
    grad_o = grad_out.to(q.dtype)
    keep, distance, logits = attention_terms(q, k, g, visible, scale, threshold)
    weights = _normalise(logits, log_normaliser)
    grad_weights = grad_o @ v.transpose(-1, -2)
    dropped = weights
    if dropout_seed is not None:
        factor = dropout_factor(dropout_seed, weights.shape, dropout, weights.dtype)
        dropped, grad_weights = weights * factor, grad_weights * factor
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    grad_logits = (weights * (grad_weights - delta)).masked_fill(~keep, 0.0)

    grad_query = (grad_logits @ k) * scale
    grad_key = (grad_logits.transpose(-1, -2) @ q) * scale
    grad_value = dropped.transpose(-1, -2) @ grad_o
    # The rows of grad_logits sum to 0, so c - 1 gives the gradient that c gives.
    grad_gate = (grad_logits * distance.to(grad_logits.dtype)).sum(-1)

    groups = (key.shape[1], query.shape[1] // key.shape[1])
    grad_key = grad_key.unflatten(1, groups).sum(2)
    grad_value = grad_value.unflatten(1, groups).sum(2)
    return (
        grad_query.to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        grad_gate.to(log_gate.dtype),
    )


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Repeat grouped heads, promote half precision, and keep NaN and inf out of the products.

    A non-finite key counts as padding. Other non-finite numbers become 0 here, because 0 * NaN would
    carry them to rows they have no part in; `forward` marks the rows they do belong to.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    visible = visible_keys(query.shape[2], key.shape[2], key_mask, segment_ids, query.device)
    visible = visible & key.isfinite().all(-1).repeat_interleave(group, dim=1)[:, :, None, :]
    q, k, v, g = (x.to(dtype).nan_to_num(0.0, 0.0, 0.0) for x in (query, key, value, log_gate))
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), g, visible


def _normalise(logits: Tensor, log_normaliser: Tensor) -> Tensor:
    """exp(logits - log_normaliser), exactly 0 where a key is not kept and in rows that keep none."""
    shift = log_normaliser.masked_fill(log_normaliser.isneginf(), 0.0)
    return (logits - shift[..., None]).exp()

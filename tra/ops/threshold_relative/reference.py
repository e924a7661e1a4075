"""The mechanism as the paper's equations, in plain PyTorch: the oracle of every faster implementation.

It runs in any floating dtype (half precision computes in float32) on any device, visits every key and
holds tensors of size queries x keys. Shapes: B batch, H query heads, I queries, J keys, D key width,
E value width.
"""

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options, broken_bound
from tra.ops.threshold_relative.dropout import dropout_factor
from tra.ops.threshold_relative.reach import largest_score, row_reach
from tra.ops.visibility import visible_keys


def about() -> str:
    return "plain PyTorch on any device, in any floating dtype; refuses nothing, holds matrices of queries x keys"


def refusal(inputs: Inputs, options: Options) -> str | None:
    return None


def attention_terms(
    query_BHID: Tensor,
    key_BHJD: Tensor,
    log_gate_BHI: Tensor,
    visible: Tensor,
    scale: float,
    threshold: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (score, keep, extra distance c - 1, logits), each [B, H, I, J]; logits are -inf where not kept.

    The logits are the paper's less g_i: softmax does not change when a row is shifted, and then the
    nearest kept key weighs exp(s), however strong the gate.
    """
    score = torch.einsum("bhid,bhjd->bhij", query_BHID, key_BHJD) * scale
    keep = visible & (score > threshold)
    kept_up_to = keep.cumsum(-1, dtype=torch.int32)
    distance = kept_up_to[..., -1:] - kept_up_to
    logits = score + log_gate_BHI[..., None] * distance.to(score.dtype)
    return score, keep, distance, logits.masked_fill(~keep, float("-inf"))


def softmax_terms(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [B, H, I, J], which are 0 in rows that keep nothing, and per row the largest logit and the sum
    of exp(logit - largest)."""
    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    weights = (logits - largest[..., None]).exp()
    total = weights.sum(-1)
    return weights / total[..., None].masked_fill(total[..., None] == 0, 1.0), largest, total


def equations(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """As `forward` without dropout on finite inputs, with no branch that depends on data: for exporters, which write
    the operator as a sum of others."""
    q, k, v, g, visible = _prepare(inputs)
    *_, logits = attention_terms(q, k, g, visible, options.scale, options.threshold)
    weights, largest, total = softmax_terms(logits)
    return (weights @ v).to(inputs.query.dtype), torch.stack([largest, total], dim=-1)


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, I, E] and what backward needs of each row, [B, H, I, 2]: the largest logit, and the
    sum of exp(logit - largest), which is 0 for rows that keep nothing and NaN for rows that are."""
    query, key, value, log_gate = inputs[:4]
    q, k, v, g, visible = _prepare(inputs)
    if q.numel() == 0:
        return query.new_zeros(*query.shape[:3], value.shape[3]), g.new_zeros(*query.shape[:3], 2)
    score, keep, distance, logits = attention_terms(q, k, g, visible, options.scale, options.threshold)
    weights, largest, total = softmax_terms(logits)
    if inputs.dropout_seed is not None:
        weights = weights * dropout_factor(inputs.dropout_seed, weights.shape, options.dropout, weights.dtype)
    out = weights @ v
    spoilt = ~(query.isfinite().all(-1) & log_gate.to(g.dtype).isfinite())
    # Reading data is free on a CPU only.
    if options.score_bound is not None and query.device.type == "cpu":
        beyond = keep & (score.abs() > largest_score(inputs, options)) & ~spoilt[..., None]
        if beyond.any() and (beyond & (distance < row_reach(inputs, options)[..., None])).any():
            raise broken_bound(options)
    bad_value = ~value.isfinite().all(-1)
    if bad_value.any():
        bad_key = bad_value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)[:, :, None, :]
        spoilt = spoilt | (keep & bad_key & (distance < row_reach(inputs, options)[..., None])).any(-1)
    out = out.masked_fill(spoilt[..., None], float("nan"))
    total = total.masked_fill(spoilt, float("nan"))
    return out.to(query.dtype), torch.stack([largest, total], dim=-1)


def backward(grad_out: Tensor, inputs: Inputs, out: Tensor, row_state: Tensor, options: Options) -> Gradients:
    """Return the gradients of query, key, value and log_gate; keep and distance are constants.

    A row that is NaN, or whose own gradient is not finite, has gradients of NaN and no part in those of others.
    """
    query, key, value, log_gate = inputs[:4]
    q, k, v, g, visible = _prepare(inputs)
    if q.numel() == 0:
        return (
            torch.zeros_like(query),
            torch.zeros_like(key),
            torch.zeros_like(value),
            torch.zeros_like(log_gate),
        )
    _, keep, distance, logits = attention_terms(q, k, g, visible, options.scale, options.threshold)
    largest, total = row_state[..., None].unbind(-2)
    weights = (logits - largest).exp() / total.masked_fill(total == 0, 1.0)
    spoilt = ~(row_state.isfinite().all(-1) & grad_out.isfinite().all(-1))[..., None]
    weights = weights.masked_fill(spoilt, 0.0)
    grad_o = grad_out.to(q.dtype).masked_fill(spoilt, 0.0)
    grad_weights = grad_o @ v.transpose(-1, -2)
    dropped = weights
    if inputs.dropout_seed is not None:
        factor = dropout_factor(inputs.dropout_seed, weights.shape, options.dropout, weights.dtype)
        dropped, grad_weights = weights * factor, grad_weights * factor
    delta = (weights * grad_weights).sum(-1, keepdim=True)
    spoilt = spoilt | ~delta.isfinite()
    dropped = dropped.masked_fill(spoilt, 0.0)
    grad_logits = (weights * (grad_weights - delta)).masked_fill(~keep | spoilt, 0.0)

    grad_query = ((grad_logits @ k) * options.scale).masked_fill(spoilt, float("nan"))
    grad_key = (grad_logits.transpose(-1, -2) @ q) * options.scale
    grad_value = dropped.transpose(-1, -2) @ grad_o
    # The rows of grad_logits sum to 0, so c - 1 gives the gradient that c gives.
    grad_gate = (grad_logits * distance.to(grad_logits.dtype)).sum(-1).masked_fill(spoilt[..., 0], float("nan"))

    groups = (key.shape[1], query.shape[1] // key.shape[1])
    grad_key = grad_key.unflatten(1, groups).sum(2)
    grad_value = grad_value.unflatten(1, groups).sum(2)
    return (
        grad_query.to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        grad_gate.to(log_gate.dtype),
    )


def _prepare(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Repeat grouped heads, promote half precision, and keep NaN and inf out of the products.

    A non-finite key counts as padding. Other non-finite numbers become 0 here, because 0 * NaN would
    carry them to rows they have no part in; `forward` marks the rows they do belong to.
    """
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    visible = visible_keys(query.shape[2], key.shape[2], inputs.key_mask, inputs.segment_ids, query.device)
    visible = visible & key.isfinite().all(-1).repeat_interleave(group, dim=1)[:, :, None, :]
    q, k, v, g = (x.to(dtype).nan_to_num(0.0, 0.0, 0.0) for x in inputs[:4])
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), g, visible

"""The mechanism as the paper's equations, in plain PyTorch: the oracle of every faster implementation.

It runs in any floating dtype (half precision computes in float32) on any device, visits every key and
holds tensors of size queries x keys. Shapes: B batch, H query heads, I queries, J keys, D key width,
E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result, broken_bound
from tra.ops.threshold_relative.dropout import dropout_factor
from tra.ops.threshold_relative.reach import largest_score, row_reach, row_threshold
from tra.ops.visibility import visible_keys


def about() -> str:
    return "plain PyTorch on any device, in any floating dtype; refuses nothing, holds matrices of queries x keys"


def refusal(inputs: Inputs, options: Options) -> str | None:
    return None


class Terms(NamedTuple):
    """Of every query and key, [B, H, I, J]."""

    score: Tensor
    keep: Tensor
    distance: Tensor
    """How many kept keys are nearer: the paper's c less one."""
    logits: Tensor
    """The paper's less g_i, also of keys that are left out. Softmax does not change when a row is shifted, and then
    the nearest kept key weighs exp(s), however strong the gate."""


def attention_terms(
    query_BHID: Tensor,
    key_BHJD: Tensor,
    log_gate_BHI: Tensor,
    visible: Tensor,
    scale: float,
    threshold: float | Tensor,
) -> Terms:
    """The equations up to the softmax. A threshold that is a tensor broadcasts to [B, H, I, J]."""
    score = torch.einsum("bhid,bhjd->bhij", query_BHID, key_BHJD) * scale
    keep = visible & (score > threshold)
    kept_up_to = keep.cumsum(-1, dtype=torch.int32)
    distance = kept_up_to[..., -1:] - kept_up_to
    return Terms(score, keep, distance, score + log_gate_BHI[..., None] * distance.to(score.dtype))


def softmax_terms(logits: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights [B, H, I, J], which are 0 in rows that keep nothing, and per row the largest logit and the sum
    of exp(logit - largest)."""
    logits = logits.masked_fill(~keep, float("-inf"))
    largest = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    weights = (logits - largest[..., None]).exp()
    total = weights.sum(-1)
    return weights / total[..., None].masked_fill(total[..., None] == 0, 1.0), largest, total


def equations(inputs: Inputs, options: Options) -> Tensor:
    """The output without dropout on finite inputs, with no branch that depends on data: for exporters, which write
    the operator as a sum of others."""
    q, k, v, g, threshold, visible = _prepare(inputs, options)
    terms = attention_terms(q, k, g, visible, options.scale, threshold)
    weights, _, _ = softmax_terms(terms.logits, terms.keep)
    return (weights @ v).to(inputs.query.dtype)


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    """The row state is the largest logit, and the sum of exp(logit - largest), which is 0 for rows that keep nothing
    and NaN for rows that are."""
    query, key, value, log_gate = inputs[:4]
    q, k, v, g, threshold, visible = _prepare(inputs, options)
    if q.numel() == 0:
        return Result(query.new_zeros(*query.shape[:3], value.shape[3]), g.new_zeros(*query.shape[:3], 2), None)
    score, keep, distance, logits = attention_terms(q, k, g, visible, options.scale, threshold)
    weights, largest, total = softmax_terms(logits, keep)
    if inputs.dropout_seed is not None:
        weights = weights * dropout_factor(inputs.dropout_seed, weights.shape, options.dropout, weights.dtype)
    out = weights @ v
    spoilt = ~(query.isfinite().all(-1) & log_gate.to(g.dtype).isfinite())
    if inputs.row_threshold is not None:
        spoilt = spoilt | ~inputs.row_threshold.to(g.dtype).isfinite()
    bound = largest_score(inputs, options)
    # Reading data is free on a CPU only.
    if bound is not None and query.device.type == "cpu":
        beyond = keep & (score.abs() > bound[..., None]) & ~spoilt[..., None]
        if beyond.any() and (beyond & (distance < row_reach(inputs, options)[..., None])).any():
            raise broken_bound(inputs, options)
    bad_value = ~value.isfinite().all(-1)
    if bad_value.any():
        bad_key = bad_value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)[:, :, None, :]
        spoilt = spoilt | (keep & bad_key & (distance < row_reach(inputs, options)[..., None])).any(-1)
    out = out.masked_fill(spoilt[..., None], float("nan"))
    total = total.masked_fill(spoilt, float("nan"))
    return Result(out.to(query.dtype), torch.stack([largest, total], dim=-1), None)


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    """Without straight-through keep and distance are constants; with it they pass gradients as sums of sigmoids do.

    A row that is NaN, or whose own gradient is not finite, has gradients of NaN and no part in those of others.
    """
    query, key, value, log_gate = inputs[:4]
    q, k, v, g, threshold, visible = _prepare(inputs, options)
    if q.numel() == 0:
        return zero_gradients(inputs, options)
    score, keep, distance, logits = attention_terms(q, k, g, visible, options.scale, threshold)
    spoilt = ~(result.row_state.isfinite().all(-1) & grad_out.isfinite().all(-1))[..., None]
    largest, total = result.row_state[..., None].unbind(-2)
    # A row that keeps nothing is compared with its largest visible score: what would its keys weigh, if it kept them?
    empty = total == 0
    logits = logits.masked_fill(~visible | spoilt, float("-inf"))
    largest = largest.where(~empty, logits.amax(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).min))
    # What each visible key weighs or would weigh; no key that is left out has a larger logit than the nearest kept one.
    all_weights = ((logits - largest).exp() / total.masked_fill(empty, 1.0)).masked_fill(spoilt, 0.0)
    weights = all_weights * keep
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
    grad_score = grad_logits
    grad_threshold = None
    if options.straight_through > 0.0:
        passed = (all_weights * (grad_weights - delta)).masked_fill(spoilt, 0.0)
        # A kept key moves itself and all keys behind it one step away; what lies behind is what is not nearer.
        behind = grad_logits.cumsum(-1) - grad_logits.sum(-1, keepdim=True)
        member = torch.sigmoid((score - threshold) / options.straight_through)
        slope = member * (1.0 - member) / options.straight_through
        through = (slope * (passed + g[..., None] * behind)).masked_fill(~visible | spoilt, 0.0)
        grad_score = grad_logits + through
        if inputs.row_threshold is not None:
            grad_threshold = -through.sum(-1).masked_fill(spoilt[..., 0], float("nan"))
            grad_threshold = grad_threshold.to(inputs.row_threshold.dtype)

    grad_query = ((grad_score @ k) * options.scale).masked_fill(spoilt, float("nan"))
    grad_key = (grad_score.transpose(-1, -2) @ q) * options.scale
    grad_value = dropped.transpose(-1, -2) @ grad_o
    # The rows of grad_logits sum to 0, so c - 1 gives the gradient that c gives.
    grad_gate = (grad_logits * distance.to(grad_logits.dtype)).sum(-1).masked_fill(spoilt[..., 0], float("nan"))

    groups = (key.shape[1], query.shape[1] // key.shape[1])
    grad_key = grad_key.unflatten(1, groups).sum(2)
    grad_value = grad_value.unflatten(1, groups).sum(2)
    return Gradients(
        grad_query.to(query.dtype),
        grad_key.to(key.dtype),
        grad_value.to(value.dtype),
        grad_gate.to(log_gate.dtype),
        grad_threshold,
    )


def zero_gradients(inputs: Inputs, options: Options) -> Gradients:
    """Of a call without rows or keys."""
    through = inputs.row_threshold if options.straight_through > 0.0 else None
    query, key, value, log_gate = map(torch.zeros_like, inputs[:4])
    return Gradients(query, key, value, log_gate, None if through is None else torch.zeros_like(through))


def _prepare(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Repeat grouped heads, promote half precision, and keep NaN and inf out of the products.

    A non-finite key counts as padding. Other non-finite numbers become 0 here, because 0 * NaN would
    carry them to rows they have no part in; `forward` marks the rows they do belong to.
    """
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    visible = visible_keys(
        query.shape[2], key.shape[2], inputs.key_mask, inputs.segment_ids, query.device, inputs.key_lengths
    )
    visible = visible & key.isfinite().all(-1).repeat_interleave(group, dim=1)[:, :, None, :]
    q, k, v, g = (x.to(dtype).nan_to_num(0.0, 0.0, 0.0) for x in inputs[:4])
    threshold = row_threshold(inputs, options, dtype).nan_to_num(0.0, 0.0, 0.0)[..., None]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), g, threshold, visible

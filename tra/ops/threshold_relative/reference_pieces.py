"""The mathematics of a walk in pieces in plain PyTorch: what a row carries from one piece of keys to the next.

Like the reference it visits every key. Shapes: B batch, H query heads, I queries, J keys of the piece, D key width,
E value width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Inputs, Options, Result
from tra.ops.threshold_relative.dropout import dropout_factor
from tra.ops.threshold_relative.reach import row_reach, row_threshold


class Place(NamedTuple):
    """Where a call's rows and keys are in the sequence."""

    row_segments: Tensor | None
    """[B, I]: documents"""
    row_starts: Tensor | None
    """[B, I]: the first key of each row's document"""
    valid_keys: Tensor | None
    """[B]: keys of the sequence that are no padding"""
    first_query: int
    all_queries: int
    first_key: int
    all_keys: int


class RowSums(NamedTuple):
    """[B, H, I] each, but for the weighted sum of values [B, H, I, E]."""

    weighted: Tensor
    total: Tensor
    """of exp(logit - largest)"""
    largest: Tensor
    """logit of a kept key"""
    largest_visible: Tensor
    """logit of any visible key, as long as none is kept"""
    counted: Tensor
    spoilt: Tensor
    done: Tensor

    @classmethod
    def at_start(cls, inputs: Inputs) -> "RowSums":
        query = inputs.query
        zeros = query.new_zeros(query.shape[:3], dtype=torch.promote_types(query.dtype, torch.float32))
        least = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        no = torch.zeros_like(zeros, dtype=torch.bool)
        weighted = zeros.new_zeros(*query.shape[:3], inputs.value.shape[3])
        return cls(weighted, zeros, least, least, zeros, no, no)


class Meeting(NamedTuple):
    """Of every row and key of the piece, [B, H, I, J], with what both were computed from."""

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor
    threshold: Tensor
    visible: Tensor
    score: Tensor
    keep: Tensor
    distance: Tensor
    logits: Tensor
    drop: Tensor | None
    ends: Tensor
    """[B, 1, I]: rows that have met their last key, [B, 1, I]"""


def meet(inputs: Inputs, options: Options, count: Tensor, place: Place) -> Meeting:
    """The equations up to the softmax, for rows that have counted so many nearer keys."""
    query, key = inputs.query, inputs.key
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    first = place.first_query + place.all_keys - place.all_queries
    row = torch.arange(first, first + query.shape[2], device=query.device)
    column = torch.arange(place.first_key, place.first_key + key.shape[2], device=query.device)
    visible = (row[:, None] >= column)[None, None]
    if inputs.key_mask is not None:
        visible = visible & inputs.key_mask[:, None, None]
    start = torch.zeros_like(row)[None]
    if place.row_segments is not None and inputs.segment_ids is not None and place.row_starts is not None:
        visible = visible & (place.row_segments[:, None, :, None] == inputs.segment_ids[:, None, None])
        start = place.row_starts
    visible = visible & key.isfinite().all(-1).repeat_interleave(group, dim=1)[:, :, None]
    q, k, v, g = (x.to(dtype).nan_to_num(0.0, 0.0, 0.0) for x in inputs[:4])
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    threshold = row_threshold(inputs, options, dtype).nan_to_num(0.0, 0.0, 0.0)[..., None]
    score = torch.einsum("bhid,bhjd->bhij", q, k) * options.scale
    keep = visible & (score > threshold)
    up_to = keep.to(dtype).cumsum(-1)
    distance = count[..., None] + up_to[..., -1:] - up_to
    drop = None
    if inputs.dropout_seed is not None:
        where = {"first_query": place.first_query, "all_queries": place.all_queries, "first_key": place.first_key}
        drop = dropout_factor(inputs.dropout_seed, score.shape, options.dropout, dtype, **where)
    ends = ((start >= place.first_key) & (row >= place.first_key))[:, None]
    return Meeting(q, k, v, g, threshold, visible, score, keep, distance, score + g[..., None] * distance, drop, ends)


def forward_piece(inputs: Inputs, options: Options, sums: RowSums, place: Place) -> RowSums:
    met = meet(inputs, options, sums.counted, place)
    logits = met.logits.masked_fill(~met.keep, -torch.inf)
    largest = torch.maximum(sums.largest, logits.amax(-1))
    weights = (logits - largest[..., None]).exp()
    fading = (sums.largest - largest).exp()
    dropped = weights if met.drop is None else weights * met.drop
    spoilt = sums.spoilt
    bad = ~inputs.value.isfinite().all(-1)
    if bad.any():
        bad = bad.repeat_interleave(inputs.query.shape[1] // inputs.key.shape[1], dim=1)[:, :, None]
        spoilt = spoilt | (met.keep & bad & (met.distance < row_reach(inputs, options)[..., None])).any(-1)
    return RowSums(
        sums.weighted * fading[..., None] + dropped @ met.value,
        sums.total * fading + weights.sum(-1),
        largest,
        torch.maximum(sums.largest_visible, met.logits.masked_fill(~met.visible, -torch.inf).amax(-1)),
        sums.counted + met.keep.sum(-1),
        spoilt,
        sums.done | met.ends,
    )


def end_of_pieces(inputs: Inputs, sums: RowSums) -> Result:
    """As the reference ends: the row state is the largest logit, and the sum of exp(logit - largest)."""
    spoilt = sums.spoilt | ~(inputs.query.isfinite().all(-1) & inputs.log_gate.isfinite())
    if inputs.row_threshold is not None:
        spoilt = spoilt | ~inputs.row_threshold.isfinite()
    out = sums.weighted / sums.total.masked_fill(sums.total == 0, 1.0)[..., None]
    out = out.masked_fill(spoilt[..., None], torch.nan)
    total = sums.total.masked_fill(spoilt, torch.nan)
    largest = sums.largest.where(sums.total > 0, sums.largest_visible)
    return Result(out.to(inputs.query.dtype), torch.stack([largest, total], -1), None)


class RowGradientSums(NamedTuple):
    grad_out: Tensor
    delta: Tensor
    largest: Tensor
    total: Tensor
    spoilt: Tensor
    counted: Tensor
    behind: Tensor
    """The sum of the logits' gradients so far: that of the keys behind, but for its sign"""
    query: Tensor
    log_gate: Tensor
    threshold: Tensor
    done: Tensor

    @classmethod
    def at_start(cls, inputs: Inputs, result: Result, grad_out: Tensor) -> "RowGradientSums":
        dtype = result.row_state.dtype
        largest, total = result.row_state.unbind(-1)
        spoilt = ~(result.row_state.isfinite().all(-1) & grad_out.isfinite().all(-1))
        grad = grad_out.to(dtype).masked_fill(spoilt[..., None], 0.0)
        delta = (grad * result.out.to(dtype)).sum(-1)
        spoilt = spoilt | ~delta.isfinite()
        zeros = torch.zeros_like(largest)
        query = torch.zeros_like(inputs.query, dtype=dtype)
        sums = (zeros, zeros, query, zeros, zeros, torch.zeros_like(spoilt))
        return cls(grad, delta.masked_fill(spoilt, 0.0), largest, total, spoilt, *sums)

    def result(self, options: Options) -> tuple[Tensor, Tensor, Tensor]:
        query = (self.query * options.scale).masked_fill(self.spoilt[..., None], torch.nan)
        log_gate, threshold = (x.masked_fill(self.spoilt, torch.nan) for x in (self.log_gate, self.threshold))
        return query, log_gate, threshold


def backward_piece(
    inputs: Inputs, options: Options, sums: RowGradientSums, place: Place
) -> tuple[RowGradientSums, Tensor, Tensor]:
    """The sums with this piece, and the gradients of its keys and values."""
    met = meet(inputs, options, sums.counted, place)
    spoilt = sums.spoilt[..., None]
    logits = met.logits.masked_fill(~met.visible | spoilt, -torch.inf)
    total = sums.total.masked_fill(sums.total == 0, 1.0)
    full = ((logits - sums.largest[..., None]).exp() / total[..., None]).masked_fill(spoilt, 0.0)
    weights = full * met.keep
    grad_weights = sums.grad_out @ met.value.transpose(-1, -2)
    dropped = weights
    if met.drop is not None:
        dropped, grad_weights = weights * met.drop, grad_weights * met.drop
    passed = full * (grad_weights - sums.delta[..., None])
    grad_logits = passed.masked_fill(~met.keep, 0.0)
    grad_score = grad_logits
    grad_threshold = sums.threshold
    if options.straight_through > 0.0:
        behind = grad_logits.cumsum(-1) - grad_logits.sum(-1, keepdim=True) - sums.behind[..., None]
        member = torch.sigmoid((met.score - met.threshold) / options.straight_through)
        slope = member * (1.0 - member) / options.straight_through
        through = (slope * (passed + met.gate[..., None] * behind)).masked_fill(~met.visible | spoilt, 0.0)
        grad_score = grad_logits + through
        grad_threshold = grad_threshold - through.sum(-1)
    groups = (inputs.key.shape[1], inputs.query.shape[1] // inputs.key.shape[1])
    grad_key = ((grad_score.transpose(-1, -2) @ met.query) * options.scale).unflatten(1, groups).sum(2)
    grad_value = (dropped.transpose(-1, -2) @ sums.grad_out).unflatten(1, groups).sum(2)
    after = sums._replace(
        counted=sums.counted + met.keep.sum(-1),
        behind=sums.behind + grad_logits.sum(-1),
        query=sums.query + grad_score @ met.key,
        log_gate=sums.log_gate + (grad_logits * met.distance).sum(-1),
        threshold=grad_threshold,
        done=sums.done | met.ends,
    )
    return after, grad_key, grad_value

"""A layer's attention on one sequence, small enough for a page.

Of a short text the weights themselves are stored. They grow with the square of the text; queries and keys do not. Of a
long one these are stored where the weights follow from them by

    softmax over the keys j <= i with s > threshold of   s + bias + log_gate_i (c - 1),   s = scale query_i . key_j,

with c the number of keys kept from j to i and a bias of the distance or of the key alone: then the page computes the
rows that are looked at. That it holds is tested by computing all weights in this way. A text whose page would be too
large is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import Attention
from tra.attention.context import Terms
from tra.ops.threshold_relative.reference import attention_terms, softmax_terms
from tra.report.colours import SMALLEST_SHOWN
from tra.report.inspection import Head, LayerOnSequence

MOST_NUMBERS = 1 << 22
"""Of queries and keys, or of weights, that a page may hold: 16 MB."""
MOST_WEIGHTS = 1 << 20
"""That are stored where the page could compute them."""
SMALL_MAP = 64
"""Cells along the edge of a small map; each shows the greatest weight of its part."""
SAME = 1e-4
"""Weights that differ by no more come from the same rule."""
OTHERS = 1e-3
"""Of the queries, as many may have a score that lies within rounding of the threshold."""


@dataclass(frozen=True)
class Place:
    """Where an array lies in the page."""

    type: str
    at: int
    """In bytes."""
    length: int
    """Its numbers."""


@dataclass(frozen=True)
class Rule:
    """What besides queries and keys the weights follow from, and how well they do."""

    error: float
    """How far off they are at most, where they follow."""
    others: int
    """Queries for which they do not: a score lies within rounding of the threshold."""
    by_distance: Tensor | None = None
    """A bias ``[H, L]`` of the distance."""
    by_key: Tensor | None = None
    """A bias ``[H, L]`` of the key."""


@dataclass(frozen=True)
class PackedLayer:
    """What a page holds of a layer; rows.js reads it."""

    heads: list[Head]
    small: Place
    gates: Place | None
    weights: Place | None = None
    """None where the page computes them."""
    query: Place | None = None
    key: Place | None = None
    scale: float | None = None
    threshold: Place | float | None = None
    log_gate: Place | None = None
    by_distance: Place | None = None
    by_key: Place | None = None
    error: float = 0.0
    others: int = 0


class Arrays:
    """Numbers one after another, each array at a multiple of 8 bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, values: Tensor) -> Place:
        values = values.detach().cpu().contiguous()
        content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
        place = Place(str(values.dtype).removeprefix("torch."), self.size, values.numel())
        padded = content + bytes(-len(content) % 8)
        self.parts.append(padded)
        self.size += len(padded)
        return place

    def add_if_any(self, values: Tensor | None) -> Place | None:
        return None if values is None else self.add(values)

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)


def check_length(attentions: Sequence[Attention], tokens: int) -> None:
    """Raise a ValueError where the queries and keys of a text are too many for a page."""
    per_token = sum((one.heads + one.kv_heads) * one.head_width for one in attentions)
    if per_token * tokens > MOST_NUMBERS:
        raise ValueError(f"text must have at most {MOST_NUMBERS // per_token:,} tokens here, got {tokens:,}")


def pack_layer(layer: LayerOnSequence, heads_in_page: int, arrays: Arrays) -> PackedLayer:
    """What a page of so many heads needs of one layer; its numbers go to ``arrays``."""
    weights, length = layer.weights, layer.weights.shape[1]
    if not weights.isfinite().all():
        number = layer.heads[0].layer
        raise ValueError(f"model must have finite attention weights, those of layer {number} are not")
    packed = PackedLayer(layer.heads, arrays.add(small_maps(weights)), arrays.add_if_any(layer.gates))
    terms = layer.terms[0] if len(layer.terms) == 1 else None
    if terms is not None:
        threshold = terms.threshold
        if isinstance(threshold, Tensor):
            threshold = threshold.float().expand(1, *terms.query.shape[1:3])
        packed = replace(
            packed,
            query=arrays.add(terms.query.float()),
            key=arrays.add(terms.key.float()),
            scale=terms.scale,
            threshold=arrays.add(threshold) if isinstance(threshold, Tensor) else threshold,
            log_gate=None if terms.log_gate is None else arrays.add(terms.log_gate.float()),
        )
    pairs = heads_in_page * length * (length + 1) // 2
    if pairs > MOST_WEIGHTS:
        rule = None if terms is None else _rule(terms, weights)
        if rule is not None:
            by_distance, by_key = map(arrays.add_if_any, (rule.by_distance, rule.by_key))
            return replace(packed, by_distance=by_distance, by_key=by_key, error=rule.error, others=rule.others)
        if pairs > MOST_NUMBERS:
            most = math.isqrt(2 * MOST_NUMBERS // heads_in_page)
            raise ValueError(
                f"text must have at most {most:,} tokens here, because the page must hold the weights "
                f"of a mechanism that they cannot be computed from queries and keys for, got {length:,}"
            )
    row, column = torch.tril_indices(length, length)
    return replace(packed, weights=arrays.add(weights[:, row, column]))


def small_maps(weights: Tensor) -> Tensor:
    """Each head's matrix ``[H, L, L]`` as at most 64 x 64 codes: 0 where all is exactly 0, then 1 to 255 by the
    logarithm of the greatest weight, as the colours are."""
    length = weights.shape[1]
    size = weights.abs()
    if length > SMALL_MAP:
        size = F.adaptive_max_pool2d(size, SMALL_MAP)
    share = (size.clamp(min=SMALLEST_SHOWN, max=1.0) / SMALLEST_SHOWN).log() / -math.log(SMALLEST_SHOWN)
    return torch.where(size == 0, 0, 1 + (254 * share).round()).to(torch.uint8)


def _rule(terms: Terms, weights: Tensor) -> Rule | None:
    """With what bias of the distance or of the key the rule above gives these weights; None where it does not."""
    heads, length = weights.shape[:2]
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    query, key = terms.query.float().double().cpu(), terms.key.float().double().cpu()
    gate = query.new_zeros(query.shape[:3]) if terms.log_gate is None else terms.log_gate.double().cpu()
    threshold = torch.as_tensor(-math.inf if terms.threshold is None else terms.threshold).double().cpu()
    threshold = threshold.expand(query.shape[:3])
    by_distance, by_key = None, None
    if terms.bias is not None:
        bias = terms.bias.double().cpu().reshape((1,) * (4 - terms.bias.dim()) + terms.bias.shape)[0]
        by_distance, by_key = _decomposed(bias.expand(-1, length, length))
        if by_distance is None and by_key is None:
            return None
    error, others = 0.0, 0
    for head, matrix in enumerate(weights):
        one = slice(head, head + 1)
        of_group = key[:, head * key.shape[1] // heads][:, None]
        limit = threshold[:, one, :, None]
        _, keep, _, logits = attention_terms(query[:, one], of_group, gate[:, one], visible, terms.scale, limit)
        if terms.bias is not None:
            logits = logits + bias[head % len(bias)]
        off = (softmax_terms(logits, keep)[0][0, 0] - matrix).abs().amax(-1)
        agrees = off <= SAME
        others += int((~agrees).sum())
        error = max(error, float((off * agrees).max()))
    return Rule(error, others, by_distance, by_key) if others <= OTHERS * heads * length else None


def _decomposed(bias: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A bias ``[H, L, L]`` as one ``[H, L]`` of the distance, or as one of the key alone; neither where it is neither.

    What is added to a whole row changes nothing. Both are read off the last row.
    """
    last = bias[:, -1]
    back = (torch.arange(last.shape[1])[:, None] - torch.arange(last.shape[1])).clamp(min=0)
    visible = torch.ones_like(back, dtype=torch.bool).tril()
    by_distance = last.flip(-1).contiguous()

    def is_all(model: Tensor) -> bool:
        rest = bias - model
        highest = rest.masked_fill(~visible, -math.inf).amax(-1)
        lowest = rest.masked_fill(~visible, math.inf).amin(-1)
        return bool((highest - lowest <= SAME * (1 + bias.abs().amax() * 1e-2)).all())

    if is_all(by_distance[:, back]):
        return by_distance, None
    return None, last if is_all(last[:, None]) else None

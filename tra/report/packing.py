"""A layer's attention on one sequence, small enough for a page that computes rows of weights itself.

A matrix of weights grows with the square of the text; queries and keys do not. Where a mechanism's weights follow from
them by

    softmax over the keys j <= i with s > threshold of   s + bias + log_gate_i (c - 1),   s = scale query_i . key_j,

with c the number of keys kept from j to i and a bias of the distance or of the key alone, these are stored. That it
holds is not taken on trust: the weights are computed from what is stored and compared with the library's. Where it does
not hold the weights themselves are stored. Either way
a weight is exactly 0 on the page where it is in the library: pairs of which the rule, computed in another order, would
say otherwise are listed. A text whose page would be too large is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import Attention, Context
from tra.attention.context import Terms
from tra.ops.threshold_relative.reference import attention_terms
from tra.report.colours import SMALLEST_SHOWN
from tra.report.inspection import Head, summarise

MOST_NUMBERS = 1 << 22
"""Of queries and keys, or of weights, that a page may hold: 16 MB."""
SMALL_MAP = 64
"""Cells along the edge of a small map; each shows the greatest weight of its part."""
SAME = 1e-4
"""Weights that differ by no more come from the same rule."""
CLOSE = 1e-9
"""A score nearer than this to the threshold may lie on its other side when summed in another order."""


class Arrays:
    """Numbers one after another, each array at a multiple of 8 bytes; what is added is known by where it lies."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, values: Tensor) -> dict[str, Any]:
        values = values.detach().cpu().contiguous()
        content = values.view(torch.uint8).numpy().tobytes() if values.numel() else b""
        place = {"type": str(values.dtype).removeprefix("torch."), "at": self.size, "length": values.numel()}
        padded = content + bytes(-len(content) % 8)
        self.parts.append(padded)
        self.size += len(padded)
        return place

    @property
    def content(self) -> bytes:
        return b"".join(self.parts)


def most_tokens_by_weights(attentions: Sequence[Attention], tokens: int) -> int:
    """Of a text whose weights must be stored in all these layers; a ValueError if the queries and keys of this many are
    too many already."""
    per_token = sum((one.heads + one.kv_heads) * one.head_width for one in attentions)
    if per_token * tokens > MOST_NUMBERS:
        raise ValueError(f"text must have at most {MOST_NUMBERS // per_token:,} tokens here, got {tokens:,}")
    return math.isqrt(2 * MOST_NUMBERS // sum(one.heads for one in attentions))


@torch.inference_mode()
def pack_layer(
    layer: int, attention: Attention, x: Tensor, most_tokens: int, arrays: Arrays
) -> tuple[list[Head], dict[str, Any]]:
    """The heads of one layer that reads ``x [1, L, width]``, and what a page needs of them; its numbers go to
    ``arrays``. A text of more than ``most_tokens`` is refused if its weights must be stored."""
    terms: list[Terms] = []
    weights = attention.weights(x, Context(terms=terms))[0].float().cpu()
    if not weights.isfinite().all():
        raise ValueError(f"model must have finite attention weights, those of layer {layer + 1} are not")
    gates = attention.gates(x)
    gates = None if gates is None else gates[0].float().cpu()
    heads = [
        summarise(layer, head, matrix, None if gates is None else gates[head]) for head, matrix in enumerate(weights)
    ]
    packed: dict[str, Any] = {
        "heads": [asdict(head) for head in heads],
        "small": arrays.add(small_maps(weights)),
        "gates": None if gates is None else arrays.add(gates),
        "weights": None,
        "error": 0.0,
    }
    rule = _Rule.of(terms[0]) if len(terms) == 1 else None
    if rule is not None:
        packed |= rule.pack(arrays)
    if rule is None or not rule.explains(weights):
        if x.shape[1] > most_tokens:
            raise ValueError(
                f"text must have at most {most_tokens:,} tokens here, because the page must hold the weights "
                f"of a mechanism that they cannot be computed from queries and keys for, got {x.shape[1]:,}"
            )
        row, column = torch.tril_indices(*weights.shape[1:])
        stored = arrays.add(weights[:, row, column])
        return heads, packed | {"weights": stored, "threshold": None, "log_gate": None}
    return heads, packed | rule.pack_exceptions(weights, arrays)


def small_maps(weights: Tensor) -> Tensor:
    """Each head's matrix ``[H, L, L]`` as at most 64 x 64 codes: 0 where all is exactly 0, then 1 to 255 by the
    logarithm of the greatest weight, as the colours are."""
    length = weights.shape[1]
    size = weights.abs()
    if length > SMALL_MAP:
        size = F.adaptive_max_pool2d(size, SMALL_MAP)
    share = (size.clamp(min=SMALLEST_SHOWN, max=1.0) / SMALLEST_SHOWN).log() / -math.log(SMALLEST_SHOWN)
    return torch.where(size == 0, 0, 1 + (254 * share).round()).to(torch.uint8)


@dataclass
class _Rule:
    """The rule above with its numbers as they are stored."""

    terms: Terms
    by_distance: Tensor | None
    by_key: Tensor | None
    has_bias: bool

    @classmethod
    def of(cls, terms: Terms) -> "_Rule":
        terms = terms._replace(
            query=terms.query[0].float().cpu(),
            key=terms.key[0].float().cpu(),
            bias=None if terms.bias is None else _of_pairs(terms.bias, terms.query.shape[2]).double().cpu(),
            log_gate=None if terms.log_gate is None else terms.log_gate[0].float().cpu(),
        )
        if isinstance(terms.threshold, Tensor):
            rows = terms.query.shape[:2]
            terms = terms._replace(threshold=terms.threshold.float().expand(1, *rows)[0].cpu())
        return cls(terms, *_decomposed(terms.bias), terms.bias is not None)

    def explains(self, weights: Tensor) -> bool:
        """Whether the rule gives the library's weights, with the numbers as they were."""
        if self.has_bias and self.by_distance is None and self.by_key is None:
            return False
        for head, matrix in enumerate(weights):
            found = self._weights(head, self._scores(head), self._kept(head, len(matrix)))
            if not bool(((found - matrix).abs() <= SAME).all()):
                return False
        return True

    def pack(self, arrays: Arrays) -> dict[str, Any]:
        threshold = self.terms.threshold
        return {
            "query": arrays.add(self.terms.query),
            "key": arrays.add(self.terms.key),
            "scale": self.terms.scale,
            "threshold": arrays.add(threshold) if isinstance(threshold, Tensor) else threshold,
            "log_gate": None if self.terms.log_gate is None else arrays.add(self.terms.log_gate),
            "by_distance": None if self.by_distance is None else arrays.add(self.by_distance),
            "by_key": None if self.by_key is None else arrays.add(self.by_key),
        }

    def pack_exceptions(self, weights: Tensor, arrays: Arrays) -> dict[str, Any]:
        """Pairs of query and key that the page would get wrong, as twice their place in the matrix, plus 1 for a key
        that is kept, or for a weight that is not 0; and how far off the page's other weights are."""
        keeps, nulls, error = [], [], 0.0
        for head, matrix in enumerate(weights):
            length = len(matrix)
            score = self._scores(head)
            kept = self._kept(head, length)
            if (threshold := self._threshold(head)) is not None:
                above = score - threshold
                wrong = ((above > 0) != kept) | (above.abs() < CLOSE)
                keeps.append(_listed(wrong.tril(), kept))
            found = self._weights(head, score, kept).float()
            nulls.append(_listed((found == 0) != (matrix == 0), matrix != 0))
            error = max(error, float((found - matrix).abs().max()))
        return {"keeps": _pack_lists(keeps, arrays), "nulls": _pack_lists(nulls, arrays), "error": error}

    def _of_group(self, head: int) -> Tensor:
        return self.terms.key[head * len(self.terms.key) // len(self.terms.query)]

    def _scores(self, head: int) -> Tensor:
        return self.terms.scale * (self.terms.query[head].double() @ self._of_group(head).double().T)

    def _kept(self, head: int, length: int) -> Tensor:
        """Which keys the library keeps for each query."""
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        threshold = self._threshold(head)
        if threshold is None:
            return visible
        query, key = self.terms.query[head], self._of_group(head)
        none = torch.zeros(1, 1, length)
        terms = attention_terms(query[None, None], key[None, None], none, visible, self.terms.scale, threshold)
        return terms.keep[0, 0]

    def _threshold(self, head: int) -> float | Tensor | None:
        """One number, or each query's ``[L, 1]``."""
        threshold = self.terms.threshold
        return threshold[head, :, None] if isinstance(threshold, Tensor) else threshold

    def _weights(self, head: int, score: Tensor, kept: Tensor) -> Tensor:
        logits = score.clone()
        length = len(score)
        back = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0)
        if self.by_distance is not None:
            logits += self.by_distance[head % len(self.by_distance)][back]
        if self.by_key is not None:
            logits += self.by_key[head % len(self.by_key)]
        if self.terms.log_gate is not None:
            nearer = kept.flip(-1).cumsum(-1).flip(-1) - kept.long()
            logits += self.terms.log_gate[head].double()[:, None] * nearer
        return logits.masked_fill(~kept, -math.inf).softmax(-1).masked_fill(~kept, 0.0)


def _of_pairs(bias: Tensor, length: int) -> Tensor:
    """A bias that broadcasts to ``[B, H, L, L]``, of the first sequence, ``[H, L, L]`` or ``[1, L, L]``."""
    return bias.reshape((1,) * (4 - bias.dim()) + bias.shape)[0].expand(-1, length, length)


def _decomposed(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """A bias ``[H, L, L]`` as one of the distance, or of the key alone; neither where it is neither.

    What is added to a whole row changes nothing. Both are read off the last row.
    """
    if bias is None:
        return None, None
    last = bias[:, -1]
    back = (torch.arange(last.shape[1])[:, None] - torch.arange(last.shape[1])).clamp(min=0)
    by_distance = last.flip(-1)
    visible = torch.ones_like(back, dtype=torch.bool).tril()
    for which, model in enumerate((by_distance[:, back], last[:, None].expand_as(bias))):
        rest = bias - model
        highest = rest.masked_fill(~visible, -math.inf).amax(-1)
        lowest = rest.masked_fill(~visible, math.inf).amin(-1)
        if bool((highest - lowest <= SAME * (1 + bias.abs().amax() * 1e-2)).all()):
            return (by_distance.contiguous(), None) if which == 0 else (None, last.contiguous())
    return None, None


def _listed(pairs: Tensor, true: Tensor) -> Tensor:
    place = pairs.flatten().nonzero()[:, 0]
    return (2 * place + true.flatten()[place]).to(torch.uint32)


def _pack_lists(lists: list[Tensor], arrays: Arrays) -> dict[str, Any] | None:
    """One array for all heads, and where each head's part begins and the last one's ends."""
    if not any(map(len, lists)):
        return None
    begins = torch.tensor([0, *map(len, lists)]).cumsum(0).tolist()
    return {"pairs": arrays.add(torch.cat(lists)), "begins": begins}

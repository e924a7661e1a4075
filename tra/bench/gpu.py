"""`tra bench --device cuda`: attention on a GPU against FlashAttention, FlexAttention and the paper's listing."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tra.bench.cases import Case, attention_case, decoding_case
from tra.bench.workloads import BOUND, Rule, papers_listing
from tra.ops import threshold_relative_attention

SHAPES = ((8, 16, 1024), (2, 16, 4096), (1, 16, 16384), (1, 8, 65536))
"""Batch, heads and tokens."""
LISTED = 4096
"""Tokens up to which the paper's listing, which holds matrices, is measured."""
BATCHES, HEADS, CACHED = (1, 16), 16, (4096, 65536)
"""Of decoding."""


def gpu_cases(device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Forward and backward with and without the early stop, and decoding."""
    # A device without a compiler of its own is a stand-in for one.
    compiled: Callable[[Rule], Rule] = (lambda rule: rule) if device == "cpu" else torch.compile
    listings = {"paper, eager": lambda: listing, "paper, compiled": lambda: compiled(listing)}
    for backward in (False, True):
        for shape in SHAPES:
            more: dict[str, Callable[[], Rule]] = {"FlexAttention": partial(flex, compiled, device, shape[2])}
            more |= listings if shape[2] <= LISTED else {}
            for how, tolerance in (("every key", 0.0), ("default tolerance", None)):
                if tolerance is None or shape[2] <= 16384:
                    yield attention_case(how, shape, ours(tolerance), backward, None, more, device=device, dtype=dtype)
    for batch in BATCHES:
        for cached in CACHED:
            yield decoding_case(batch, HEADS, cached, ours(None), device=device, dtype=dtype)


def ours(tolerance: float | None) -> Rule:
    return partial(threshold_relative_attention, tolerance=tolerance, score_bound=BOUND, impl="triton")


def flex(compiled: Callable[[Rule], Rule], device: str, length: int) -> Rule:
    """Causal FlexAttention, which is meant to be compiled."""

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return partial(compiled(flex_attention), block_mask=create_block_mask(causal, None, None, length, length, device))


def listing(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> Tensor:
    """The paper's, with products in the dtype of the queries."""
    with torch.autocast(query.device.type, query.dtype):
        return papers_listing(query, key, value, log_gate)

"""Which attention weights dropout removes: a counter-based generator, the same in every implementation.

The mask is a pure function of (seed, batch, head, query, key), so backward recomputes it, kernels need
not store it, and two implementations can be compared with dropout switched on. All arithmetic is that
of unsigned 32-bit integers, held here in int64 tensors.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
GOLDEN = 0x9E3779B9
FIRST_MULTIPLIER = 0x7FEB352D
SECOND_MULTIPLIER = 0x846CA68B


def mix(x: Tensor) -> Tensor:
    """A bijective scrambling of 32-bit words (xor-shift and multiply, twice)."""
    x = ((x ^ (x >> 16)) * FIRST_MULTIPLIER) & WORD
    x = ((x ^ (x >> 15)) * SECOND_MULTIPLIER) & WORD
    return x ^ (x >> 16)


def dropout_factor(
    seed: Tensor,
    shape: tuple[int, int, int, int] | torch.Size,
    probability: float,
    dtype: torch.dtype,
    *,
    first_query: int = 0,
    all_queries: int | None = None,
    first_key: int = 0,
) -> Tensor:
    """Return [B, H, I, J]: 0 with the given probability, else 1 / (1 - probability).

    Of some queries and keys of a longer sequence, which has `all_queries`, it returns their part of its factors.
    """
    batch, heads, queries, keys = shape
    low_seed, high_seed = seed & WORD, (seed >> 32) & WORD
    head_start = torch.arange(batch * heads, device=seed.device) * (queries if all_queries is None else all_queries)
    query = torch.arange(first_query, first_query + queries, device=seed.device)
    row = (head_start[:, None] + query).flatten() & WORD
    low = mix(mix(mix(low_seed) ^ high_seed) ^ row)[:, None]
    high = mix(mix(mix(high_seed ^ GOLDEN) ^ low_seed) ^ row)[:, None]

    key = torch.arange(first_key, first_key + keys, device=seed.device)
    x = (key * GOLDEN + low) & WORD
    x = ((x ^ (x >> 16)) * FIRST_MULTIPLIER) & WORD
    x = (((x ^ (x >> 15)) + high) * SECOND_MULTIPLIER) & WORD
    x = x ^ (x >> 16)
    survives = x >= int(probability * 2**32)
    return survives.reshape(shape).to(dtype) / (1.0 - probability)

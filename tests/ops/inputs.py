"""Inputs for operator tests."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def random_inputs(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int | None = None,
    queries: int = 17,
    keys: int | None = None,
    width: int = 8,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    keys = queries if keys is None else keys
    kv_heads = heads if kv_heads is None else kv_heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    return (
        normal(batch, heads, queries, width),
        normal(batch, kv_heads, keys, width),
        normal(batch, kv_heads, keys, width if value_width is None else value_width),
        logsigmoid(normal(batch, heads, queries)),
    )


def integer_inputs(
    batch: int = 2, heads: int = 2, length: int = 63, width: int = 16, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of small integers: every score is exact, and many are exactly 0."""
    rng = torch.Generator().manual_seed(seed)
    shape = (batch, heads, length, width)
    query, key = (torch.randint(-1, 2, shape, generator=rng).to(dtype) for _ in range(2))
    value = torch.randint(-4, 5, shape, generator=rng).to(dtype)
    return query, key, value, -torch.rand(shape[:3], generator=rng).to(dtype)

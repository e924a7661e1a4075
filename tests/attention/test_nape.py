"""NAPE against its definition in Vasylenko et al. 2025 (arXiv 2506.16640), as loops, and against ALiBi and NoPE."""

import math

import pytest
import torch
from torch.testing import assert_close

from tra.attention.alibi import LinearBiasAttention
from tra.attention.nape import HalfBiasAttention, half_slopes
from tra.attention.nope import UnpositionedAttention


@pytest.mark.parametrize(
    "heads, expected", [(1, [0]), (2, [1, 0]), (5, [1, 1 / 2, 0, 0, 0]), (8, [1, 1 / 2, 1 / 3, 1 / 4, 0, 0, 0, 0])]
)
def test_the_first_half_of_the_heads_has_slopes_one_over_h(heads: int, expected: list[float]) -> None:
    assert half_slopes(heads) == expected
    assert half_slopes(heads, "none") == [0] * heads


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = HalfBiasAttention(16, 4, 2).double().eval()
    x = torch.randn(14, 16, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for head, slope in enumerate([1.0, 0.5, 0.0, 0.0]):
        own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, shared]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, shared]
        for i in range(14):
            raw = [math.exp(query[i] @ key[j] / math.sqrt(4) + slope * (j - i)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_heads_are_those_of_alibi_with_these_slopes_and_of_no_positions() -> None:
    nape, alibi, nope = (kind(32, 4).eval() for kind in (HalfBiasAttention, LinearBiasAttention, UnpositionedAttention))
    for other in (alibi, nope):
        other.load_state_dict(nape.state_dict())
    alibi.slopes = torch.tensor([1.0, 0.5, 7.0, 7.0])
    x = torch.randn(2, 23, 32)
    weights = nape.weights(x)
    assert_close(weights[:, :2], alibi.weights(x)[:, :2])
    assert_close(weights[:, 2:], nope.weights(x)[:, 2:])

"""FIRE against Li et al. 2024 (arXiv 2310.04418): their listing, and their equation written out in loops."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tra.attention import Cache, Context
from tra.attention.fire import InterpolatedBiasAttention


def small() -> InterpolatedBiasAttention:
    attention = InterpolatedBiasAttention(8, 2, hidden=5, rate=0.3, shortest=6.0).double().eval()
    with torch.no_grad():
        attention.multiplier.fill_(1.5)
        attention.rate.fill_(-0.4)  # its size counts
    return attention


def published(attention: InterpolatedBiasAttention, x: Tensor) -> Tensor:
    """b_ij = f(psi(i - j) / psi(max(L, i))), psi(x) = log(c x + 1); positions from 0 as in the listing."""
    c, longest = 0.4, 1.5 * 6.0
    first, second = attention.mlp[0], attention.mlp[2]
    mixed = torch.zeros_like(x)
    for head, own in enumerate([slice(0, 4), slice(4, 8)]):
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(len(x)):
            raw = []
            for j in range(i + 1):
                share = math.log(c * (i - j) + 1) / (math.log(c * max(longest, i) + 1) + 1e-6)
                hidden = [max(0.0, w * share + b) for w, b in zip(first.weight[:, 0], first.bias, strict=True)]
                bias = sum(w * h for w, h in zip(second.weight[head], hidden, strict=True)) + second.bias[head]
                raw.append(math.exp(query[i] @ key[j] / math.sqrt(4) + bias))
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    return mixed @ attention.output.weight.T + attention.output.bias


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention, x = small(), torch.randn(20, 8, dtype=torch.float64)
    assert_close(attention(x[None])[0], published(attention, x))


@torch.no_grad()
def test_positions_count_the_tokens_of_a_document_that_are_no_padding() -> None:
    """With a cache too, past the position at which distances begin to be divided by it."""
    attention = small()
    first, second = torch.randn(7, 8, dtype=torch.float64), torch.randn(15, 8, dtype=torch.float64)
    padded = torch.cat([torch.randn(4, 8, dtype=torch.float64), first, second])[None]
    mask, segments = torch.arange(26)[None] >= 4, torch.tensor([[0] * 11 + [1] * 15])
    expected = torch.cat([published(attention, first), published(attention, second)])
    assert_close(attention(padded, Context(None, mask, segments))[0, 4:], expected)
    cache, parts = Cache(), []
    for piece in padded.split([13, 1, 12], dim=1):
        seen = len(cache) + piece.shape[1]
        parts.append(attention(piece, Context(cache, mask[:, :seen], segments[:, :seen])))
    assert_close(torch.cat(parts, dim=1)[0, 4:], expected)


def test_parameters_start_as_published() -> None:
    attention = InterpolatedBiasAttention(32, 4)
    assert (attention.rate.item(), attention.multiplier.item()) == (pytest.approx(0.1), 1.0)
    assert attention.shortest == 512.0
    assert [tuple(layer.weight.shape) for layer in (attention.mlp[0], attention.mlp[2])] == [(32, 1), (4, 32)]


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="hidden must be at least 1, got 0"):
        InterpolatedBiasAttention(8, 2, hidden=0)
    with pytest.raises(ValueError, match=r"rate and shortest must be positive, got 0\.0 and 512\.0"):
        InterpolatedBiasAttention(8, 2, rate=0.0)

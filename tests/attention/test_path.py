"""PaTH against the equations of Yang et al. 2025 (arXiv 2505.16381), with every transformation as a matrix.

They are those that flash-linear-attention's ``naive_path_attn`` and ``PaTHAttention`` compute, without a forget gate.
"""

import math

import pytest
import torch
from torch.testing import assert_close

from tra.attention import Context
from tra.attention.nope import UnpositionedAttention
from tra.attention.path import PathAttention

WIDTH, HEADS, LENGTH = 20, 4, 14
HEAD = WIDTH // HEADS


@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_output_equals_the_loops(kv_heads: int) -> None:
    attention = PathAttention(WIDTH, HEADS, kv_heads, rank=3, qk_norm=False).double().eval()
    x = 2.0 * torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    first, second = (layer.weight for layer in attention.direction)
    raw, mixed = x @ first.T @ second.T, torch.zeros_like(x)
    strength = 2.0 / (1.0 + (-(x @ attention.strength.weight.T + attention.strength.bias)).exp())
    for head in range(HEADS):
        shared = head // (HEADS // kv_heads)
        own, of_key = slice(HEAD * head, HEAD * head + HEAD), slice(HEAD * shared, HEAD * shared + HEAD)
        query, key, value = x @ attention.query.weight.T, x @ attention.key.weight.T, x @ attention.value.weight.T
        steps = []
        for t in range(LENGTH):
            w = sum(attention.taps[back, shared, 0] * raw[t - back, of_key] for back in range(3) if t >= back)
            w = w / (1.0 + (-w).exp())
            w = w / w.norm()
            steps.append(torch.eye(HEAD, dtype=torch.float64) - strength[t, shared] * torch.outer(w, w))
        for i in range(LENGTH):
            product, logits = torch.eye(HEAD, dtype=torch.float64), []
            for j in range(i, -1, -1):
                logits.append(float(query[i, own] @ product @ key[j, of_key]) / math.sqrt(HEAD))
                product = product @ steps[j]
            raw_weights = [math.exp(logit) for logit in logits]
            for j, weight in zip(range(i, -1, -1), raw_weights, strict=True):
                mixed[i, own] += weight / sum(raw_weights) * value[j, of_key]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_without_strength_there_are_no_positions() -> None:
    path, nope = PathAttention(WIDTH, HEADS).eval(), UnpositionedAttention(WIDTH, HEADS).eval()
    nope.load_state_dict(path.state_dict(), strict=False)
    path.strength.weight.zero_()
    path.strength.bias.fill_(-200.0)
    x = torch.randn(2, 30, WIDTH)
    assert_close(path(x), nope(x))


@torch.no_grad()
def test_three_documents_packed_with_padding_are_as_if_alone() -> None:
    """Documents shorter than the convolution, too."""
    attention = PathAttention(WIDTH, HEADS).double().eval()
    documents = [torch.randn(1, length, WIDTH, dtype=torch.float64) for length in (1, 2, 9)]
    packed = torch.cat([torch.randn(1, 2, WIDTH, dtype=torch.float64), *documents], dim=1)
    segment_ids = torch.tensor([[7] * 2 + [0] * 1 + [1] * 2 + [2] * 9])
    key_mask = torch.arange(14)[None] >= 2
    found = attention(packed, Context(key_mask=key_mask, segment_ids=segment_ids)).split([2, 1, 2, 9], dim=1)
    for document, alone in zip(found[1:], documents, strict=True):
        assert_close(document, attention(alone))


def test_wrong_rank_is_named() -> None:
    with pytest.raises(ValueError, match="rank must be at least 1, got 0"):
        PathAttention(WIDTH, HEADS, rank=0)

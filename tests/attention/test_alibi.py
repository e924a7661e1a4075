"""ALiBi against Press et al. 2022 (arXiv 2108.12409, section 3, and their code) and transformers."""

import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close
from transformers import BloomConfig
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor

from tra.attention.alibi import LinearBiasAttention


def published_slopes(heads: int) -> list[float]:
    """The recursion of the authors' get_slopes: n heads of a power of two start at 2^(-2^-(log2(n) - 3))."""
    if heads & (heads - 1) == 0:
        start = 2 ** (-(2 ** -(math.log2(heads) - 3)))
        return [start * start**head for head in range(heads)]
    lower = 1 << (heads.bit_length() - 1)
    return published_slopes(lower) + published_slopes(2 * lower)[::2][: heads - lower]


def test_slopes_of_eight_and_sixteen_heads_are_those_in_the_paper() -> None:
    assert LinearBiasAttention.head_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    sixteen = LinearBiasAttention.head_slopes(16)
    assert sixteen[0] == pytest.approx(2**-0.5, rel=1e-15)
    assert sixteen[1::2] == LinearBiasAttention.head_slopes(8)
    assert [b / a for a, b in pairwise(sixteen)] == pytest.approx([2**-0.5] * 15, rel=1e-14)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 20, 31, 32])
def test_slopes_of_any_number_of_heads_follow_the_recursion(heads: int) -> None:
    assert LinearBiasAttention.head_slopes(heads) == pytest.approx(published_slopes(heads), rel=1e-13)
    assert_close(LinearBiasAttention(2 * heads, heads).slopes, torch.tensor(published_slopes(heads)))


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    # The slopes of six heads are powers of two, so the module's float32 buffer holds them exactly.
    attention = LinearBiasAttention(24, 6).double().eval()
    x = torch.randn(12, 24, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for head, slope in enumerate([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]):
        own = slice(4 * head, 4 * head + 4)
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(12):
            # The bias is not divided by sqrt(d), as the paper notes.
            raw = [math.exp(query[i] @ key[j] / math.sqrt(4) - slope * (i - j)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_weights_of_equal_scores_fall_by_the_slope_at_every_step() -> None:
    attention = LinearBiasAttention(32, 8).double().eval()
    attention.query.weight.zero_()
    last = attention.weights(torch.randn(1, 10, 32, dtype=torch.float64))[0, :, -1]
    for head in range(8):
        assert_close(last[head].log().diff(), torch.full((9,), 2.0 ** -(head + 1), dtype=torch.float64))


@torch.no_grad()
def test_output_equals_bloom() -> None:
    """Its bias grows with the key's position, which softmax cannot tell from ours; slopes and softmax in float32."""
    ours = LinearBiasAttention(30, 6, qk_norm=False).double().eval()
    theirs = BloomAttention(BloomConfig(hidden_size=30, n_head=6), layer_idx=0).double().eval()
    by_head = [projection.weight.unflatten(0, (6, 5)) for projection in (ours.query, ours.key, ours.value)]
    theirs.query_key_value.weight.copy_(torch.stack(by_head, dim=1).flatten(0, 2))
    theirs.query_key_value.bias.zero_()
    theirs.dense.load_state_dict(ours.output.state_dict())
    x = torch.randn(2, 40, 30, dtype=torch.float64)
    bias = build_alibi_tensor(torch.ones(2, 40), 6, torch.float64)
    later = torch.full((40, 40), -math.inf).triu(1)
    assert_close(ours(x), theirs(x, torch.zeros_like(x), bias, later)[0], rtol=0, atol=1e-6)

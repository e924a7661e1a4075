"""SSMax against Nakanishi 2025 (arXiv 2501.19399) in the form of Vasylenko et al. 2025 (arXiv 2506.16640), as loops."""

import math

import pytest
import torch
from torch.testing import assert_close

from tra.attention.nape import HalfBiasAttention
from tra.attention.ssmax import ScalableSoftmaxAttention


@pytest.mark.parametrize(
    "positions, slopes, scales",
    [("nape", [1.0, 0.5, 0.0, 0.0], [None, None, 0.7, 1.9]), ("none", [0.0] * 4, [0.7, 1.9, -0.4, 1.0])],
)
@torch.no_grad()
def test_output_equals_the_loops(positions: str, slopes: list[float], scales: list[float | None]) -> None:
    attention = ScalableSoftmaxAttention(16, 4, positions=positions).double().eval()
    attention.length_scale.copy_(torch.tensor([scale for scale in scales if scale is not None], dtype=torch.float64))
    x = torch.randn(14, 16, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for head, (slope, scale) in enumerate(zip(slopes, scales, strict=True)):
        own = slice(4 * head, 4 * head + 4)
        query, key, value = (x @ part.weight.T[:, own] for part in (attention.query, attention.key, attention.value))
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        for i in range(14):
            # The power of the number of keys that the paper writes SSMax with: n^(b z).
            keys = math.e if scale is None else (i + 2) ** scale
            raw = [keys ** float(query[i] @ key[j] / 2.0) * math.exp(slope * (j - i)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_only_heads_without_positions_are_scaled() -> None:
    ssmax, nape = ScalableSoftmaxAttention(32, 4).eval(), HalfBiasAttention(32, 4).eval()
    nape.load_state_dict(ssmax.state_dict(), strict=False)
    x = torch.randn(1, 31, 32)
    found, plain = ssmax.weights(x), nape.weights(x)
    assert_close(found[:, :2], plain[:, :2])
    last, before = found[:, 2:, -1], plain[:, 2:, -1]
    assert_close(last, (before.log() * math.log(32.0)).softmax(-1), rtol=1e-4, atol=1e-6)
    assert ScalableSoftmaxAttention(30, 5).length_scale.shape == (3,)
    assert ScalableSoftmaxAttention(30, 5, positions="none").length_scale.shape == (5,)


@torch.no_grad()
def test_a_found_key_keeps_its_weight_however_many_keys_there_are() -> None:
    """The point of it: among n scores of 0, the weight of a score of 2 does not fall with n, as softmax's does."""
    attention = ScalableSoftmaxAttention(4, 1, positions="none", qk_norm=False).double().eval()
    for part in (attention.query, attention.key):
        part.weight.copy_(torch.eye(4))
    for length in (10, 100, 1000):
        x = torch.zeros(1, length, 4, dtype=torch.float64)
        x[0, 3, 0] = x[0, -1, 0] = 2.0
        weight = attention.weights(x)[0, 0, -1]  # the query finds itself and key 3, both with a score of 2
        expected = (length + 1.0) ** 2 / (2 * (length + 1.0) ** 2 + length - 2)
        assert weight[3].item() == pytest.approx(expected, rel=1e-9)

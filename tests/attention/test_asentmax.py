"""ASEntmax against the equations of Vasylenko et al. 2025 (arXiv 2506.16640), as loops over the `entmax` package."""

import math

import pytest
import torch
from entmax import entmax15
from torch import Tensor, nn
from torch.testing import assert_close

from tra.attention.asentmax import AdaptiveScaleEntmaxAttention


def at(projection: nn.Linear, x: Tensor, head: int) -> float:
    return float(projection.weight[head] @ x + projection.bias[head])


@pytest.mark.parametrize(
    "positions, slopes, scaled", [("nape", [1.0, 0.5, 0, 0, 0], 3), ("none", [0.0] * 5, 5)], ids=["nape", "none"]
)
@torch.no_grad()
def test_output_equals_the_loops(positions: str, slopes: list[float], scaled: int) -> None:
    attention = AdaptiveScaleEntmaxAttention(20, 5, positions=positions, qk_norm=False).double().eval()
    x = 3.0 * torch.randn(14, 20, dtype=torch.float64)
    mixed, weights = torch.zeros_like(x), torch.zeros(5, 14, 14, dtype=torch.float64)
    for head, slope in enumerate(slopes):
        own = slice(4 * head, 4 * head + 4)
        query, key, value = (x @ part.weight.T[:, own] for part in (attention.query, attention.key, attention.value))
        for i in range(14):
            scale, adaptive = 1.0, head - (5 - scaled)
            if adaptive >= 0:
                factor = math.log1p(math.exp(at(attention.factor, x[i], adaptive)))
                scale += factor * math.log(i + 2) ** (2.0 * math.tanh(at(attention.exponent, x[i], adaptive)))
            logits = [scale * float(query[i] @ key[j]) / 2.0 + slope * (j - i) for j in range(i + 1)]
            weights[head, i, : i + 1] = entmax15(torch.tensor(logits, dtype=torch.float64), dim=0)
            mixed[i, own] = weights[head, i] @ value
    assert_close(attention.weights(x[None])[0], weights)
    assert (weights.tril() != 0).sum() < 0.7 * (weights.tril() == 0).sum(), "scores are large enough for many zeros"
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_keys_without_weight_have_no_part_in_the_output() -> None:
    attention = AdaptiveScaleEntmaxAttention(16, 2, qk_norm=False).eval()
    x = 5.0 * torch.randn(1, 40, 16)
    weights = attention.weights(x)
    assert ((weights > 0) | (weights == 0)).all()
    assert_close(weights.sum(-1), torch.ones(1, 2, 40))
    assert (weights == 0).sum() > 1000

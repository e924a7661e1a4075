"""Stick-breaking attention against the equations of Tan et al. 2024 (arXiv 2410.17980), as loops."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tra.attention.stick_breaking import StickBreakingAttention

WIDTH, HEADS, LENGTH = 24, 4, 13
HEAD = WIDTH // HEADS


def heads(x: Tensor, projection: nn.Linear, normalise: bool) -> Tensor:
    """``[L, H, D]``, with root mean square 1 if asked for."""
    projected = (x @ projection.weight.T).reshape(len(x), -1, HEAD)
    return projected / projected.square().mean(-1, keepdim=True).sqrt() if normalise else projected


def shares(module: StickBreakingAttention, x: Tensor, head: int) -> list[list[float]]:
    """What each key j takes of the stick of query i, ``sigmoid(z_ij)``, for one head and all j < i."""
    query, key = heads(x, module.query, True)[:, head], heads(x, module.key, True)
    key = key[:, head // (HEADS // key.shape[1])]
    return [
        [1.0 / (1.0 + math.exp(-float(query[i] @ key[j]) / math.sqrt(HEAD))) for j in range(i)] for i in range(len(x))
    ]


@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_equals_the_paper_from_projections_to_output(kv_heads: int) -> None:
    module = StickBreakingAttention(WIDTH, HEADS, kv_heads).double().eval()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    weights, mixed = torch.zeros(2, HEADS, LENGTH, LENGTH, dtype=torch.float64), torch.zeros_like(x)
    for b in range(2):
        value = heads(x[b], module.value, False)
        for h in range(HEADS):
            for i, share in enumerate(shares(module, x[b], h)):
                for j in range(i):
                    left = math.prod(1.0 - share[k] for k in range(j + 1, i))
                    weights[b, h, i, j] = share[j] * left
                    mixed[b, i, h * HEAD : (h + 1) * HEAD] += share[j] * left * value[j, h // (HEADS // kv_heads)]
    assert_close(module.weights(x), weights)
    assert_close(module(x), mixed @ module.output.weight.T + module.output.bias)


@torch.no_grad()
def test_weights_sum_to_what_the_keys_take_of_the_stick() -> None:
    module = StickBreakingAttention(WIDTH, HEADS).double().eval()
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    sums = module.weights(x).sum(-1)[0]
    for h in range(HEADS):
        for i, share in enumerate(shares(module, x[0], h)):
            assert sums[h, i].item() == pytest.approx(1.0 - math.prod(1.0 - taken for taken in share), abs=1e-12)


@torch.no_grad()
def test_no_query_sees_its_own_token_and_the_first_sees_nothing() -> None:
    module = StickBreakingAttention(WIDTH, HEADS).eval()
    x = torch.randn(3, LENGTH, WIDTH)
    weights = module.weights(x)
    assert (weights.diagonal(dim1=-2, dim2=-1) == 0).all()
    assert (weights.tril(-1)[..., 1:, :].sum(-1) > 0).all()
    assert torch.equal(module(x)[:, 0], module.output.bias.expand(3, -1))


@pytest.mark.parametrize("size", [1.0, 30.0])
@torch.no_grad()
def test_single_precision_stays_right_with_many_keys_and_with_shares_of_0_and_1(size: float) -> None:
    """Scores of a thousand saturate the sigmoid; a product of many shares leaves float32's range."""
    module = StickBreakingAttention(WIDTH, HEADS, qk_norm=False).eval()
    x = size * torch.randn(1, 600, WIDTH)
    single = module(x)
    expected = module.double()(x.double())
    assert (single - expected).abs().max() < 1e-4 * expected.abs().max()

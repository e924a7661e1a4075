"""Selective attention against the listing of Leviathan et al. 2024 (arXiv 2410.02703), with RoPE in front of it."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tra.attention import Cache, Context
from tra.attention.selective import SelectiveAttention

WIDTH, HEADS, LENGTH = 32, 4, 15
HEAD = WIDTH // HEADS


def scores(module: SelectiveAttention, x: Tensor) -> Tensor:
    """``[H, L, L]``: RoPE turns queries and keys, as complex numbers, by position times frequency."""
    position = torch.arange(len(x), dtype=torch.float64)[:, None]
    frequency = 500_000.0 ** (-torch.arange(HEAD // 2, dtype=torch.float64) / (HEAD // 2))
    phase = torch.polar(torch.ones_like(position * frequency), position * frequency)

    def heads(projection: nn.Linear) -> Tensor:
        projected = (x @ projection.weight.T).reshape(len(x), -1, HEAD).transpose(0, 1)
        projected = projected / projected.square().mean(-1, keepdim=True).sqrt()
        numbers = torch.complex(projected[..., : HEAD // 2], projected[..., HEAD // 2 :]) * phase
        return numbers.repeat_interleave(HEADS // len(numbers), dim=0)

    return torch.einsum("hnd,hmd->hnm", heads(module.query).conj(), heads(module.key)).real / math.sqrt(HEAD)


def output(module: SelectiveAttention, x: Tensor, weights: Tensor) -> Tensor:
    value = (x @ module.value.weight.T).reshape(len(x), -1, HEAD).transpose(0, 1)
    mixed = weights @ value.repeat_interleave(HEADS // len(value), dim=0)
    return mixed.transpose(0, 1).flatten(1) @ module.output.weight.T + module.output.bias


@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_equals_the_listing_from_projections_to_output(kv_heads: int) -> None:
    module = SelectiveAttention(WIDTH, HEADS, kv_heads).double().eval()
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    logits = scores(module, x).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    S = logits[0].relu()
    S[:, 0] = 0
    S = (1 - torch.eye(LENGTH)) * S
    S = S.roll(1, -2)
    S[0, :] = 0
    F = S.cumsum(-2)
    assert F.max() > 1
    weights = (logits - F).softmax(-1)
    assert_close(module.weights(x[None])[0], weights)
    assert_close(module(x[None])[0], output(module, x, weights))


@torch.no_grad()
def test_packed_documents_equal_loops_that_spare_the_first_token_of_each() -> None:
    module = SelectiveAttention(WIDTH, HEADS).double().eval()
    documents = [7] * 5 + [3] + [4] * 6 + [9] * 3
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    score, weights = scores(module, x).tolist(), torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64)
    for i, document in enumerate(documents):
        first = documents.index(document)
        masked = {
            j: 0.0 if j == first else sum(max(score[0][between][j], 0.0) for between in range(j + 1, i))
            for j in range(first, i + 1)
        }
        for h in range(HEADS):
            terms = {j: math.exp(score[h][i][j] - masked[j]) for j in masked}
            for j, term in terms.items():
                weights[h, i, j] = term / sum(terms.values())
    segment_ids = torch.tensor([documents])
    assert_close(module.weights(x[None], Context(segment_ids=segment_ids))[0], weights)
    assert_close(module(x[None], Context(segment_ids=segment_ids))[0], output(module, x, weights))
    cache = Cache()
    pieces = [
        module(x[None, start:stop], Context(cache, segment_ids=segment_ids[:, :stop]))
        for start, stop in ((0, 4), (4, 9), (9, 10), (10, 15))
    ]
    assert_close(torch.cat(pieces, dim=1)[0], output(module, x, weights))


@torch.no_grad()
def test_padding_masks_nothing() -> None:
    module = SelectiveAttention(WIDTH, HEADS).double().eval()
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.float64)
    key_mask = torch.ones(1, LENGTH, dtype=torch.bool)
    key_mask[:, 6] = False
    before = module(x, Context(key_mask=key_mask))
    x[:, 6] = torch.randn(WIDTH, dtype=torch.float64)
    assert_close(module(x, Context(key_mask=key_mask))[key_mask], before[key_mask])

"""CoPE against the equations and the listing of Golovneva et al. 2024 (arXiv 2405.18719) written out in loops."""

import math

import torch
from torch import Tensor
from torch.testing import assert_close

from tra.attention import Context
from tra.attention.cope import ContextualPositionAttention

LAST = 4


def published(attention: ContextualPositionAttention, x: Tensor) -> tuple[Tensor, list[float]]:
    """Two heads of width 4 on ``[L, 8]``: the output, and every position before it is limited."""
    mixed, positions = torch.zeros_like(x), []
    for own in (slice(0, 4), slice(4, 8)):
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(len(x)):
            score = [float(query[i] @ key[j]) / math.sqrt(4) for j in range(i + 1)]
            gate = [1 / (1 + math.exp(-s)) for s in score]
            raw = []
            for j in range(i + 1):
                positions.append(sum(gate[k] for k in range(j, i + 1)))
                p = min(positions[-1], LAST)
                floor, ceil = math.floor(p), math.ceil(p)
                at_floor, at_ceil = (float(query[i] @ attention.embedding[:, whole]) for whole in (floor, ceil))
                # The listing adds it beside the scaled score, itself not divided by sqrt(d).
                raw.append(math.exp(score[j] + (p - floor) * at_ceil + (1 - (p - floor)) * at_floor))
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    return mixed @ attention.output.weight.T + attention.output.bias, positions


def build() -> ContextualPositionAttention:
    attention = ContextualPositionAttention(8, 2, positions=LAST + 1).double().eval()
    torch.nn.init.normal_(attention.embedding)
    return attention


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention, x = build(), torch.randn(16, 8, dtype=torch.float64)
    expected, positions = published(attention, x)
    assert min(positions) < 1
    assert sum(p > LAST for p in positions) > 20
    assert_close(attention(x[None])[0], expected)


@torch.no_grad()
def test_padding_amid_the_tokens_is_not_counted() -> None:
    attention, x = build(), torch.randn(16, 8, dtype=torch.float64)
    mask = torch.ones(16, dtype=torch.bool)
    mask[[0, 5, 6, 12]] = False
    assert_close(attention(x[None], Context(key_mask=mask[None]))[0, mask], published(attention, x[mask])[0])


@torch.no_grad()
def test_open_gates_count_tokens() -> None:
    """With every gate 1 the position of key j seen from query i is i - j + 1: ordinary relative positions."""
    attention = ContextualPositionAttention(4, 1, positions=LAST + 1, qk_norm=False).double().eval()
    for weight in (attention.query.weight, attention.key.weight):
        weight.copy_(torch.diag(torch.tensor([10.0, 0, 0, 0], dtype=torch.float64)))
    attention.embedding[0] = torch.tensor([5.0, 0.1, 0.2, 0.3, 0.4]) / 10
    last = attention.weights(torch.ones(1, 6, 4, dtype=torch.float64))[0, 0, -1]
    assert_close(last, torch.tensor([0.4, 0.4, 0.4, 0.3, 0.2, 0.1], dtype=torch.float64).softmax(0))

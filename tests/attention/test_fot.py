"""FoT against the equations of Lin et al. 2025 (arXiv 2503.02130) written out in loops."""

import math
from copy import deepcopy

import torch
from torch import Tensor
from torch.testing import assert_close

from tra.attention import Context
from tra.attention.alibi import LinearBiasAttention
from tra.attention.fot import ForgettingAttention


def published(attention: ForgettingAttention, x: Tensor) -> Tensor:
    """Two heads of width 4 on ``[L, 8]``: exp(q_i . k_j / sqrt(d)) times the product of f_l over j < l <= i."""
    mixed = torch.zeros_like(x)
    for head, own in enumerate([slice(0, 4), slice(4, 8)]):
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        forget = [1 / (1 + math.exp(-(attention.gate.weight[head] @ token + attention.gate.bias[head]))) for token in x]
        for i in range(len(x)):
            raw = [math.prod(forget[j + 1 : i + 1]) * math.exp(query[i] @ key[j] / math.sqrt(4)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    return mixed @ attention.output.weight.T + attention.output.bias


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = ForgettingAttention(8, 2).double().eval()
    x = torch.randn(13, 8, dtype=torch.float64)
    assert_close(attention(x[None])[0], published(attention, x))


@torch.no_grad()
def test_padding_amid_the_tokens_forgets_nothing() -> None:
    attention = ForgettingAttention(8, 2).double().eval()
    x = torch.randn(13, 8, dtype=torch.float64)
    mask = torch.ones(13, dtype=torch.bool)
    mask[[0, 4, 5, 10]] = False
    assert_close(attention(x[None], Context(key_mask=mask[None]))[0, mask], published(attention, x[mask]))


@torch.no_grad()
def test_gates_that_ignore_the_input_make_it_alibi() -> None:
    """As the authors remark: ALiBi is forgetting by a constant factor exp(-slope) for each head."""
    forgetting, alibi = ForgettingAttention(8, 2).double().eval(), LinearBiasAttention(8, 2).double().eval()
    alibi.load_state_dict({name: w for name, w in forgetting.state_dict().items() if not name.startswith("gate")})
    forgetting.gate.weight.zero_()
    forgetting.gate.bias.copy_(-torch.tensor([2.0**-4, 2.0**-8], dtype=torch.float64).expm1().log())
    x = torch.randn(1, 13, 8, dtype=torch.float64)
    assert_close(forgetting(x), alibi(x))


@torch.no_grad()
def test_single_precision_holds_after_20_000_tokens() -> None:
    single = ForgettingAttention(4, 1).eval()
    x = torch.randn(1, 20_000, 4)
    recent = torch.eye(20_000, 8).flip(0)[None, None]  # As values: the last eight tokens, told apart.
    weights = []
    for attention, tokens in ((single, x), (deepcopy(single).double(), x.double())):
        query, key = (p(tokens)[:, None] for p in (attention.query, attention.key))
        weights.append(attention.attend(tokens, query[:, :, -1:], key, recent.to(tokens), Context()))
    assert (weights[1] > 1e-4).all()
    assert_close(weights[0].double(), weights[1], rtol=1e-4, atol=0)

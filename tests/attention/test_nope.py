"""NoPE against loops, transformers, and Theorem 1 of Kazemnejad et al. 2023 (arXiv 2305.19466)."""

import math

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import SmolLM3Config
from transformers.models.smollm3.modeling_smollm3 import SmolLM3Attention

from tra.attention import Context
from tra.attention.nope import UnpositionedAttention


def published(attention: UnpositionedAttention, x: Tensor) -> Tensor:
    """Four heads of width 4 on ``[L, 16]``; two heads share each key and value."""
    mixed = torch.zeros_like(x)
    for head in range(4):
        own, shared = slice(4 * head, 4 * head + 4), slice(4 * (head // 2), 4 * (head // 2) + 4)
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, shared]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, shared]
        for i in range(len(x)):
            raw = [math.exp(query[i] @ key[j] / math.sqrt(4)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    return mixed @ attention.output.weight.T + attention.output.bias


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = UnpositionedAttention(16, 4, 2).double().eval()
    x = torch.randn(11, 16, dtype=torch.float64)
    assert_close(attention(x[None])[0], published(attention, x))


@torch.no_grad()
def test_padding_amid_the_tokens_is_as_if_it_were_not_there() -> None:
    attention = UnpositionedAttention(16, 4, 2).double().eval()
    x = torch.randn(11, 16, dtype=torch.float64)
    mask = torch.ones(11, dtype=torch.bool)
    mask[[0, 4, 5, 9]] = False
    assert_close(attention(x[None], Context(key_mask=mask[None]))[0, mask], published(attention, x[mask]))


@torch.no_grad()
def test_indifferent_queries_give_each_token_its_share() -> None:
    """How NoPE can count: a value held by the first token alone reaches token t as 1 / t."""
    attention = UnpositionedAttention(16, 4).double().eval()
    attention.query.weight.zero_()
    weights = attention.weights(torch.randn(1, 50, 16, dtype=torch.float64))
    assert_close(weights[0, 2, :, 0], 1 / torch.arange(1, 51, dtype=torch.float64))


@torch.no_grad()
def test_order_of_earlier_tokens_is_invisible() -> None:
    attention = UnpositionedAttention(16, 4).double().eval()
    x = torch.randn(1, 11, 16, dtype=torch.float64)
    shuffled = torch.cat([x[:, torch.randperm(10)], x[:, 10:]], dim=1)
    assert_close(attention(shuffled)[:, 10], attention(x)[:, 10])


@torch.no_grad()
def test_output_equals_smollm3() -> None:
    """Every fourth of its layers has no positions."""
    ours = UnpositionedAttention(32, 4, 2, qk_norm=False).double().eval()
    config = SmolLM3Config(hidden_size=32, num_attention_heads=4, num_key_value_heads=2, attn_implementation="sdpa")
    theirs = SmolLM3Attention(config, layer_idx=3).double().eval()
    theirs.q_proj.weight, theirs.k_proj.weight = ours.query.weight, ours.key.weight
    theirs.v_proj.weight, theirs.o_proj.weight = ours.value.weight, ours.output.weight
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    assert_close(ours(x), theirs(x, position_embeddings=None, attention_mask=None)[0] + ours.output.bias)

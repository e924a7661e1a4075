"""Sinusoidal positions against the formulas of Vaswani et al. 2017 (arXiv 1706.03762, section 3.5) and libraries."""

import math

import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers.models.ctrl.modeling_ctrl import positional_encoding

from tra.attention import Context
from tra.attention.sinusoidal import SinusoidalAttention, sinusoids


def encoding(position: int, width: int) -> Tensor:
    encoded = torch.empty(width, dtype=torch.float64)
    for i in range(width // 2):
        encoded[2 * i] = math.sin(position / 10_000 ** (2 * i / width))
        encoded[2 * i + 1] = math.cos(position / 10_000 ** (2 * i / width))
    return encoded


def published(attention: SinusoidalAttention, x: Tensor) -> Tensor:
    """Two heads of width 6 on one document ``[L, 12]``: positions enter queries and keys, not values."""
    located = torch.stack([token + encoding(position, 12) for position, token in enumerate(x)])
    mixed = torch.zeros_like(x)
    for own in (slice(0, 6), slice(6, 12)):
        query, key = (located @ attention.query.weight.T)[:, own], (located @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(len(x)):
            raw = [math.exp(query[i] @ key[j] / math.sqrt(6)) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    return mixed @ attention.output.weight.T + attention.output.bias


def test_table_equals_the_formulas_near_and_far() -> None:
    for start in (0, 7, 10**6):
        table = sinusoids(start, start + 5, 12, 10_000.0)
        assert_close(table, torch.stack([encoding(start + row, 12) for row in range(5)]), rtol=0, atol=1e-9)


def test_a_fixed_offset_is_a_linear_map_of_the_encoding() -> None:
    """The authors' reason for the form: the product of two encodings depends on the offset between them only."""
    table = sinusoids(0, 60, 12, 10_000.0)
    assert_close((table[13:] * table[:-13]).sum(-1), (table[13] @ table[0]).expand(47))


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = SinusoidalAttention(12, 2).double().eval()
    x = torch.randn(11, 12, dtype=torch.float64)
    assert_close(attention(x[None])[0], published(attention, x))


@torch.no_grad()
def test_positions_restart_in_packed_documents_and_skip_padding() -> None:
    attention = SinusoidalAttention(12, 2).double().eval()
    x = torch.randn(14, 12, dtype=torch.float64)
    documents = torch.tensor([0] * 6 + [1] * 8)
    mask = torch.ones(14, dtype=torch.bool)
    mask[[0, 3, 8, 9, 13]] = False
    out = attention(x[None], Context(key_mask=mask[None], segment_ids=documents[None]))[0]
    for document in (0, 1):
        kept = mask & (documents == document)
        assert_close(out[kept], published(attention, x[kept]))


@torch.no_grad()
def test_output_equals_the_positions_of_ctrl_through_the_attention_of_torch() -> None:
    """CTRL has all sines before all cosines, and adds them to the embedding; the table is what can be compared."""
    ours = SinusoidalAttention(32, 4, qk_norm=False).double().eval()
    theirs = nn.MultiheadAttention(32, 4, batch_first=True, dtype=torch.float64).eval()
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    located = x + positional_encoding(40, 32, torch.float64).unflatten(1, (2, 16)).mT.flatten(1)
    later = torch.ones(40, 40, dtype=torch.bool).triu(1)
    assert_close(ours(x), theirs(located, located, x, attn_mask=later, need_weights=False)[0])

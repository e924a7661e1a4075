"""Differential attention against the equations of Ye et al. 2024 (arXiv 2410.05258), as loops, and transformers."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers import DiffLlamaConfig
from transformers.models.diffllama.modeling_diffllama import (
    DiffLlamaAttention,
    DiffLlamaRotaryEmbedding,
    lambda_init_fn,
)

from tra.attention.differential import DifferentialAttention

WIDTH, HEADS, LENGTH, THETA = 32, 4, 13, 500_000.0
HEAD, HALF = WIDTH // HEADS, WIDTH // HEADS // 2


def heads(x: torch.Tensor, projection: nn.Linear, normalise: bool) -> list[list[list[float]]]:
    """``[L][H][D]``, with root mean square 1 if asked for."""
    projected = (x @ projection.weight.T).reshape(len(x), -1, HEAD)
    if normalise:
        projected = projected / projected.square().mean(-1, keepdim=True).sqrt()
    return projected.tolist()


def turned(vector: list[float], position: int) -> list[float]:
    """RoPE: the pairs (x_i, x_{i + D/2}) as complex numbers, times a phase."""
    pairs = len(vector) // 2
    phases = (position * THETA ** (-pair / pairs) for pair in range(pairs))
    numbers = [
        complex(vector[pair], vector[pair + pairs]) * complex(math.cos(phase), math.sin(phase))
        for pair, phase in enumerate(phases)
    ]
    return [number.real for number in numbers] + [number.imag for number in numbers]


def dot(x: list[float], y: list[float]) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def softmax(logits: list[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(logit) / total for logit in logits]


def build(**options: object) -> DifferentialAttention:
    """Far from its start: there the vectors of lambda are small, and the scale of the norm is 1."""
    module = DifferentialAttention(WIDTH, HEADS, **options).double().eval()
    module.lambdas.data = 0.5 * torch.randn(2, 2, HALF, dtype=torch.float64)
    module.norm.weight.data = torch.randn(HEAD, dtype=torch.float64)
    return module


def factor(module: DifferentialAttention, start: float) -> float:
    (query1, key1), (query2, key2) = module.lambdas.tolist()
    return math.exp(dot(query1, key1)) - math.exp(dot(query2, key2)) + start


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("start", [0.8, 0.5])
@torch.no_grad()
def test_equals_the_paper_from_projections_to_output(kv_heads: int, start: float) -> None:
    module = build(kv_heads=kv_heads, lambda_start=start)
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    query, key, value = (
        heads(x, projection, normalise)
        for projection, normalise in ((module.query, True), (module.key, True), (module.value, False))
    )
    scale, rows = module.norm.weight.tolist(), torch.zeros_like(x)
    for h in range(HEADS):
        group = h // (HEADS // kv_heads)
        for i in range(LENGTH):
            attentions = []
            for half in (slice(0, HALF), slice(HALF, HEAD)):
                q = turned(query[i][h][half], i)
                keys = [turned(key[j][group][half], j) for j in range(i + 1)]
                attentions.append(softmax([dot(q, k) / math.sqrt(HALF) for k in keys]))
            weights = [one - factor(module, start) * two for one, two in zip(*attentions, strict=True)]
            mixed = [sum(weights[j] * value[j][group][d] for j in range(i + 1)) for d in range(HEAD)]
            size = math.sqrt(sum(number**2 for number in mixed) / HEAD + 1e-5)
            for d in range(HEAD):
                rows[i, h * HEAD + d] = (1.0 - start) * scale[d] * mixed[d] / size
    assert_close(module(x[None])[0], rows @ module.output.weight.T + module.output.bias)


@torch.no_grad()
def test_weights_sum_to_one_less_lambda_and_may_be_negative() -> None:
    module = build(lambda_start=0.8)
    weights = module.weights(torch.randn(2, LENGTH, WIDTH, dtype=torch.float64))
    assert_close(weights.sum(-1), torch.full_like(weights[..., 0], 1.0 - factor(module, 0.8)))
    assert weights.min() < 0


def test_starts_as_the_authors_do() -> None:
    module = DifferentialAttention(512, 1)
    assert module.lambdas.shape == (2, 2, 256)
    assert module.lambdas.std().item() == pytest.approx(0.1, rel=0.1)
    assert module.norm.eps == 1e-5
    assert (module.norm.weight == 1).all()


@pytest.mark.parametrize("layer, published", [(0, 0.2), (1, 0.35551), (3, 0.55606), (27, 0.79982)])
def test_lambda_starts_by_depth_as_published(layer: int, published: float) -> None:
    """0.8 - 0.6 exp(-0.3 (l - 1)), the paper's l counted from 1; to five digits, and DiffLlama's."""
    module = DifferentialAttention(WIDTH, HEADS, layer=layer)
    assert module.lambda_start == pytest.approx(published, abs=5e-6)
    assert module.lambda_start == lambda_init_fn(layer)
    assert DifferentialAttention(WIDTH, HEADS, layer=layer, lambda_start=0.8).lambda_start == 0.8


def test_wrong_argument_is_named() -> None:
    with pytest.raises(ValueError, match=r"width // heads must be a multiple of 4 for RoPE, got 6"):
        DifferentialAttention(24, 4)
    with pytest.raises(ValueError, match=r"lambda_start must be in \[0, 1\), got 1.0"):
        DifferentialAttention(WIDTH, HEADS, lambda_start=1.0)


@torch.no_grad()
def test_output_equals_diffllama() -> None:
    """Its heads are our halves, all first ones before all second ones; angles and lambda in float32.

    As in the paper, lambda's start depends on the layer; unlike the authors' code, its norm has no learned scale.
    """
    ours = build(kv_heads=2, qk_norm=False, layer=2)
    ours.norm.weight.fill_(1.0)
    config = DiffLlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=HALF,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        attn_implementation="sdpa",
    )
    theirs = DiffLlamaAttention(config, layer_idx=2).double().eval()
    pairs = (theirs.q_proj, ours.query), (theirs.k_proj, ours.key), (theirs.v_proj, ours.value)
    for their_projection, projection in pairs:
        their_projection.weight.copy_(projection.weight.unflatten(0, (-1, 2, HALF)).transpose(0, 1).flatten(0, 2))
    theirs.o_proj.weight = ours.output.weight
    (theirs.lambda_q1.data, theirs.lambda_k1.data), (theirs.lambda_q2.data, theirs.lambda_k2.data) = ours.lambdas
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    turned = DiffLlamaRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
    assert_close(ours(x), theirs(x, turned)[0] + ours.output.bias, rtol=0, atol=1e-5)

"""RoPE against its definition, complex numbers turned by position times frequency, and against transformers."""

import math

import torch
from torch.testing import assert_close
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from tra.attention.rope import RotaryAttention, frequencies, rotate, rotation


def test_rotation_is_multiplication_by_a_complex_phase() -> None:
    x = torch.randn(3, 11, 8, dtype=torch.float64)
    turned = rotate(x, *rotation(5, 16, frequencies(8, 500_000.0)))
    for position in range(11):
        for pair in range(4):
            phase = torch.polar(
                torch.tensor(1.0, dtype=torch.float64),
                torch.tensor((position + 5) / 500_000.0 ** (2 * pair / 8), dtype=torch.float64),
            )
            expected = torch.complex(x[:, position, pair], x[:, position, pair + 4]) * phase
            assert_close(turned[:, position, pair], expected.real)
            assert_close(turned[:, position, pair + 4], expected.imag)


@torch.no_grad()
def test_output_equals_softmax_over_rotated_scores() -> None:
    attention = RotaryAttention(16, 2).double().eval()
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    weights = attention.weights(x)
    query, key = (
        projection(x).unflatten(-1, (2, 8)) / projection(x).unflatten(-1, (2, 8)).square().mean(-1, True).sqrt()
        for projection in (attention.query, attention.key)
    )
    for head in range(2):
        for i in range(9):
            scores = []
            for j in range(i + 1):
                # Turning both by their positions is turning the key by minus the distance.
                score = 0.0
                for pair in range(4):
                    angle = torch.tensor((j - i) / 500_000.0 ** (pair / 4), dtype=torch.float64)
                    q = torch.complex(query[0, i, head, pair], query[0, i, head, pair + 4])
                    k = torch.complex(key[0, j, head, pair], key[0, j, head, pair + 4])
                    score = score + (q.conj() * k * torch.polar(torch.ones_like(angle), angle)).real
                scores.append(score / 8**0.5)
            assert_close(weights[0, head, i, : i + 1], torch.stack(scores).softmax(0), rtol=1e-6, atol=1e-6)


def test_angles_stay_exact_at_far_positions() -> None:
    cosine, sine = rotation(10**7, 10**7 + 1, frequencies(2, 500_000.0))
    assert cosine.item() == math.cos(10**7)
    assert sine.item() == math.sin(10**7)


@torch.no_grad()
def test_output_equals_qwen3() -> None:
    """It normalises queries and keys as we do, and halves a head as we do; norm and angles in float32."""
    ours = RotaryAttention(32, 4, 2).double().eval()
    config = Qwen3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=0.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        attn_implementation="sdpa",
    )
    theirs = Qwen3Attention(config, layer_idx=0).double().eval()
    theirs.q_proj.weight, theirs.k_proj.weight = ours.query.weight, ours.key.weight
    theirs.v_proj.weight, theirs.o_proj.weight = ours.value.weight, ours.output.weight
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    turned = Qwen3RotaryEmbedding(config)(x, torch.arange(40)[None])
    assert_close(ours(x), theirs(x, turned, attention_mask=None)[0] + ours.output.bias, rtol=0, atol=1e-6)

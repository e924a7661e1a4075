"""RoPE against its definition, complex numbers turned by position times frequency, and against transformers."""

import math

import pytest
import torch
from torch.testing import assert_close
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from tra.attention.differential import DifferentialAttention
from tra.attention.rope import RotaryAttention, frequencies, rotate, rotation
from tra.attention.selective import SelectiveAttention


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


def their_frequencies(kind: str, width: int, theta: float, length: int | None = None, **more: object) -> tuple:
    """In float32, from transformers' own functions."""
    config = Qwen3Config(
        hidden_size=4 * width,
        num_attention_heads=4,
        head_dim=width,
        max_position_embeddings=more.pop("max_position_embeddings", 2048),
        rope_parameters={"rope_type": kind, "rope_theta": theta, **more},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


@pytest.mark.parametrize("width", [6, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("factor", [2.0, 7.5])
def test_linear_scaling_is_that_of_transformers(width: int, theta: float, factor: float) -> None:
    theirs, size = their_frequencies("linear", width, theta, factor=factor)
    ours = RotaryAttention(width, 1, theta=theta, scaling="linear", factor=factor)
    assert_close(ours.frequency, theirs.double(), rtol=1e-5, atol=0)
    assert ours.rotation_size == size == 1.0


@pytest.mark.parametrize("width", [6, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("factor", [2.0, 7.5])
def test_ntk_scaling_is_the_dynamic_one_of_transformers_at_a_fixed_length(
    width: int, theta: float, factor: float
) -> None:
    theirs, size = their_frequencies("dynamic", width, theta, length=int(2048 * factor), factor=1.0)
    ours = RotaryAttention(width, 1, theta=theta, scaling="ntk", factor=factor)
    assert_close(ours.frequency, theirs.double(), rtol=1e-5, atol=0)
    assert ours.rotation_size == size == 1.0
    plain = frequencies(width, theta)
    assert_close(plain / ours.frequency, factor ** (torch.arange(width // 2) / (width // 2 - 1)).double())


@pytest.mark.parametrize("width", [6, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("trained_length", [16, 256, 4096])
@pytest.mark.parametrize("factor", [2.0, 7.5])
def test_yarn_is_that_of_transformers(width: int, theta: float, trained_length: int, factor: float) -> None:
    theirs, size = their_frequencies(
        "yarn",
        width,
        theta,
        factor=factor,
        original_max_position_embeddings=trained_length,
        max_position_embeddings=int(factor * trained_length),
    )
    ours = RotaryAttention(width, 1, theta=theta, scaling="yarn", factor=factor, trained_length=trained_length)
    assert_close(ours.frequency, theirs.double(), rtol=1e-5, atol=0)
    assert ours.rotation_size == size == 0.1 * math.log(factor) + 1.0


@pytest.mark.parametrize("mechanism", [RotaryAttention, SelectiveAttention, DifferentialAttention])
@torch.no_grad()
def test_linear_scaling_is_reading_between_positions(mechanism: type[RotaryAttention]) -> None:
    """Slowed down by 2, the even positions of a sequence are the positions of one half as long."""
    plain, slowed = mechanism(16, 2).double().eval(), mechanism(16, 2, scaling="linear", factor=2).double().eval()
    position = torch.arange(0, 10, dtype=torch.float64)[:, None]
    assert_close((2 * position * slowed.frequency).cos(), (position * plain.frequency).cos())
    slowed.load_state_dict(plain.state_dict())
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    assert not torch.equal(plain(x), slowed(x))
    slowed.frequency = 2 * slowed.frequency
    assert_close(slowed(x), plain(x))


@torch.no_grad()
def test_output_under_yarn_equals_qwen3() -> None:
    ours = RotaryAttention(32, 4, 2, scaling="yarn", factor=4.0, trained_length=10, theta=100.0).double().eval()
    config = Qwen3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=0.0,
        max_position_embeddings=40,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 10,
        },
        attn_implementation="sdpa",
    )
    theirs = Qwen3Attention(config, layer_idx=0).double().eval()
    theirs.q_proj.weight, theirs.k_proj.weight = ours.query.weight, ours.key.weight
    theirs.v_proj.weight, theirs.o_proj.weight = ours.value.weight, ours.output.weight
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    turned = Qwen3RotaryEmbedding(config)(x, torch.arange(40)[None])
    assert_close(ours(x), theirs(x, turned, attention_mask=None)[0] + ours.output.bias, rtol=0, atol=1e-6)


def test_frequencies_stay_in_double_precision_on_the_cpu_wherever_the_layer_is() -> None:
    with torch.device("meta"):
        attention = RotaryAttention(16, 2)
    assert attention.query.weight.is_meta
    for moved in (attention, RotaryAttention(16, 2).half(), RotaryAttention(16, 2).to("meta")):
        assert torch.equal(moved.frequency, frequencies(8, 500_000.0))
    assert "frequency" not in attention.state_dict()

"""The module around the operator."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.ops.oracle import loop_attention
from tra import ThresholdRelativeAttention
from tra.attention import Cache, Context, threshold_relative


@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_equals_the_paper_from_projections_to_output(kv_heads: int) -> None:
    module = ThresholdRelativeAttention(24, 4, kv_heads).double()
    x = torch.randn(2, 13, 24, dtype=torch.float64)

    def heads(weight: torch.Tensor, count: int, normalise: bool) -> torch.Tensor:
        projected = (x @ weight.T).reshape(2, 13, count, 6).permute(0, 2, 1, 3)
        return projected / projected.square().mean(-1, keepdim=True).sqrt() if normalise else projected

    gate = torch.sigmoid(x @ module.gate.weight.T + module.gate.bias).log().permute(0, 2, 1)
    mixed = loop_attention(
        heads(module.query.weight, 4, True),
        heads(module.key.weight, kv_heads, True),
        heads(module.value.weight, kv_heads, False),
        gate,
    )
    expected = mixed.permute(0, 2, 1, 3).reshape(2, 13, 24) @ module.output.weight.T + module.output.bias
    assert_close(module(x), expected)


def test_projections_have_the_biases_of_the_paper() -> None:
    module = ThresholdRelativeAttention(64, 4)
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    assert shapes == {
        "query.weight": (64, 64),
        "key.weight": (64, 64),
        "value.weight": (64, 64),
        "output.weight": (64, 64),
        "output.bias": (64,),
        "gate.weight": (4, 64),
        "gate.bias": (4,),
    }


@torch.no_grad()
def test_scores_respect_the_bound_the_module_vouches_for() -> None:
    module = ThresholdRelativeAttention(64, 4)
    x = torch.randn(4, 50, 64) * 100
    query, key, _ = module.project(x, Context())
    assert (query @ key.mT / 4).abs().max() <= math.sqrt(16) * (1 + 1e-6)


@torch.no_grad()
def test_threshold_decides_who_is_kept() -> None:
    x = torch.randn(1, 40, 32)
    kept = [
        (ThresholdRelativeAttention(32, 4, threshold=threshold).eval().weights(x) > 0).float().mean().item()
        for threshold in (-100.0, 0.0, 100.0)
    ]
    assert kept[0] == pytest.approx(41 / 80)  # every causal pair
    assert 0.1 < kept[1] < kept[0]
    assert kept[2] == 0.0


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="impl must be one of"):
        ThresholdRelativeAttention(8, 2, impl="fast")


def test_a_gate_starts_as_asked() -> None:
    assert ThresholdRelativeAttention(64, 4, gate_bias=3.0).gate.bias.tolist() == [3.0] * 4


def test_straight_through_moves_gradients_in_training_and_nothing_else() -> None:
    published = ThresholdRelativeAttention(64, 4, 2).double()
    aided = ThresholdRelativeAttention(64, 4, 2, straight_through=0.5).double()
    aided.load_state_dict(published.state_dict())
    x, upstream = torch.randn(2, 2, 21, 64, dtype=torch.float64).unbind()
    context = Context(key_mask=torch.rand(2, 21) < 0.8, segment_ids=torch.arange(21).expand(2, 21) // 8)
    outs = [module.train()(x, context) for module in (published, aided)]
    assert_close(outs[1], outs[0])
    for out in outs:
        (out * upstream).sum().backward()
    for name, alike in (("value", True), ("gate", True), ("query", False), ("key", False)):
        mine, theirs = (getattr(module, name).weight.grad for module in (aided, published))
        assert torch.allclose(mine, theirs) == alike
    assert torch.equal(aided.eval()(x, context), published.eval()(x, context))
    assert_close(aided.train().weights(x), published.weights(x))
    assert aided(x[:, :0]).shape == (2, 0, 64)
    with pytest.raises(ValueError, match=r"straight_through must be a temperature of at least 0, got -1\.0"):
        ThresholdRelativeAttention(64, 4, straight_through=-1.0)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_straight_through_gradients_are_the_same_with_a_cache_and_when_somebody_looks(qk_norm: bool) -> None:
    module = ThresholdRelativeAttention(32, 4, straight_through=0.5, qk_norm=qk_norm).double().train()
    x = torch.randn(2, 15, 32, dtype=torch.float64)
    upstream = torch.randn(2, 15, 32, dtype=torch.float64)

    def gradient(context: Context) -> torch.Tensor:
        (found,) = torch.autograd.grad((module(x, context) * upstream).sum(), module.query.weight)
        return found

    expected, terms = gradient(Context()), []
    assert_close(gradient(Context(cache=Cache())), expected)
    assert_close(gradient(Context(weights=[], terms=terms)), expected)
    assert {(term.threshold, term.log_gate is None) for term in terms} == {(0.0, False)}
    module.straight_through = 0.0
    assert not torch.allclose(gradient(Context()), expected)


# Without QK-norm the score bound comes from the norms of all keys, which the cache keeps.

BATCH, CACHED = 3, 90


def padded() -> torch.Tensor:
    return torch.arange(CACHED + 9).expand(BATCH, -1) >= torch.tensor([[0], [7], [50]])


def packed() -> torch.Tensor:
    return (torch.arange(CACHED + 9).expand(BATCH, -1) + torch.tensor([[0], [3], [60]])) // 40


@pytest.mark.parametrize(
    "masks", [{}, {"key_mask": padded}, {"segment_ids": packed}], ids=["plain", "padded", "packed"]
)
@pytest.mark.parametrize("kv_heads", [4, 2])
@torch.no_grad()
def test_without_norm_a_new_token_has_the_bits_that_all_keys_together_give(
    masks: dict[str, Any], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache that was cropped and whose rows changed places, and with one key far larger than all others."""
    module = ThresholdRelativeAttention(32, 4, kv_heads, qk_norm=False, gate_bias=0.0).eval()
    x = torch.randn(BATCH, CACHED + 9, 32)
    x[1, 4] *= 30.0  # padding, where there is some
    x[2, 55] *= 30.0
    order = torch.tensor([2, 0, 1])
    given = {name: mask() for name, mask in masks.items()}
    results = []
    for long in (1, 10**9):
        monkeypatch.setattr(threshold_relative, "LONG", long)
        cache = Cache()
        module(x[:, :CACHED], Context(cache, **{name: mask[:, :CACHED] for name, mask in given.items()}))
        module(x[:, :5] * 50.0, Context(cache))  # forgotten again
        cache.crop(CACHED)
        cache.select(order)
        out = []
        for seen in range(CACHED + 1, CACHED + 10):
            context = Context(cache, **{name: mask[order, :seen] for name, mask in given.items()})
            out.append(module(x[order, seen - 1 : seen], context))
        results.append(torch.cat(out, dim=1))
    assert torch.equal(*results)
    full = module(x, Context(**given))[order, CACHED:]
    assert_close(results[0], full, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_norm_a_new_token_reads_no_more_keys_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold_relative, "LONG", 1)
    module = ThresholdRelativeAttention(32, 4, qk_norm=False, gate_bias=-3.0).eval()
    cache, x = Cache(), torch.randn(1, 1200, 32)
    module(x, Context(cache))
    expected = module(x[:, :1], Context(cache))
    cache.crop(1200)
    cache._buffers[0][:, :, :600] = 1e15  # what these would do to scores and bounds shows where they are read
    assert torch.equal(module(x[:, :1], Context(cache)), expected)


@torch.no_grad()
def test_without_norm_tokens_of_zeros_and_of_no_number_are_as_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threshold_relative, "LONG", 1)
    module = ThresholdRelativeAttention(32, 4, qk_norm=False).eval()
    x = torch.randn(2, 12, 32)
    x[0, 3], x[0, -1], x[1, -1] = float("inf"), 0.0, float("nan")
    cache = Cache()
    parts = [module(piece, Context(cache)) for piece in x.split([11, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), module(x), equal_nan=True)

"""The module around the operator."""

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.attention.dense_form import straight_through_attention
from tests.ops.oracle import loop_attention
from tra import MECHANISMS, ThresholdRelativeAttention
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
    for bounds in (threshold_relative.score_bounds, lambda *_: None):  # None: the operator reads every key
        monkeypatch.setattr(threshold_relative, "score_bounds", bounds)
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
def test_norms_are_kept_on_other_devices_too() -> None:
    """Without data, on PyTorch's device that has none: the bound of a new token needs no key."""
    module = ThresholdRelativeAttention(32, 4, qk_norm=False).to("meta").eval()
    cache, x = Cache(), torch.empty(2, 7, 32, device="meta")
    module(x, Context(cache))
    module(x[:, :1], Context(cache))
    assert [tensor.shape for tensor in cache.stored] == [(2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 8)]
    norm = cache.stored[2]
    assert threshold_relative.score_bounds(torch.empty(2, 4, 1, 8, device="meta"), norm, None).shape == (2, 4, 1)


@torch.no_grad()
def test_without_norm_a_new_token_reads_no_more_keys_than_it_needs() -> None:
    module = ThresholdRelativeAttention(32, 4, qk_norm=False, gate_bias=-3.0, impl="cpu").eval()
    cache, x = Cache(), torch.randn(1, 1200, 32)
    module(x, Context(cache))
    expected = module(x[:, :1], Context(cache))
    cache.crop(1200)
    cache._buffers[0][:, :, :600] = 1e15  # what these would do to scores and bounds shows where they are read
    assert torch.equal(module(x[:, :1], Context(cache)), expected)


@torch.no_grad()
def test_without_norm_tokens_of_zeros_and_of_no_number_are_as_without_a_cache() -> None:
    module = ThresholdRelativeAttention(32, 4, qk_norm=False).eval()
    x = torch.randn(2, 12, 32)
    x[0, 3], x[0, -1], x[1, -1] = float("inf"), 0.0, float("nan")
    cache = Cache()
    parts = [module(piece, Context(cache)) for piece in x.split([11, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), module(x), equal_nan=True)


@pytest.mark.parametrize(
    "options", [{"straight_through": 0.5}, {"straight_through": 0.5, "threshold": "query"}], ids=str
)
def test_a_bad_token_spoils_its_row_only_in_training_too(options: dict[str, Any]) -> None:
    module = ThresholdRelativeAttention(32, 4, **options).train()
    x = torch.randn(2, 17, 32)
    x[0, 9] = float("nan")
    mask = torch.ones(2, 17, dtype=torch.bool)
    mask[1, :4] = False
    x[1, 2] = float("inf")  # padding
    out = module(x, Context(key_mask=mask))
    bad = ~out.isfinite().all(-1)
    assert bad.nonzero().tolist() == [[0, 9], [1, 2]]
    # Its key is padding, as without the aid.
    published = ThresholdRelativeAttention(32, 4).train()
    published.load_state_dict(module.state_dict(), strict=False)
    assert_close(out[~bad], published(x, Context(key_mask=mask))[~bad])
    # Nor does it enter the gradients of others.
    inputs = x.clone().requires_grad_()
    module(inputs, Context(key_mask=mask))[~bad].square().sum().backward()
    assert inputs.grad[~bad].isfinite().all()


# A learned threshold.


def learned(kind: str = "head", **options: Any) -> ThresholdRelativeAttention:
    """With thresholds that differ by head, and by token where tokens set them."""
    module = ThresholdRelativeAttention(32, 4, 2, threshold=kind, straight_through=0.5, **options)
    with torch.no_grad():
        module.threshold_bias += 0.05 * torch.randn(4)
        if kind == "query":
            module.threshold_weight += 0.3 * torch.randn(4, 32)
    return module


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("kind", ["head", "query"])
@torch.no_grad()
def test_a_learned_threshold_is_that_of_each_row_from_projections_to_output(kind: str, qk_norm: bool) -> None:
    module = learned(kind, qk_norm=qk_norm).double()
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    query, key, value = module.project(x, Context())
    gate = torch.sigmoid(x @ module.gate.weight.T + module.gate.bias).log().permute(0, 2, 1)
    mixed = []
    for head in range(4):
        rows = []
        for i in range(13):
            threshold = 10 * module.threshold_bias[head].expand(2)
            if kind == "query":
                threshold = threshold + x[:, i] @ module.threshold_weight[head]
            rows.append(
                torch.stack(
                    [
                        loop_attention(
                            query[b : b + 1, head : head + 1, : i + 1],
                            key[b : b + 1, head // 2 : head // 2 + 1, : i + 1],
                            value[b : b + 1, head // 2 : head // 2 + 1, : i + 1],
                            gate[b : b + 1, head : head + 1, : i + 1],
                            threshold=threshold[b].item(),
                        )[0, 0, -1]
                        for b in range(2)
                    ]
                )
            )
        mixed.append(torch.stack(rows, dim=1))
    expected = module.output(torch.cat(mixed, dim=-1))
    assert_close(module(x), expected)


@pytest.mark.parametrize("kind", ["head", "query"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_learned_threshold_gets_the_gradient_of_the_dense_form(kind: str, dtype: torch.dtype) -> None:
    module = learned(kind).train().to(dtype)
    x, upstream = torch.randn(2, 2, 21, 32, dtype=dtype).unbind()
    (module(x) * upstream).sum().backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    module.zero_grad()
    query, key, value = module.project(x, Context())
    thresholds = module.thresholds(x)
    assert isinstance(thresholds, torch.Tensor)
    mixed = straight_through_attention(query, key, value, module.log_gate(x), thresholds.expand(2, 4, 21), 0.5)
    (module.output(mixed.transpose(1, 2).flatten(2)) * upstream).sum().backward()
    exact = 1e-9 if dtype == torch.float64 else 2e-4
    for name, parameter in module.named_parameters():
        assert_close(found[name], parameter.grad, rtol=exact, atol=exact)
        assert parameter.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["head", "query"])
@pytest.mark.parametrize("qk_norm", [True, False])
@torch.no_grad()
def test_a_learned_threshold_is_the_same_with_a_cache(kind: str, qk_norm: bool) -> None:
    module, x, cache = learned(kind, qk_norm=qk_norm).eval(), torch.randn(2, 19, 32), Cache()
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[1, :5] = False
    full, seen, parts = module(x, Context(key_mask=mask)), 0, []
    for piece in x.split([7, 1, 1, 9, 1], dim=1):
        seen += piece.shape[1]
        parts.append(module(piece, Context(cache, mask[:, :seen])))
    assert_close(torch.cat(parts, dim=1), full, rtol=1e-4, atol=1e-5)
    kept = module.weights(x, Context(key_mask=mask)) > 0
    query, key, _ = module.project(x, Context())
    scores = query @ key.repeat_interleave(2, dim=1).mT / 8**0.5
    thresholds = module.thresholds(x)
    assert isinstance(thresholds, torch.Tensor)
    causal = torch.ones(19, 19, dtype=torch.bool).tril() & mask[:, None, None]
    assert torch.equal(kept, (scores > thresholds.expand(2, 4, 19)[..., None]) & causal)


def test_a_learned_threshold_starts_as_asked_and_draws_nothing() -> None:
    x = torch.randn(1, 40, 32)
    starts = []
    for options in ({}, {"threshold": "head"}, {"threshold": "query"}, {"threshold": "head", "threshold_start": -2.0}):
        torch.manual_seed(7)
        aid = {"straight_through": 0.5} if options else {}
        module = ThresholdRelativeAttention(32, 4, **options, **aid).eval()
        starts.append((module(x), torch.rand(3), module))
    for out, drawn, _ in starts[:3]:
        assert torch.equal(out, starts[0][0])
        assert torch.equal(drawn, starts[0][1])
    lowered = starts[3][2]
    assert_close(lowered.thresholds(x), torch.full((4, 1), -2.0))
    assert_close(lowered.threshold_bias.detach(), torch.full((4,), -0.2))
    given = ThresholdRelativeAttention(32, 4, threshold=-2.0).eval()
    given.load_state_dict(lowered.state_dict(), strict=False)
    assert_close(lowered(x), given(x))


def test_an_optimiser_moves_a_learned_threshold_ten_times_as_fast() -> None:
    module = ThresholdRelativeAttention(32, 4, threshold="head", straight_through=0.5)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.0)
    module(torch.randn(2, 30, 32)).square().sum().backward()
    optimiser.step()
    thresholds = module.thresholds(torch.empty(0))
    assert_close(thresholds.abs(), torch.full((4, 1), 1e-2), rtol=1e-3, atol=0.0)


def test_the_recommended_form_is_a_name_of_its_own() -> None:
    module = MECHANISMS["tra-learned"](32, 4)
    assert (module.threshold, module.straight_through) == ("head", 0.5)
    assert isinstance(module, ThresholdRelativeAttention)
    assert_close(module.thresholds(torch.empty(0)).detach(), torch.zeros(4, 1))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"threshold": "head"}, "straight_through must be greater than 0 for a learned threshold"),
        ({"threshold": "token", "straight_through": 0.5}, "threshold must be one of"),
        ({"threshold_start": 1.0}, "threshold_start must be 0 for a threshold that is given, got 1.0"),
        (
            {"threshold": "head", "straight_through": 0.5, "threshold_start": math.inf},
            "threshold_start must be a finite number, got inf",
        ),
    ],
)
def test_a_wrong_threshold_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ThresholdRelativeAttention(32, 4, **options)

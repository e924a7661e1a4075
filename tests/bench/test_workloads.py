"""What is timed is what it is called."""

import math

import pytest
import torch
import torch.nn.functional as F

from tra.attention import Cache
from tra.bench.workloads import (
    BOUND,
    WIDTH,
    attention,
    language_like,
    native,
    new_token,
    papers_listing,
    training_step,
)
from tra.model import Decoder, DecoderConfig, sized
from tra.ops import threshold_relative_attention


def test_language_like_inputs_are_normalised_with_gates_as_in_a_trained_model() -> None:
    query, key, value, gate = language_like(2, 3, 1111, 1200)
    assert query.shape == (2, 3, 1111, WIDTH)
    assert key.shape == value.shape == (2, 3, 1200, WIDTH)
    for x in (query, key):
        torch.testing.assert_close(x.square().mean(-1), torch.ones(x.shape[:-1]), rtol=1e-3, atol=1e-3)
    assert (query @ key.transpose(-1, -2) / math.sqrt(WIDTH)).abs().max() <= BOUND
    strength = (-gate).log()
    assert strength.mean().item() == pytest.approx(math.log(0.7), abs=0.05)
    assert strength.std().item() == pytest.approx(1.1, abs=0.05)


def test_every_side_of_a_comparison_gets_the_same_inputs() -> None:
    for first, second in zip(language_like(1, 2, 7, 63), language_like(1, 2, 7, 63), strict=True):
        assert torch.equal(first, second)


def test_the_papers_listing_is_the_mechanism() -> None:
    tensors = language_like(2, 3, 63, 63)
    expected = threshold_relative_attention(*tensors, impl="reference")
    torch.testing.assert_close(papers_listing(*tensors), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_the_native_rule_is_the_mechanism(tolerance: float | None) -> None:
    work = attention(native(tolerance), 1, 2, 111, 111)
    expected = threshold_relative_attention(*language_like(1, 2, 111, 111), impl="reference")
    torch.testing.assert_close(work(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gated", [True, False])
def test_backward_gives_a_gradient_of_every_input_of_the_rule(gated: bool) -> None:
    rule = native() if gated else F.scaled_dot_product_attention
    gradients = attention(rule, 1, 2, 63, 63, backward=True, gated=gated)()
    shapes = [x.shape for x in language_like(1, 2, 63, 63)]
    assert [x.shape for x in gradients] == shapes[: 4 if gated else 3]
    assert all(x.abs().sum() > 0 for x in gradients)


def test_forward_alone_keeps_no_graph() -> None:
    assert not attention(native(), 1, 2, 63, 63)().requires_grad


def test_decoding_is_one_token_in_inference_mode() -> None:
    out = attention(native(), 3, 2, 1, 111)()
    assert out.shape == (3, 2, 1, WIDTH)
    assert out.is_inference()
    expected = threshold_relative_attention(*language_like(3, 2, 1, 111), impl="reference")
    torch.testing.assert_close(out.clone(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["tra", "rope"])
def test_a_new_token_is_timed_with_the_whole_cache_and_leaves_it_as_it_was(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    append = Cache.append

    def watched(cache: Cache, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = append(cache, *new)
        seen.append((new[0].shape[2], whole[0].shape[2], whole[0].data_ptr()))
        return whole

    monkeypatch.setattr(Cache, "append", watched)
    work = new_token(sized("mini", attention=attention), 300)
    filled = len(seen)
    for _ in range(3):
        work()
    layers = sized("mini").layers
    assert [entry[:2] for entry in seen] == [(301, 301)] * filled + [(1, 301)] * 3 * layers
    assert len({address for *_, address in seen}) == filled == layers, "nothing is copied"


def test_a_training_step_changes_every_weight_and_leaves_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Decoder] = []
    make = Decoder.__init__

    def watched(model: Decoder, config: DecoderConfig) -> None:
        make(model, config)
        models.append(model)

    monkeypatch.setattr(Decoder, "__init__", watched)
    work = training_step(DecoderConfig(vocabulary=7, layers=1, heads=2, width=16, dropout=0.0), 3, 11)
    (model,) = models
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    work()
    assert before
    for name, weight in model.named_parameters():
        assert not torch.equal(weight, before[name]), name
        assert weight.grad is None, name

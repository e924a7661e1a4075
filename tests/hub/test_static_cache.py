"""Buffers of a fixed size, with which generation is compiled once."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.hub.kinds import build_kind, every_kind, own_kinds, tokens_of
from tests.hub.models import build, every_mechanism, generate, left_padded, prompt
from tra import MECHANISMS
from tra.attention.cache import StaticCache


def static_cache(model: Any, capacity: int = 20) -> transformers.StaticCache:
    return transformers.StaticCache(config=model.config, max_cache_len=capacity)


@every_mechanism
def test_generation_is_that_of_a_dynamic_cache_or_refused_by_name(attention: str) -> None:
    model = build(attention, pad_token_id=0)
    tokens, mask = left_padded([prompt(1, 7)[0], prompt(1, 4)[0]])
    asked: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 5}
    static = {**asked, "cache_implementation": "static"}
    mechanism = MECHANISMS[attention]
    if not mechanism.takes_static_cache:
        with pytest.raises(ValueError, match=f"must not be a StaticCache for {mechanism.__name__}"):
            generate(model, tokens, **static)
        with pytest.raises(ValueError, match=f"cache must not be static for {mechanism.__name__}"):
            model.model.decoder(tokens, cache=[StaticCache(9) for _ in range(2)])
        return
    assert torch.equal(generate(model, tokens, **static), generate(model, tokens, **asked))
    beams = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(model, tokens, **static, **beams), generate(model, tokens, **asked, **beams))


def test_the_mechanisms_that_take_it_are_these() -> None:
    taken = {name for name, mechanism in MECHANISMS.items() if mechanism.takes_static_cache}
    assert {"tra", "rope", "nope", "differential"} <= taken
    assert not {"selective", "sinusoidal", "cope"} & taken


@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"threshold": "query", "straight_through": 0.5}])
@torch.no_grad()
def test_pieces_with_padding_have_the_logits_of_the_whole(options: dict[str, Any]) -> None:
    model, tokens = build("rope+tra", attention_options=options), prompt(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = model(tokens, attention_mask=mask, use_cache=False).logits
    cache = static_cache(model)
    found = [
        model(tokens[:, start:end], past_key_values=cache, attention_mask=mask[:, :end]).logits
        for start, end in ((0, 6), (6, 10), (10, 11), (11, 12))
    ]
    torch.testing.assert_close(torch.cat(found, dim=1)[1], expected[1])
    torch.testing.assert_close(torch.cat(found, dim=1)[0, 3:], expected[0, 3:])
    more = torch.cat([mask, mask[:, -1:]], dim=1)
    seen = model(tokens[:, :1], past_key_values=cache, attention_mask=more, output_attentions=True).attentions[1]
    assert seen.shape == (2, 4, 1, 13)
    assert not seen[0, ..., :3].any()
    cache.crop(-1)
    assert cache.get_seq_length() == 12
    assert cache.get_max_length() == 20


@every_kind
@torch.no_grad()
def test_a_compiled_step_is_compiled_once(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(2, 12)
    expected = model(tokens, use_cache=False).logits
    cache = static_cache(model)
    model(tokens[:, :7], past_key_values=cache)
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    torch.compiler.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    found = [step(tokens[:, 7:8], past_key_values=cache).logits]
    with torch.compiler.set_stance("fail_on_recompile"):
        found += [step(token, past_key_values=cache).logits for token in tokens[:, 8:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected[:, 7:])
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


@every_kind
def test_generate_compiles_its_steps(kind: str) -> None:
    """As on a GPU, where `generate` compiles by itself: with padding, whose mask has one shape at every step."""
    model, tokens = build_kind(kind), tokens_of(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    expected = generate(model, tokens, attention_mask=mask, max_new_tokens=6)
    torch.compiler.reset()
    graphs = 0

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    compiled = transformers.CompileConfig(backend=counting, fullgraph=True)  # type: ignore[arg-type]
    compiled._compile_all_devices = True
    found = generate(
        model, tokens, attention_mask=mask, max_new_tokens=6, cache_implementation="static", compile_config=compiled
    )
    assert torch.equal(found, expected)
    assert graphs == 1


@own_kinds
@torch.no_grad()
def test_what_a_static_cache_cannot_hold_is_refused(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(2, 7)
    cache = static_cache(model, 8)
    model(tokens, past_key_values=cache)
    with pytest.raises(ValueError, match=r"cache must have room for 7 \+ 2 tokens, but its capacity is 8"):
        model(tokens[:, :2], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must not be a StaticCache for packed documents"):
        model(tokens[:, :1], past_key_values=cache, position_ids=torch.zeros(2, 1, dtype=torch.long))
    restarts = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    with pytest.raises(ValueError, match="past_key_values must not be a StaticCache for packed documents"):
        model(tokens, past_key_values=static_cache(model), position_ids=restarts)
    with pytest.raises(ValueError, match="segment_ids must be None with a StaticCache"):
        model(tokens, past_key_values=static_cache(model), segment_ids=torch.zeros(2, 20, dtype=torch.long))
    with pytest.raises(ValueError, match="got 1"):
        model(tokens, past_key_values=static_cache(build_kind(kind, num_hidden_layers=1)))
    with pytest.raises(ValueError, match="past_key_values must be a cache of this model"):
        build_kind(kind, num_key_value_heads=4)(tokens[:, :1], past_key_values=cache)


def held(cache: StaticCache) -> Tensor:
    return cache.stored[0][:, :, : len(cache)]


def test_a_static_cache_is_cropped_chosen_from_and_reset_in_place() -> None:
    cache, keys = StaticCache(9), torch.randn(2, 3, 5, 4)
    whole = cache.append(keys, keys)[0]
    assert whole.shape == (2, 3, 9, 4)
    assert len(cache) == 5
    address = whole.data_ptr()
    cache.crop(3)
    assert torch.equal(held(cache), keys[:, :, :3])
    assert not whole[:, :, 3:].any()
    cache.select(torch.tensor([1, 0]))
    assert torch.equal(held(cache), keys[[1, 0], :, :3])
    assert cache.stored[0].data_ptr() == address
    cache.select(torch.tensor([1]))
    assert torch.equal(held(cache), keys[:1, :, :3])
    with pytest.raises(ValueError, match="cache holds a batch of 1, got new tokens for a batch of 2"):
        cache.append(keys, keys)
    with pytest.raises(ValueError, match="length must be between 0 and the 3 tokens"):
        cache.crop(4)
    with pytest.raises(ValueError, match="capacity must be at least 1, got 0"):
        StaticCache(0)


def test_a_mask_of_another_width_is_refused() -> None:
    model = build("tra")
    tokens = prompt(2, 7)
    for width in (3, 9):
        with pytest.raises(ValueError, match=r"attention_mask must have the shape .* = \[2, 7\] or that of the whole"):
            model(tokens, attention_mask=torch.ones(2, width), past_key_values=static_cache(model))


def test_gradients_are_refused_where_none_would_come() -> None:
    model = build("tra").train()
    with pytest.raises(ValueError, match="cache must not be static where gradients are wanted"):
        model(prompt(2, 7), past_key_values=static_cache(model))

"""What transformers' tests of generation cover, on four models each: every way to generate says what the logits say.

Their source distribution lacks those tests. The oracles here read everything again for each token, without a cache.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.hub.kinds import KINDS, build_kind, every_kind, tokens_of
from tests.hub.models import VOCABULARY
from tests.hub.test_generation import word_tokenizer

NEW = 5
DICT = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


@functools.cache
def model_of(kind: str) -> Any:
    """Always the same model, which no test may change; its weights are never at their start."""
    with torch.random.fork_rng():  # a test's own seed outlives the first use
        torch.manual_seed(KINDS.index(kind))
        return build_kind(kind, attn_implementation="eager")


def prompt() -> Tensor:
    return tokens_of(2, 7)


def generate(kind: str, tokens: Tensor, **options: Any) -> Any:
    mask = {} if "attention_mask" in options else {"attention_mask": torch.ones_like(tokens)}
    return model_of(kind).generate(tokens, **{"max_new_tokens": NEW, "do_sample": False, **mask, **options})


@torch.no_grad()
def logits_of(kind: str, tokens: Tensor) -> Tensor:
    return model_of(kind)(tokens, use_cache=False).logits


def greedy(kind: str, tokens: Tensor, new: int = NEW) -> Tensor:
    for _ in range(new):
        tokens = torch.cat([tokens, logits_of(kind, tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


@every_kind
def test_greedy_search_and_all_that_it_may_return(kind: str) -> None:
    model, tokens = model_of(kind), prompt()
    expected = greedy(kind, tokens)
    assert torch.equal(generate(kind, tokens), expected)
    out = generate(kind, tokens, **DICT, output_attentions=True, output_hidden_states=True)
    assert torch.equal(out.sequences, expected)
    with torch.no_grad():
        whole = model(expected[:, :-1], use_cache=False, output_attentions=True, output_hidden_states=True)
    for found in (out.logits, out.scores):
        torch.testing.assert_close(torch.stack(found, dim=1), whole.logits[:, 6:], rtol=1e-4, atol=1e-4)
    assert len(out.hidden_states) == len(out.attentions) == NEW
    for layer in range(3):
        steps = torch.cat([step[layer] for step in out.hidden_states], dim=1)
        torch.testing.assert_close(steps, whole.hidden_states[layer], rtol=1e-4, atol=1e-4)
    for layer in range(2):
        for at, step in enumerate(out.attentions):
            rows = whole.attentions[layer][:, :, 0 if at == 0 else 6 + at : 7 + at, : 7 + at]
            torch.testing.assert_close(step[layer], rows, rtol=1e-3, atol=1e-4)
    cache = out.past_key_values
    assert cache.get_seq_length() == 7 + NEW - 1
    assert [tuple(part.shape) for layer in cache.layers for part in (layer.keys, layer.values)] == [(2, 2, 11, 8)] * 4


@every_kind
def test_sampling_draws_from_the_probabilities(kind: str) -> None:
    tokens = prompt()
    torch.manual_seed(3)
    expected = tokens
    for _ in range(NEW):
        weights = (logits_of(kind, expected)[:, -1] / 0.7).softmax(-1)
        expected = torch.cat([expected, torch.multinomial(weights, 1)], dim=1)
    for use_cache in (True, False):
        torch.manual_seed(3)
        found = generate(kind, tokens, do_sample=True, temperature=0.7, top_k=0, use_cache=use_cache)
        assert torch.equal(found, expected)


@every_kind
def test_beams_that_hold_everything_find_the_most_probable_continuation(kind: str) -> None:
    tokens = prompt()
    found = generate(kind, tokens, num_beams=VOCABULARY, max_new_tokens=2, **DICT)
    rows = tokens.repeat_interleave(VOCABULARY, dim=0)
    following = torch.arange(VOCABULARY).repeat(2)
    first = logits_of(kind, tokens)[:, -1].log_softmax(-1)
    second = logits_of(kind, torch.cat([rows, following[:, None]], dim=1))[:, -1].log_softmax(-1)
    total = first[..., None] + second.view(2, VOCABULARY, VOCABULARY)
    best = total.flatten(1).argmax(-1)
    assert torch.equal(found.sequences[:, 7:], torch.stack([best // VOCABULARY, best % VOCABULARY], dim=1))
    mean = total.flatten(1).amax(-1) / 2
    torch.testing.assert_close(found.sequences_scores, mean, rtol=1e-4, atol=1e-4)


@every_kind
def test_beams_come_with_their_scores_and_with_all_that_is_asked_for(kind: str) -> None:
    model, tokens, beams = model_of(kind), prompt(), {"num_beams": 4, "num_return_sequences": 3}
    out = generate(kind, tokens, **beams, **DICT, output_attentions=True, output_hidden_states=True)
    assert torch.equal(out.sequences, generate(kind, tokens, **beams, use_cache=False))
    assert out.sequences.unique(dim=0).shape == (6, 7 + NEW), "no continuation twice"
    probabilities = logits_of(kind, out.sequences)[:, 6:-1].log_softmax(-1)
    each = probabilities.gather(2, out.sequences[:, 7:, None])[..., 0]
    torch.testing.assert_close(out.sequences_scores, each.mean(-1), rtol=1e-4, atol=1e-4)
    steps = model.compute_transition_scores(out.sequences, out.scores, out.beam_indices)
    torch.testing.assert_close(steps, each, rtol=1e-3, atol=1e-3)
    shapes = [(8, 7 if at == 0 else 1, 7 + at) for at in range(NEW)]
    assert [tuple(step[-1].shape) for step in out.attentions] == [(rows, 4, new, keys) for rows, new, keys in shapes]
    assert [tuple(step[-1].shape) for step in out.hidden_states] == [(rows, new, 32) for rows, new, _ in shapes]


@every_kind
@pytest.mark.parametrize("beams", [1, 3])
def test_what_changes_scores_does_so_with_and_without_a_cache(kind: str, beams: int) -> None:
    tokens = prompt()
    banned, repeated = int(greedy(kind, tokens)[0, 7]), {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2}
    changed = {"bad_words_ids": [[banned]], "min_new_tokens": 3, "eos_token_id": 4, "num_beams": beams, **repeated}
    found = [generate(kind, tokens, use_cache=use_cache, **changed) for use_cache in (True, False)]
    assert torch.equal(*found)
    assert banned not in found[0][0, 7:]
    assert 4 not in found[0][:, 7:10]


@every_kind
def test_beams_that_sample_need_no_cache_to_be_the_same(kind: str) -> None:
    tokens, found = prompt(), []
    for use_cache in (True, False):
        torch.manual_seed(2)
        found.append(generate(kind, tokens, num_beams=3, do_sample=True, num_return_sequences=2, use_cache=use_cache))
    assert torch.equal(*found)
    assert found[0].shape == (4, 7 + NEW)


@every_kind
def test_assisted_decoding_gives_the_same_tokens(kind: str) -> None:
    tokens = tokens_of(1, 3).repeat(1, 3)
    expected = greedy(kind, tokens, 8)
    torch.manual_seed(1)
    weak = build_kind(kind, num_hidden_layers=1)
    for assistant in ({"assistant_model": weak}, {"assistant_model": model_of(kind)}, {"prompt_lookup_num_tokens": 3}):
        assert torch.equal(generate(kind, tokens, max_new_tokens=8, **assistant), expected)
    assert generate(kind, tokens, assistant_model=weak, do_sample=True).shape == (1, 9 + NEW)


@every_kind
def test_prompt_lookup_ends_at_the_end_token(kind: str) -> None:
    tokens = tokens_of(1, 3).repeat(1, 3)
    end = int(greedy(kind, tokens, 8)[0, 11])
    expected = generate(kind, tokens, max_new_tokens=8, eos_token_id=end)
    assert expected.shape[1] <= 12
    found = generate(kind, tokens, max_new_tokens=8, eos_token_id=end, prompt_lookup_num_tokens=3)
    assert torch.equal(found, expected)


@every_kind
@pytest.mark.parametrize("options", [{"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 4, "num_beam_groups": 2}])
def test_what_left_transformers_is_refused(kind: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"trust_remote_code|custom_generate"):
        generate(kind, prompt(), **options)


@every_kind
@pytest.mark.parametrize("cached", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_a_left_padded_row_goes_on_as_it_does_alone(kind: str, cached: dict[str, Any]) -> None:
    alone, other = tokens_of(1, 4), tokens_of(1, 7)
    padded = torch.cat([torch.cat([tokens_of(1, 3), alone], dim=1), other])
    mask = torch.ones_like(padded)
    mask[0, :3] = 0
    found = generate(kind, padded, attention_mask=mask, **cached)
    assert torch.equal(found[0, 7:], greedy(kind, alone)[0, 4:])
    assert torch.equal(found[1:], greedy(kind, other))


@every_kind
def test_generation_goes_on_from_what_an_earlier_one_read(kind: str) -> None:
    tokens = prompt()
    expected = greedy(kind, tokens, 8)
    first = generate(kind, tokens, max_new_tokens=3, return_dict_in_generate=True)
    again = generate(kind, first.sequences, past_key_values=first.past_key_values)
    assert torch.equal(again, expected)


@every_kind
def test_generation_from_embeddings(kind: str) -> None:
    model, tokens = model_of(kind), prompt()
    expected = greedy(kind, tokens)[:, 7:]
    embedded = model.get_input_embeddings()(tokens).detach()
    for cached in ({}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        found = model.generate(
            inputs_embeds=embedded,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            do_sample=False,
            **cached,
        )
        assert torch.equal(found, expected)


@every_kind
def test_embeddings_take_part_in_beams_and_go_on_from_a_cache(kind: str) -> None:
    model, tokens = model_of(kind), prompt()
    embed = model.get_input_embeddings()
    embedded = embed(tokens).detach()

    def written(embeddings: Tensor, **options: Any) -> Any:
        mask = torch.ones(embeddings.shape[:2], dtype=torch.long)
        return model.generate(inputs_embeds=embeddings, attention_mask=mask, do_sample=False, **options)

    beams = {"num_beams": 3, "max_new_tokens": NEW}
    assert torch.equal(written(embedded, **beams), generate(kind, tokens, **beams)[:, 7:])
    assert not torch.equal(written(embedded.flip(1), max_new_tokens=NEW), written(embedded, max_new_tokens=NEW))
    first = written(embedded, max_new_tokens=3, return_dict_in_generate=True)
    both = torch.cat([embedded, embed(first.sequences).detach()], dim=1)
    rest = written(both, max_new_tokens=NEW, past_key_values=first.past_key_values)
    assert torch.equal(torch.cat([first.sequences, rest], dim=1), greedy(kind, tokens, 3 + NEW)[:, 7:])


@every_kind
def test_generation_from_nothing_but_a_first_token(kind: str) -> None:
    found = model_of(kind).generate(bos_token_id=3, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(found, greedy(kind, torch.tensor([[3]])))


@every_kind
def test_a_pipeline_from_a_folder(kind: str, tmp_path: Path) -> None:
    tokens, tokenizer = tokens_of(1, 7), word_tokenizer()
    model_of(kind).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    write = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
    text = write(tokenizer.decode(tokens[0]), max_new_tokens=NEW, do_sample=False, return_full_text=False)
    expected = greedy(kind, tokens)[0, 7:]
    assert text[0]["generated_text"].split() == [f"w{index}" for index in expected if index != 0]  # which is padding


@every_kind
def test_a_step_computes_the_logits_of_its_last_token_only(kind: str) -> None:
    model, seen = model_of(kind), []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[1]))
    try:
        generate(kind, prompt())
    finally:
        hook.remove()
    assert seen == [1] * NEW
    tokens = prompt()
    expected = logits_of(kind, tokens)
    for kept, places in ((0, slice(None)), (3, slice(4, None)), (torch.tensor([1, 5]), [1, 5])):
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, logits_to_keep=kept).logits, expected[:, places])


@pytest.mark.parametrize("backend", ["fp8", "quanto", "hqq"])
@pytest.mark.parametrize("kind", ["adopted", "llama"])
def test_a_quantised_cache_serves_an_adopted_llama_as_it_serves_the_original(kind: str, backend: str) -> None:
    """Keys and values in 8 bits or 4, of which torch has the first by itself: the logits stay close."""
    if backend != "fp8":
        pytest.importorskip("optimum.quanto" if backend == "quanto" else "hqq")
    model, tokens = model_of(kind), prompt()
    how = {"quanto": {"q_group_size": 8}, "hqq": {"nbits": 8, "q_group_size": 8, "axis_key": 1, "axis_value": 1}}
    quantised = {"cache_implementation": "quantized", "cache_config": {"backend": backend, **how.get(backend, {})}}
    out = generate(kind, tokens, **quantised, **DICT)
    assert isinstance(out.past_key_values, transformers.QuantizedCache)
    expected = logits_of(kind, out.sequences[:, :-1])[:, 6:]
    found = torch.stack(out.logits, dim=1)
    assert 0 < (found - expected).abs().mean() < 0.1 * expected.std()
    assert model.config.use_cache


class Stream:
    """Stands for a GPU's: transformers' offloading asks for one."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@pytest.mark.parametrize("kind", ["adopted", "llama"])
@pytest.mark.parametrize("asked", ["offloaded", "offloaded_static"])
def test_an_offloaded_cache_serves_an_adopted_llama_as_it_serves_the_original(
    kind: str, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    tokens, moved = prompt(), []
    layer = transformers.cache_utils.StaticLayer if "static" in asked else transformers.cache_utils.DynamicLayer
    offload = layer.offload
    monkeypatch.setattr(layer, "offload", lambda self: moved.append(self) or offload(self))
    found = generate(kind, tokens, cache_implementation=asked, disable_compile=True)
    assert torch.equal(found, greedy(kind, tokens))
    assert len(moved) >= 2 * NEW

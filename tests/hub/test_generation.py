"""`generate` for every mechanism: cached as uncached, in batches, beams and chunks, streaming."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from torch import Tensor
from transformers import AutoTokenizer

from tests.hub.models import VOCABULARY, build, every_mechanism, generate, left_padded, prompt
from tra import Cache, Decoder
from tra.hub import to_decoder
from tra.hub.cache import TraLayer


@torch.no_grad()
def greedy(decoder: Decoder, tokens: Tensor, new: int = 16) -> Tensor:
    """The oracle: the plain decoder reads everything again for each token."""
    for _ in range(new):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


@every_mechanism
def test_cached_generation_equals_the_decoder_without_a_cache_token_for_token(attention: str) -> None:
    model, tokens = build(attention), prompt()
    expected = greedy(to_decoder(model), tokens)
    assert len(expected[:, 7:].unique()) > 3
    assert torch.equal(generate(model, tokens), expected)
    assert torch.equal(generate(model, tokens, use_cache=False), expected)


@every_mechanism
def test_rows_of_a_left_padded_batch_continue_as_they_do_alone(attention: str) -> None:
    model = build(attention)
    rows = [torch.randint(VOCABULARY, (length,)) for length in (3, 11, 8)]
    tokens, mask = left_padded(rows)
    together = generate(model, tokens, attention_mask=mask)[:, -16:]
    for row, continued in zip(rows, together, strict=True):
        assert torch.equal(continued, greedy(to_decoder(model), row[None])[0, len(row) :])


@every_mechanism
def test_beam_search_with_a_cache_equals_beam_search_without(attention: str) -> None:
    model = build(attention)
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (4, 6)])
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9}
    cached = generate(model, tokens, **options)
    assert torch.equal(cached, generate(model, tokens, use_cache=False, **options))
    assert not torch.equal(cached[0], cached[1])


@every_mechanism
def test_a_prompt_much_longer_than_any_window(attention: str) -> None:
    model, tokens = build(attention), prompt(batch=1, length=300)
    assert torch.equal(generate(model, tokens, max_new_tokens=3), greedy(to_decoder(model), tokens, new=3))


@every_mechanism
def test_sampling_with_a_seed_is_repeatable_and_needs_no_cache_to_be_so(attention: str) -> None:
    model, tokens, found = build(attention), prompt(), []
    for seed, use_cache in ((1, True), (1, False), (2, True)):
        torch.manual_seed(seed)
        found.append(generate(model, tokens, do_sample=True, top_k=8, num_return_sequences=2, use_cache=use_cache))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@every_mechanism
def test_a_prompt_read_in_chunks_changes_nothing(attention: str) -> None:
    model, tokens = build(attention), prompt(length=13)
    assert torch.equal(generate(model, tokens, prefill_chunk_size=5), greedy(to_decoder(model), tokens))


@every_mechanism
def test_assisted_generation_forgets_the_tokens_it_takes_back(attention: str) -> None:
    model, tokens = build(attention), prompt(batch=1, length=3).repeat(1, 4)
    cropped = []
    model.generation_config.prompt_lookup_num_tokens = 3
    if attention == "selective":
        with pytest.raises(ValueError, match="the cache of this mechanism cannot be cropped"):
            generate(model, tokens)
        return
    crop = TraLayer.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraLayer, "crop", lambda layer, tokens: cropped.append(tokens) or crop(layer, tokens))
        assert torch.equal(generate(model, tokens), greedy(to_decoder(model), tokens))
    assert min(cropped) < 0


@every_mechanism
def test_generation_goes_on_from_the_cache_of_an_earlier_call(attention: str) -> None:
    model, tokens = build(attention), prompt()
    first = generate(model, tokens, max_new_tokens=6, return_dict_in_generate=True)
    more = torch.cat([first.sequences, prompt(length=2)], dim=1)
    assert torch.equal(generate(model, more, past_key_values=first.past_key_values), greedy(to_decoder(model), more))


def test_generation_from_embedded_tokens() -> None:
    model, tokens = build(), prompt()
    new = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), max_new_tokens=16, do_sample=False)
    assert torch.equal(new, greedy(to_decoder(model), tokens)[:, 7:])


def test_generation_ends_at_the_end_token_and_pads_after_it() -> None:
    model, tokens = build(), prompt()
    free = greedy(to_decoder(model), tokens)
    end = free[0, 12].item()
    stopped = generate(model, tokens, attention_mask=torch.ones_like(tokens), eos_token_id=end, pad_token_id=0)
    for row, plain in zip(stopped, free, strict=True):
        ends = (plain[7:] == end).nonzero()
        length = 7 + (ends[0].item() + 1 if len(ends) else 16)
        assert torch.equal(row[:length], plain[:length])
        assert (row[length:] == 0).all()


def test_the_cache_is_not_copied_for_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model, addresses = build(num_hidden_layers=1), []
    append = Cache.append

    def watched(cache: Cache, *new: Tensor) -> tuple[Tensor, ...]:
        stored = append(cache, *new)
        addresses.append(stored[0].data_ptr())
        return stored

    monkeypatch.setattr(Cache, "append", watched)
    generate(model, prompt(), max_new_tokens=200)
    moves = sum(before != after for before, after in pairwise(addresses))
    assert len(addresses) == 200
    assert 1 <= moves <= 6  # 7 tokens, doubled until they are 206


@torch.no_grad()
def test_rows_of_the_cache_repeat_and_reset() -> None:
    model, tokens = build("fot"), prompt(length=8)
    cache = model(tokens[:, :5], use_cache=True).past_key_values
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache)) == (5, -1, 2)
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    expected = to_decoder(model)(tokens)
    torch.testing.assert_close(model(tokens[rows, 5:], past_key_values=cache).logits, expected[rows, 5:])
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, expected)
    with pytest.raises(ValueError, match="tokens_to_remove must not be positive, got 1"):
        cache.crop(1)


def word_tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {f"w{index}": index for index in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="w0", pad_token="w0")


def test_streaming_gives_the_words_as_they_come() -> None:
    model, tokens, tokenizer = build(), prompt(batch=1), word_tokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60.0)
    thread = threading.Thread(target=generate, args=(model, tokens), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert len(pieces) > 10
    expected = greedy(to_decoder(model), tokens)[0, 7:]
    assert "".join(pieces).split() == [f"w{index}" for index in expected]


def test_a_pipeline_from_a_folder(tmp_path: Path) -> None:
    model, tokens = build(pad_token_id=0), prompt(batch=1)
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    write = transformers.pipeline("text-generation", model=str(tmp_path), tokenizer=tokenizer, device="cpu")
    text = tokenizer.decode(tokens[0])
    written = write(text, max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    expected = greedy(to_decoder(model), tokens, new=5)[0, 7:]
    assert written.split() == [f"w{index}" for index in expected if index != 0]  # w0 is the padding, left out

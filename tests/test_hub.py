"""The promises of transformers, kept by every mechanism: generate, saving, Trainer, LoRA."""

import json
import pickle
import threading
from collections.abc import Callable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

from tra import MECHANISMS, Cache, Decoder, DecoderConfig
from tra.hub import NAMES, TraCache, TraConfig, TraForCausalLM, TraModel, from_decoder

VOCABULARY = 19
every_mechanism = pytest.mark.parametrize("attention", sorted(MECHANISMS))


def config(attention: str = "tra", **changes: Any) -> TraConfig:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return TraConfig(**{"vocab_size": VOCABULARY, "attention": attention, **sizes, **changes})


def build(attention: str = "tra", **changes: Any) -> TraForCausalLM:
    """A model none of whose weights is at its start, so that each of them matters."""
    model = TraForCausalLM(config(attention, **changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def prompt(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length))


def generate(model: Any, tokens: Tensor, **options: Any) -> Tensor:
    return model.generate(tokens, **{"max_new_tokens": 16, "do_sample": False, **options})


@torch.no_grad()
def greedy(decoder: Decoder, tokens: Tensor, new: int = 16) -> Tensor:
    """The oracle: the plain decoder reads everything again for each token."""
    for _ in range(new):
        tokens = torch.cat([tokens, decoder(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Rows beside one another, padded with tokens that occur, so that only the mask says what is padding."""
    longest = max(len(row) for row in rows)
    tokens = torch.stack([torch.cat([torch.randint(VOCABULARY, (longest - len(row),)), row]) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return tokens, mask


@every_mechanism
def test_cached_generation_equals_the_decoder_without_a_cache_token_for_token(attention: str) -> None:
    model, tokens = build(attention), prompt()
    expected = greedy(model.decoder, tokens)
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
        assert torch.equal(continued, greedy(model.decoder, row[None])[0, len(row) :])


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
    assert torch.equal(generate(model, tokens, max_new_tokens=3), greedy(model.decoder, tokens, new=3))


@pytest.mark.parametrize("attention", ["tra", "rope"])
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
    assert torch.equal(generate(model, tokens, prefill_chunk_size=5), greedy(model.decoder, tokens))


@every_mechanism
def test_assisted_generation_forgets_the_tokens_it_takes_back(attention: str) -> None:
    model, tokens = build(attention), prompt(batch=1, length=3).repeat(1, 4)
    cropped = []
    model.generation_config.prompt_lookup_num_tokens = 3
    if attention == "selective":
        with pytest.raises(ValueError, match="the cache of selective attention cannot be cropped"):
            generate(model, tokens)
        return
    crop = TraCache.crop
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraCache, "crop", lambda cache, tokens: cropped.append(tokens) or crop(cache, tokens))
        assert torch.equal(generate(model, tokens), greedy(model.decoder, tokens))
    assert min(cropped) < 0


@every_mechanism
def test_generation_goes_on_from_the_cache_of_an_earlier_call(attention: str) -> None:
    model, tokens = build(attention), prompt()
    first = generate(model, tokens, max_new_tokens=6, return_dict_in_generate=True)
    more = torch.cat([first.sequences, prompt(length=2)], dim=1)
    assert torch.equal(generate(model, more, past_key_values=first.past_key_values), greedy(model.decoder, more))


def test_generation_from_embedded_tokens() -> None:
    model, tokens = build(), prompt()
    new = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), max_new_tokens=16, do_sample=False)
    assert torch.equal(new, greedy(model.decoder, tokens)[:, 7:])


def test_generation_ends_at_the_end_token_and_pads_after_it() -> None:
    model, tokens = build(), prompt()
    free = greedy(model.decoder, tokens)
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
    torch.testing.assert_close(model(tokens[rows, 5:], past_key_values=cache).logits, model.decoder(tokens)[rows, 5:])
    cache.batch_select_indices(torch.tensor([3, 0]))
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model.decoder(tokens))
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
    expected = greedy(model.decoder, tokens)[0, 7:]
    assert "".join(pieces).split() == [f"w{index}" for index in expected]


def test_a_pipeline_from_a_folder(tmp_path: Path) -> None:
    model, tokens = build(pad_token_id=0), prompt(batch=1)
    model.save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, padding_side="left")
    write = transformers.pipeline("text-generation", model=str(tmp_path), tokenizer=tokenizer, device="cpu")
    text = tokenizer.decode(tokens[0])
    written = write(text, max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    expected = greedy(model.decoder, tokens, new=5)[0, 7:]
    assert written.split() == [f"w{index}" for index in expected if index != 0]  # w0 is the padding, left out


@every_mechanism
@torch.no_grad()
def test_a_saved_model_gives_the_same_bits(attention: str, tmp_path: Path) -> None:
    model, tokens = build(attention), prompt(length=40)
    model.save_pretrained(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is TraForCausalLM
    assert not loaded.training
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is TraModel
    assert torch.equal(base(tokens, use_cache=False).last_hidden_state, model.decoder.hidden(tokens))


@every_mechanism
def test_a_new_model_starts_as_the_decoder_does(attention: str) -> None:
    torch.manual_seed(3)
    expected = Decoder(config(attention).decoder_config()).state_dict()
    torch.manual_seed(3)
    found = TraForCausalLM(config(attention)).decoder.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@every_mechanism
def test_weights_that_a_file_lacks_start_as_the_decoders_do(attention: str, tmp_path: Path) -> None:
    model = build(attention)
    model.save_pretrained(tmp_path)
    kept = {"decoder.norm.weight", "decoder.blocks.0.attention.query.weight"}
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: stored[name] for name in kept}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.manual_seed(3)
    loaded = TraForCausalLM.from_pretrained(tmp_path)
    torch.manual_seed(3)
    new = TraForCausalLM(config(attention))
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, (model if name in kept else new).state_dict()[name]), name
    for name, buffer in loaded.named_buffers():
        assert torch.equal(buffer, new.get_buffer(name)), name


def test_a_trained_decoder_becomes_a_model(tmp_path: Path) -> None:
    decoder = Decoder(DecoderConfig(vocabulary=11, layers=1, heads=2, width=16, attention="cope", residual="pre_norm"))
    model = from_decoder(decoder.double(), eos_token_id=4, pad_token_id=0)
    tokens = torch.randint(11, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(tokens, use_cache=False).logits, decoder.eval()(tokens))
    assert model.config.decoder_config() == decoder.config
    assert model.generation_config.eos_token_id == 4
    assert set(model.state_dict()) == {f"decoder.{name}" for name in decoder.state_dict()}
    model.save_pretrained(tmp_path)
    assert TraForCausalLM.from_pretrained(tmp_path).dtype == torch.float64


@every_mechanism
@pytest.mark.parametrize("keyword", ["dtype", "torch_dtype"])
@torch.no_grad()
def test_half_precision(attention: str, keyword: str, tmp_path: Path) -> None:
    model, tokens = build(attention), prompt()
    model.save_pretrained(tmp_path)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, **{keyword: torch.bfloat16})
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    logits = half(tokens).logits
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - model(tokens).logits).abs()
    # Most entries, since a score near a threshold may fall on its other side.
    assert error.flatten().quantile(0.8) < 0.05 * model(tokens).logits.abs().max()
    assert generate(half, tokens).shape == (2, 23)


def test_every_field_of_a_decoder_config_has_a_name_here() -> None:
    assert list(NAMES) == [field.name for field in fields(DecoderConfig)]
    decoder = DecoderConfig(7, 1, 2, 8, 1, "t5", False, 0.2, "pre_norm")
    assert TraConfig.from_decoder(decoder, bos_token_id=3).decoder_config() == decoder


def test_a_config_survives_its_file(tmp_path: Path) -> None:
    saved = config("fot", eos_token_id=[3, 4], pad_token_id=1, use_cache=False, dropout=0.3)
    saved.save_pretrained(tmp_path)
    for loaded in (
        TraConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        TraConfig.from_dict(saved.to_dict()),
        TraConfig(**saved.to_dict()),
    ):
        assert type(loaded) is TraConfig
        assert loaded.to_diff_dict() == saved.to_diff_dict()
    changed = TraConfig.from_pretrained(tmp_path, attention="rope", output_hidden_states=True)
    assert (changed.attention, changed.output_hidden_states, changed.dropout) == ("rope", True, 0.3)
    assert changed != saved


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"num_hiden_layers": 3}, "got 'num_hiden_layers'; did you mean 'num_hidden_layers'?"),
        ({"atention": "rope"}, "got 'atention'; did you mean 'attention'?"),
        ({"temperature": 0.5}, "keyword must be one of .*, got 'temperature'"),
        ({"attention": "ropee"}, "attention must be one of .*, got 'ropee'; did you mean 'rope'?"),
        ({"num_hidden_layers": 0}, "layers must be at least 1, got 0"),
        ({"residual": "post"}, "residual must be 'normalised' or 'pre_norm', got 'post'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
    ],
)
def test_a_wrong_keyword_is_named(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**keywords)


def test_a_misspelt_keyword_is_an_error_when_loading_too(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    for loader in (TraConfig, AutoConfig, TraForCausalLM, AutoModelForCausalLM):
        with pytest.raises(ValueError, match="got 'dropuot'; did you mean 'dropout'"):
            loader.from_pretrained(tmp_path, dropuot=0.5)
        loaded = loader.from_pretrained(tmp_path, dropout=0.5)
        assert getattr(loaded, "config", loaded).dropout == 0.5
    with pytest.raises(ValueError, match="got 'dropuot'; did you mean 'dropout'"):
        TraConfig.from_dict(config().to_dict(), dropuot=0.5)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "qk_nrom": False}))
    with pytest.raises(ValueError, match="got 'qk_nrom'; did you mean 'qk_norm'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_keyword_beside_a_config_is_an_error(tmp_path: Path) -> None:
    """It would change nothing."""
    model = build()
    model.save_pretrained(tmp_path)
    for build_another in (
        lambda: TraForCausalLM(model.config, attention="rope"),
        lambda: TraForCausalLM.from_pretrained(tmp_path, config=model.config, attention="rope"),
        lambda: AutoModelForCausalLM.from_config(model.config, attention="rope"),
        lambda: TraModel(model.config, attention="rope"),
    ):
        with pytest.raises(ValueError, match="attention must be given to the TraConfig, which is already there"):
            build_another()


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"width must be a multiple of heads \(4\), got 30"):
        TraForCausalLM(config(hidden_size=30))
    with pytest.raises(ValueError, match=r"kv_heads must divide heads \(4\), got 3"):
        TraForCausalLM(config(num_key_value_heads=3))


@pytest.mark.parametrize("implementation", ["flash_attention_2", "sdpa", "kernels-community/flash-attn"])
def test_another_attention_implementation_is_refused(implementation: str, tmp_path: Path) -> None:
    message = f"attn_implementation must be None: attention decides, got '{implementation}'"
    build().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        TraForCausalLM.from_pretrained(tmp_path, attn_implementation=implementation)
    with pytest.raises(ValueError, match=message):
        TraForCausalLM(config(attn_implementation=implementation))


class Spy:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.file, "ran")


def test_loading_runs_no_code_that_a_folder_holds(tmp_path: Path) -> None:
    model, ran = tmp_path / "model", tmp_path / "ran"
    build().save_pretrained(model)
    program = f"from pathlib import Path\nPath({str(ran)!r}).write_text('ran')\n"
    for file in ("modeling_tra.py", "configuration_tra.py", "custom_generate/generate.py"):
        (model / file).parent.mkdir(exist_ok=True)
        (model / file).write_text(program)
    for loader in (AutoModelForCausalLM, TraForCausalLM):
        loader.from_pretrained(model, trust_remote_code=True)
    assert not ran.exists()

    file = model / "config.json"
    plain = file.read_text()
    code = {"AutoConfig": "configuration_tra.TraConfig", "AutoModelForCausalLM": "modeling_tra.TraForCausalLM"}
    file.write_text(json.dumps({**json.loads(plain), "auto_map": code}))
    for trust in (None, False, True):
        with pytest.raises(ValueError, match=r"keyword must be one of .*, got 'auto_map'"):
            AutoModelForCausalLM.from_pretrained(model, trust_remote_code=trust)
    assert not ran.exists()

    file.write_text(plain)
    (model / "model.safetensors").unlink()
    with (model / "pytorch_model.bin").open("wb") as weights:
        pickle.dump({"decoder.norm.weight": Spy(ran)}, weights)
    for loader in (AutoModelForCausalLM, TraForCausalLM):
        with pytest.raises(OSError, match=r"model\.safetensors"):
            loader.from_pretrained(model)
    with pytest.raises(ValueError, match="use_safetensors must be True"):
        TraForCausalLM.from_pretrained(model, use_safetensors=False)
    assert not ran.exists()


@torch.no_grad()
def test_the_loss_is_that_of_the_next_token_and_leaves_out_minus_100() -> None:
    model, tokens = build(), prompt(batch=3, length=9)
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[2, 5] = -100
    out = model(tokens, labels=labels)
    scored = [(row, place) for row in range(3) for place in range(1, 9) if labels[row, place] != -100]
    losses = [F.cross_entropy(out.logits[row, place - 1], tokens[row, place]) for row, place in scored]
    assert len(scored) == 24 - 3 - 1
    torch.testing.assert_close(out.loss, torch.stack(losses).mean())
    shared = model(tokens, labels=labels, num_items_in_batch=50).loss
    torch.testing.assert_close(shared, torch.stack(losses).sum() / 50)


@torch.no_grad()
def test_outputs_that_may_be_asked_for() -> None:
    model, tokens = build(), prompt()
    full = model(tokens, output_hidden_states=True)
    assert [tuple(states.shape) for states in full.hidden_states] == [(2, 7, 32)] * 3
    assert torch.equal(full.hidden_states[0], model.decoder.embedding(tokens))
    torch.testing.assert_close(model.decoder.head(full.hidden_states[-1]), full.logits)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, full.logits[:, -2:])
    places = torch.tensor([4, 1])
    torch.testing.assert_close(model(tokens, logits_to_keep=places).logits, full.logits[:, places])
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    torch.testing.assert_close(logits, full.logits)
    assert loss.shape == ()
    assert model(tokens, use_cache=False).past_key_values is None
    assert isinstance(full.past_key_values, TraCache)
    model.config.use_cache = False
    assert model(tokens).past_key_values is None
    assert torch.equal(model(inputs_embeds=model.decoder.embedding(tokens)).logits, model(tokens).logits)


@every_mechanism
@torch.no_grad()
def test_attentions_are_the_exact_matrices(attention: str) -> None:
    model = build(attention, num_key_value_heads=4)
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (9, 6)])
    attentions = model(tokens, attention_mask=mask, output_attentions=True).attentions
    expected = model.decoder.attention_weights(tokens, key_mask=mask.bool())
    assert len(attentions) == 2
    for found, exact in zip(attentions, expected, strict=True):
        assert found.shape == (2, 4, 9, 9)
        assert torch.equal(found, exact)
        assert (found.triu(1) == 0).all()
        assert (found[1, ..., :3] == 0).all()
    # The matrix explains what the layer does with the values.
    layer, read = model.decoder.blocks[0], model.decoder.embedding(tokens)
    value = layer.attention.value(layer.attention_norm(read)).unflatten(-1, (4, 8)).transpose(1, 2)
    mixed = layer.attention.finished(attentions[0] @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(
        layer.attention.output(mixed), layer.attention(layer.attention_norm(read), key_mask=mask.bool())
    )
    if attention not in ("differential", "stick-breaking"):
        total = attentions[0].sum(-1)
        torch.testing.assert_close(total, (total > 0).float())


def test_attentions_while_generating_need_all_tokens() -> None:
    model, tokens = build(), prompt()
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    with pytest.raises(ValueError, match="output_attentions needs all tokens in one pass"):
        generate(model, tokens, **options)
    out = generate(model, tokens, use_cache=False, **options)
    assert [step[0].shape[-1] for step in out.attentions] == [7, 8, 9]


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model, first, second = build(), prompt(length=6), prompt(length=9)
    segment_ids = torch.tensor([[0] * 6 + [1] * 9] * 2)
    packed = model(torch.cat([first, second], dim=1), segment_ids=segment_ids).logits
    torch.testing.assert_close(packed[:, 6:], model(second).logits)


@torch.no_grad()
def test_wrong_inputs_are_named() -> None:
    model, tokens = build(), prompt()
    for wrong, message in (
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, r"attention_mask must have the shape .* = \[2, 7\]"),
        ({"attention_mask": torch.ones(2, 6)}, r"attention_mask must have the shape .* = \[2, 7\].* got \[2, 6\]"),
        ({"past_key_values": transformers.DynamicCache()}, "past_key_values must be a TraCache, got DynamicCache"),
        ({"inputs_embeds": torch.zeros(2, 7, 32)}, "input_ids or inputs_embeds must be given, and not both"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **wrong)
    # Mechanisms find positions by themselves: others given from outside must not pass unnoticed.
    with pytest.raises(TypeError, match="position_ids"):
        model(tokens, position_ids=torch.arange(7)[None])
    with pytest.raises(TypeError, match="position_ids"):
        generate(model, tokens, position_ids=torch.arange(7)[None])


@pytest.mark.parametrize("mean_resizing", [True, False])
@pytest.mark.parametrize("size", [VOCABULARY + 8, VOCABULARY - 4])
def test_a_resized_vocabulary_keeps_what_was_learned(size: int, mean_resizing: bool, tmp_path: Path) -> None:
    model, tokens = build(), torch.randint(VOCABULARY - 4, (2, 7))
    with torch.no_grad():
        before = model(tokens).logits
    model.resize_token_embeddings(size, mean_resizing=mean_resizing)
    with torch.no_grad():
        after = model(tokens).logits
    assert after.shape == (2, 7, size)
    kept = min(size, VOCABULARY)
    torch.testing.assert_close(after[..., :kept], before[..., :kept])
    assert model.config.vocab_size == model.decoder.config.vocabulary == size
    if not mean_resizing:  # new ones start as the decoder's do
        assert model.decoder.embedding.weight[kept:].abs().sum() <= 0.01 * max(size - kept, 0) * 32
        assert model.decoder.head.weight[kept:].abs().sum() <= 0.1 * max(size - kept, 0) * 32
    model(tokens, labels=tokens).loss.backward()
    assert model.decoder.head.weight.grad.shape == (size, 32)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, after)
    base = AutoModel.from_pretrained(tmp_path)
    base.resize_token_embeddings(size + 1)
    assert base.get_input_embeddings().weight.shape == (size + 1, 32)


@pytest.mark.parametrize("attention", ["tra", "rope", "cope"])
def test_gradient_checkpointing_computes_blocks_again_and_changes_no_gradient(attention: str) -> None:
    model, tokens, calls = build(attention, dropout=0.2).train(), prompt(length=20), []
    model.decoder.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))

    def gradients() -> list[Tensor]:
        torch.manual_seed(5)
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    again = gradients()
    assert len(calls) == 3
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))
    assert generate(model.eval(), tokens).shape == (2, 36)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def counting(rows: int) -> list[dict[str, list[int]]]:
    """Sequences that count upwards, with the first two tokens left out of the loss."""
    starts = torch.randint(VOCABULARY, (rows,)).tolist()
    sequences = [[(start + step) % VOCABULARY for step in range(12)] for start in starts]
    return [{"input_ids": ids, "labels": [-100, -100, *ids[2:]]} for ids in sequences]


def trainer(model: Any, folder: Path, **options: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=counting(400),
        eval_dataset=counting(16),
        data_collator=transformers.default_data_collator,
    )


@pytest.mark.parametrize("attention, checkpointing", [("tra", False), ("rope", False), ("tra", True)])
def test_trainer_fine_tunes(attention: str, checkpointing: bool, tmp_path: Path) -> None:
    model = TraForCausalLM(config(attention))
    run = trainer(model, tmp_path / "run", max_steps=50, gradient_checkpointing=checkpointing)
    before = run.evaluate()["eval_loss"]
    run.train()
    after = run.evaluate()["eval_loss"]
    assert before > 2.5
    assert after < 1.0
    start = torch.arange(4)[None]
    assert torch.equal(generate(model.eval(), start, max_new_tokens=5), torch.arange(9)[None])
    run.save_model(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(loaded(start).logits, model(start).logits)


def test_gradient_accumulation_divides_by_all_labels(tmp_path: Path) -> None:
    """Two steps of four rows are one step of eight, although the rows count different numbers of labels."""
    rows = counting(8)
    for index, row in enumerate(rows):
        row["labels"][2 : 2 + index] = [-100] * index
    found = []
    for size, steps in ((8, 1), (4, 2)):
        torch.manual_seed(0)
        model = TraForCausalLM(config(dropout=0.0))
        run = trainer(model, tmp_path, max_steps=1, gradient_accumulation_steps=steps)
        run.args.per_device_train_batch_size = run._train_batch_size = size
        run.train_dataset = rows
        run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(rows)
        run.train()
        found.append(model.decoder.head.weight.detach())
    torch.testing.assert_close(found[0], found[1])


def test_lora_trains_is_saved_loaded_and_merged(tmp_path: Path) -> None:
    tokens = torch.tensor([row["input_ids"] for row in counting(16)])
    model = build(dropout=0.0)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        untrained = model(tokens).logits
    lora = peft.LoraConfig(r=4, target_modules=["query", "value"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, lora)
    trained = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
    with torch.no_grad():
        assert torch.equal(tuned(tokens).logits, untrained)

    run = trainer(tuned, tmp_path / "run", max_steps=30)
    before = run.evaluate()["eval_loss"]
    run.train()
    assert run.evaluate()["eval_loss"] < 0.8 * before
    tuned.eval()
    tuned.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = tuned(tokens).logits
        again = peft.PeftModel.from_pretrained(TraForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
        assert torch.equal(again(tokens).logits, expected)
        assert torch.equal(generate(again, tokens), generate(again, tokens, use_cache=False))
        merged = again.merge_and_unload()
        assert type(merged) is TraForCausalLM
        torch.testing.assert_close(merged(tokens).logits, expected, rtol=1e-4, atol=1e-4)
        native = TraForCausalLM.from_pretrained(tmp_path / "base")
        native.load_adapter(str(tmp_path / "adapter"))
        assert torch.equal(native(tokens).logits, expected)

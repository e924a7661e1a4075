"""Caches on disk: the same as in memory, checked when they are read again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tra import model as decoders
from tra.attention.cache_file import FileCache
from tra.errors import RunError
from tra.model import Decoder, DecoderConfig

CONFIG = DecoderConfig(vocabulary=11, layers=2, heads=2, width=16)


@pytest.fixture
def model() -> Decoder:
    return Decoder(CONFIG).eval()


def test_reading_goes_on_from_a_saved_cache_with_the_same_bits(model: Decoder, tmp_path: Path) -> None:
    tokens = torch.randint(11, (2, 37))
    with torch.inference_mode():
        cache = model.new_cache()
        model(tokens[:, :30], cache=cache)
        model.save_cache(tmp_path / "cache.safetensors", cache, tokens[:, :30])
        expected = model(tokens[:, 30:], cache=cache)
        loaded, read = model.load_cache(tmp_path / "cache.safetensors")
        assert torch.equal(read, tokens[:, :30])
        assert torch.equal(model(tokens[:, 30:], cache=loaded), expected)
    used = 2 * 2 * 2 * 2 * 30 * 8 * 4  # layers, keys and values, batch, heads, tokens, width, bytes
    assert used < (tmp_path / "cache.safetensors").stat().st_size < used + 5000


def test_the_cache_of_something_else_is_refused_by_name(model: Decoder, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = model.new_cache()
    with pytest.raises(ValueError, match="at least one token"):
        model.save_cache(path, cache)
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    model.save_cache(path, cache, tokenizer="mine")
    others = {
        "another config": (Decoder(replace(CONFIG, attention_options={"threshold": 0.5})), "mine"),
        "another weights": (Decoder(CONFIG), "mine"),
        "another dtype": (model, "mine"),
        "another tokenizer: mine, not yours": (model, "yours"),
    }
    for message, (other, tokenizer) in others.items():
        if message == "another dtype":
            other = Decoder(CONFIG)
            other.load_state_dict(model.state_dict())
            other = other.bfloat16()
        with pytest.raises(RunError, match=message if message != "another dtype" else "another (dtype|weights)"):
            other.load_cache(path, tokenizer=tokenizer)
    filled = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=filled)
    with pytest.raises(ValueError, match="must be empty"):
        model.load_cache(path, filled, tokenizer="mine")
    with pytest.raises(RunError, match="there is no cache"):
        model.load_cache(tmp_path / "nothing")
    whole = path.read_bytes()
    for damaged in (whole[:-40], whole[:60], b"", b"{}" * 100):
        path.write_bytes(damaged)
        with pytest.raises(RunError, match=r"no intact cache|no cache of this package"):
            model.load_cache(path, tokenizer="mine")


def test_a_cache_in_a_file_is_the_cache_in_memory(model: Decoder, tmp_path: Path) -> None:
    tokens = torch.randint(11, (1, 700))
    with torch.inference_mode():
        here, there = model.new_cache(), model.new_cache(tmp_path, capacity=50)  # which must grow
        assert isinstance(there[0], FileCache)
        for piece in (*tokens[:, :690].split(300, 1), *tokens[:, 690:].split(1, 1)):
            assert torch.equal(model(piece, cache=here), model(piece, cache=there))
        there[0].release()
        again = torch.randint(11, (1, 1))
        assert torch.equal(model(again, cache=here), model(again, cache=there))
    assert list(tmp_path.iterdir()) == []  # nothing is left behind, whatever happens
    with pytest.raises(ValueError, match="folder must exist"):
        model.new_cache(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        model.new_cache(tmp_path, capacity=0)


def test_a_prompt_is_read_in_pieces(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(11, (2, 90))
    mask = torch.arange(90).expand(2, 90) >= torch.tensor([[0], [17]])
    expected = model.generate(tokens, 8, key_mask=mask)
    lengths: list[int] = []
    model.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[1]))
    monkeypatch.setattr(decoders, "READ_AT_ONCE", 25)
    assert torch.equal(model.generate(tokens, 8, key_mask=mask), expected)
    assert lengths[:5] == [25, 25, 25, 15, 1]

"""Caches on disk: the same as in memory, checked when they are read again."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tra import model as decoders
from tra.attention.cache import Cache, StaticCache
from tra.attention.cache_file import FileCache
from tra.attention.far_cache import FarCache
from tra.errors import RunError
from tra.hub import from_decoder, generation
from tra.hub.generation import reader as hub_reader
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
    half = Decoder(CONFIG)
    half.load_state_dict(model.state_dict())
    for message, other, tokenizer in (
        ("another config", Decoder(replace(CONFIG, attention_options={"threshold": 0.5})), "mine"),
        ("another weights", Decoder(CONFIG), "mine"),
        ("another dtype: torch.float32, not torch.bfloat16", half.bfloat16(), "mine"),
        ("another tokenizer: mine, not yours", model, "yours"),
    ):
        with pytest.raises(RunError, match=message):
            other.load_cache(path, tokenizer=tokenizer)
    filled = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=filled)
    with pytest.raises(ValueError, match="must be empty"):
        model.load_cache(path, filled, tokenizer="mine")
    with pytest.raises(RunError, match="there is no cache"):
        model.load_cache(tmp_path / "nothing")


def test_a_damaged_file_is_refused_and_nothing_is_read_of_it(model: Decoder, tmp_path: Path) -> None:
    path, cache = tmp_path / "cache.safetensors", model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    model.save_cache(path, cache)
    whole = path.read_bytes()
    one_byte = bytearray(whole)
    one_byte[-7] ^= 1
    other_shape = whole.replace(b"[1,2,5,8]", b"[1,5,2,8]", 1)
    other_config = whole.replace(b"about", b"abuot")
    for damaged in (whole[:-40], whole[:60], b"", b"{}" * 100, one_byte, other_shape, other_config):
        path.write_bytes(damaged)
        filled = model.new_cache()
        with pytest.raises(RunError, match=r"no intact cache|no cache of this package"):
            model.load_cache(path, filled)
        assert [len(layer) for layer in filled] == [0, 0]
    path.unlink()
    os.mkfifo(path)  # nobody writes to it
    with pytest.raises(RunError, match=r"could not read the cache .*Not a regular file"):
        model.load_cache(path)


def test_where_a_cache_cannot_be_written_the_one_before_stays(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache, tokens = tmp_path / "cache.safetensors", model.new_cache(), torch.zeros(1, 5, dtype=torch.long)
    with torch.no_grad():
        model(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"tokens must have the shape \[1, 5\] of the cache, got \[1, 4\]"):
        model.save_cache(path, cache, tokens[:, :4])
    model.save_cache(path, cache)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(RunError, match=r"could not write the cache .*No space left on device"):
        model.save_cache(path, cache)
    with pytest.raises(RunError, match="could not write the cache"):
        model.save_cache(tmp_path / "nowhere" / "cache.safetensors", cache)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_folder_is_never_replaced_by_a_cache(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
    with pytest.raises(RunError, match=r"could not write the cache .*run: something that is no file has this name"):
        model.save_cache(tmp_path / "run", cache)
    assert (tmp_path / "run" / "recipe.json").read_text() == "{}"


def test_layers_that_do_not_fit_together_are_refused(model: Decoder, tmp_path: Path) -> None:
    path, cache, other = tmp_path / "cache.safetensors", model.new_cache(), model.new_cache()
    with torch.no_grad():
        model(torch.zeros(1, 5, dtype=torch.long), cache=cache)
        model(torch.zeros(1, 3, dtype=torch.long), cache=other)
    with pytest.raises(ValueError, match=r"as many tokens in every layer to be saved, got \[5, 3\]"):
        model.save_cache(path, [cache[0], other[1]])
    model.save_cache(path, cache)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"cache must have the 2 layers that .* holds, got {count}"):
            model.load_cache(path, [Cache() for _ in range(count)])
    for full in ([StaticCache(8), StaticCache(4)], [FarCache(near=1), StaticCache(4)]):
        with pytest.raises(ValueError, match="its capacity is 4"):
            model.load_cache(path, full)
        assert [len(layer) for layer in full] == [0, 0]


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the place of a file cannot be taken here")
def test_a_full_disk_is_an_error_before_anything_is_written_to_it(
    model: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write to mapped memory that the disk has no place for would kill the process."""
    there = model.new_cache(tmp_path, capacity=8)
    with torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.long), cache=there)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with torch.no_grad(), pytest.raises(RunError, match=r"could not make a cache of 1,024 bytes in .*No space left"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=there)
    assert [len(layer) for layer in there] == [8, 8]
    there[0].release()
    assert there[0].stored[0].isfinite().all()


def test_every_kind_of_cache_is_saved_as_far_as_it_is_used(model: Decoder, tmp_path: Path) -> None:
    tokens = torch.randint(11, (1, 30))

    def kinds() -> list[list[Cache]]:
        others = [[StaticCache(64) for _ in range(2)], [FarCache(near=4) for _ in range(2)]]
        return [model.new_cache(), model.new_cache(tmp_path, capacity=50), *others]

    with torch.inference_mode():
        expected = model(tokens, cache=model.new_cache())[:, -1]
        sizes = set()
        for number, cache in enumerate(kinds()):
            path = tmp_path / f"{number}.safetensors"
            model(tokens[:, :29], cache=cache)
            model.save_cache(path, cache, tokens[:, :29])
            sizes.add(path.stat().st_size)
            for other in kinds():
                model.load_cache(path, other)
                torch.testing.assert_close(model(tokens[:, 29:], cache=other)[:, -1], expected)
    assert len(sizes) == 1


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


@pytest.mark.parametrize("size", [33, 44, 89], ids=str)
@pytest.mark.parametrize("attention", ["tra", "tra-learned"])
def test_a_prompt_read_in_pieces_has_the_bits_of_one_piece(
    attention: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Decoder(replace(CONFIG, attention=attention)).eval()
    tokens = torch.randint(11, (1, 90))
    twice, mask = tokens.expand(2, 90), torch.arange(90).expand(2, 90) >= torch.tensor([[0], [17]])
    scores, expected = model.reader()(tokens, None), model.generate(twice, 8, key_mask=mask)
    hub = from_decoder(model).eval()
    assert torch.equal(hub_reader(hub)(tokens, None), scores)
    lengths: list[int] = []
    model.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[1]))
    monkeypatch.setattr(decoders, "READ_AT_ONCE", size)
    monkeypatch.setattr(generation, "READ_AT_ONCE", size)
    assert torch.equal(model.reader()(tokens, None), scores)
    assert lengths == {33: [33, 33, 24], 44: [44, 28, 18], 89: [73, 17]}[size]
    assert torch.equal(model.generate(twice, 8, key_mask=mask), expected)
    assert torch.equal(hub_reader(hub)(tokens, None), scores)

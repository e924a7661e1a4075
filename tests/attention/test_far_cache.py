"""A cache whose far part lies on another device: here a second store, since a CPU has no other device."""

import math

import pytest
import torch

from tra.attention.far_cache import FarCache
from tra.model import Decoder, DecoderConfig

CONFIG = DecoderConfig(vocabulary=11, layers=2, heads=2, width=16, kv_heads=1)


@pytest.mark.parametrize("attention", ["tra", "tra-learned"])
def test_reading_and_writing_have_the_bits_of_a_cache_in_one_place(attention: str) -> None:
    model = Decoder(DecoderConfig(11, 2, 2, 16, attention=attention)).eval()
    tokens = torch.randint(11, (2, 160))
    mask = torch.arange(160).expand(2, 160) >= torch.tensor([[0], [37]])
    for key_mask in (None, mask):
        here, there = model.new_cache(), [FarCache(near=20) for _ in range(2)]
        for start, end in ((0, 70), (70, 130), *((at, at + 1) for at in range(130, 160))):
            given = None if key_mask is None else key_mask[:, :end]
            with torch.inference_mode():
                expected = model(tokens[:, start:end], cache=here, key_mask=given)
                assert torch.equal(model(tokens[:, start:end], cache=there, key_mask=given), expected)
        assert [len(cache) for cache in there] == [160, 160]
        assert all(20 <= cache.here[0].shape[2] <= 40 for cache in there)
        assert all(torch.equal(*pair) for pair in zip(there[1].stored, here[1].stored, strict=True))


def test_far_keys_are_fetched_only_if_a_row_reaches_them() -> None:
    """Far values are not numbers: whoever read them would show it."""
    model = Decoder(CONFIG).eval()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.gate.weight)
        torch.nn.init.constant_(block.attention.gate.bias, -3.0)  # each step of distance costs 3
    caches = [FarCache(near=400) for _ in range(2)]
    with torch.inference_mode():
        model(torch.randint(11, (1, 1000)), cache=caches)
        for cache in caches:
            cache.fetched = 0
            cache.far.stored[1].fill_(math.nan)
        assert model(torch.tensor([[3]]), cache=caches).isfinite().all()
        assert [cache.fetched for cache in caches] == [0, 0]
        for block in model.blocks:
            torch.nn.init.constant_(block.attention.gate.bias, 12.0)  # next to nothing: all keys count
        assert not model(torch.tensor([[3]]), cache=caches).isfinite().all()
        assert caches[0].fetched == len(caches[0].far)


def test_far_keys_are_moved_between_two_devices() -> None:
    """PyTorch's device without data stands for another one: what goes there cannot come back."""
    cache = FarCache(near=4, device="meta")
    key = torch.arange(20.0).view(1, 1, 20, 1)
    cache.extend(key, key)
    assert [tensor.device.type for tensor in cache.far.stored] == ["meta", "meta"]
    assert [tensor.flatten().tolist() for tensor in cache.here] == [[16, 17, 18, 19]] * 2
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        cache.fetch(3, 7)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ValueError, match="near must be at least 1, got 0"):
        FarCache(near=0)
    tokens = torch.zeros(1, 3, dtype=torch.long)
    for changes in ({"attention": "rope"}, {"attention_options": {"qk_norm": False}}):
        model = Decoder(DecoderConfig(11, 1, 2, 16, **changes)).eval()
        with torch.inference_mode(), pytest.raises(ValueError, match="must not be a FarCache for a mechanism"):
            model(tokens, cache=[FarCache()])
    model = Decoder(DecoderConfig(11, 1, 2, 16)).eval()
    with pytest.raises(ValueError, match="records no gradients"):
        model(tokens, cache=[FarCache()])
    with torch.inference_mode(), pytest.raises(ValueError, match="packed documents"):
        model(tokens, cache=[FarCache()], segment_ids=tokens)
    cache = FarCache(near=2)
    cache.extend(torch.zeros(1, 1, 9, 2))
    cache.crop(8)
    assert len(cache) == 8
    with pytest.raises(ValueError, match="at least the 7 tokens that were moved away, got 3"):
        cache.crop(3)

import pytest
import torch

from tra.attention import Cache


def test_appending_token_by_token_reallocates_logarithmically_often() -> None:
    cache, addresses = Cache(), set()
    tokens = torch.randn(1, 2, 1000, 4)
    for token in tokens.split(1, dim=2):
        (stored,) = cache.append(token)
        addresses.add(stored.data_ptr())
    assert torch.equal(stored, tokens)
    assert len(addresses) <= 11


def test_goes_on_outside_inference_mode_what_began_in_it() -> None:
    cache, tokens = Cache(), torch.randn(1, 2, 9, 4)
    with torch.inference_mode():
        cache.append(tokens[:, :, :4])
        cache.append(tokens[:, :, 4:5])  # reserves room
    with torch.no_grad():
        cache.append(tokens[:, :, 5:6])
        (stored,) = cache.append(tokens[:, :, 6:8])
    with torch.inference_mode():
        (stored,) = cache.append(tokens[:, :, 8:])
    assert torch.equal(stored, tokens)


def test_stores_any_tensors_side_by_side() -> None:
    cache = Cache()
    key, log_forget = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5)
    cache.append(key[:, :, :2], log_forget[:, :, :2])
    stored_key, stored_forget = cache.append(key[:, :, 2:], log_forget[:, :, 2:])
    assert torch.equal(stored_key, key)
    assert torch.equal(stored_forget, log_forget)


def test_select_keeps_rows_in_the_order_given_and_the_cache_goes_on_from_them() -> None:
    cache = Cache()
    key, log_forget = torch.randn(3, 2, 6, 4), torch.randn(3, 2, 6)
    cache.append(key[:, :, :5], log_forget[:, :, :5])
    rows = torch.tensor([2, 0, 2, 1])
    cache.select(rows)
    stored_key, stored_forget = cache.append(key[rows, :, 5:], log_forget[rows, :, 5:])
    assert torch.equal(stored_key, key[rows])
    assert torch.equal(stored_forget, log_forget[rows])


def test_crop_forgets_the_last_tokens_and_others_take_their_place() -> None:
    cache = Cache()
    tokens, others = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 4, 4)
    cache.append(tokens)
    cache.crop(5)
    assert len(cache) == 5
    (stored,) = cache.append(others)
    assert torch.equal(stored, torch.cat([tokens[:, :, :5], others], dim=2))


def test_crop_to_nothing_and_select_of_an_empty_cache() -> None:
    cache = Cache()
    cache.select(torch.tensor([1, 0]))
    cache.crop(0)
    assert len(cache) == 0
    cache.append(torch.randn(2, 1, 3, 4))
    cache.crop(0)
    (stored,) = cache.append(token := torch.randn(2, 1, 1, 4))
    assert torch.equal(stored, token)


@pytest.mark.parametrize("length", [-1, 4])
def test_crop_to_a_wrong_length_is_named(length: int) -> None:
    cache = Cache()
    cache.append(torch.randn(1, 1, 3, 4))
    with pytest.raises(ValueError, match=f"length must be between 0 and the 3 tokens in the cache, got {length}"):
        cache.crop(length)

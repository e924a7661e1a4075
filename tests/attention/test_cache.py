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


def test_stores_any_tensors_side_by_side() -> None:
    cache = Cache()
    key, log_forget = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5)
    cache.append(key[:, :, :2], log_forget[:, :, :2])
    stored_key, stored_forget = cache.append(key[:, :, 2:], log_forget[:, :, 2:])
    assert torch.equal(stored_key, key)
    assert torch.equal(stored_forget, log_forget)

"""The rule against a plain loop, and the task against plain Python. `pytest` in this folder runs them."""

import math

import pytest
import torch
from own_mechanism.digit_sum import DigitSum
from own_mechanism.sliding_window import SlidingWindowAttention

from tra.attention import Cache, Context


@torch.no_grad()
@pytest.mark.parametrize("window", [1, 3, 50])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_every_token_sees_itself_and_the_few_before_it(window: int, kv_heads: int) -> None:
    attention = SlidingWindowAttention(16, 2, kv_heads, window=window)
    x, key_mask = torch.randn(2, 11, 16), torch.ones(2, 11, dtype=torch.bool)
    key_mask[1, :3] = False
    found = attention.weights(x, Context(key_mask=key_mask))
    query, key, _ = attention.project(x, Context())
    for row in range(2):
        for head in range(2):
            for place in range(11):
                seen = [j for j in range(max(0, place - window + 1), place + 1) if key_mask[row, j]]
                mine, keys = query[row, head, place], key[row, head * kv_heads // 2]
                scores = [math.exp(mine @ keys[j] / math.sqrt(8)) for j in seen]
                expected = torch.zeros(11)
                for j, score in zip(seen, scores, strict=True):
                    expected[j] = score / sum(scores)
                torch.testing.assert_close(found[row, head, place], expected)


@torch.no_grad()
def test_a_cache_changes_nothing() -> None:
    attention, x, cache = SlidingWindowAttention(16, 2, window=4), torch.randn(2, 11, 16), Cache()
    pieces = [attention(piece, Context(cache)) for piece in x.split([5, 1, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), attention(x))


def test_the_last_token_is_the_sum_modulo_ten() -> None:
    batch = DigitSum().sample(torch.Generator().manual_seed(0), 63, 17)
    for tokens, counted in zip(batch.tokens.tolist(), batch.counted.tolist(), strict=True):
        assert tokens[-2:] == [10, sum(tokens[:17]) % 10]
        assert counted == [False] * 18 + [True]
    assert batch.tokens[:, :-2].unique().tolist() == list(range(10))
    assert DigitSum(largest=1).sample(torch.Generator(), 63, 5).tokens[:, :5].max() == 1


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        SlidingWindowAttention(16, 2, window=0)
    with pytest.raises(ValueError, match="largest must be a digit from 1 to 9, got 10"):
        DigitSum(largest=10)

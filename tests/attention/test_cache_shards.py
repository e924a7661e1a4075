"""Processes that share a sequence, for mechanisms that read all keys: what one process computes."""

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.distributed.threads import in_threads
from tra.attention import MECHANISMS, Attention, Cache, Context, RotaryAttention
from tra.attention.cache_shards import ShardCache
from tra.distributed import ContextParallel

EDGES = [0, 13, 14, 37]
"""Of shards: unequal, and one of a single token."""
READS_ALL = sorted(name for name, rule in MECHANISMS.items() if not (rule.takes_shards or rule.revises_cache))


def inputs(masked: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x = torch.randn(2, EDGES[-1], 16, generator=torch.Generator().manual_seed(0))
    if not masked:
        return x, None, None
    place = torch.arange(EDGES[-1])
    return x, place.expand(2, -1) >= torch.tensor([[0], [5]]), place // torch.tensor([[11], [20]])


def on_shard(shards: ContextParallel, attention: Attention, masked: bool) -> tuple[Tensor, Tensor]:
    """The output of this process's tokens, and the gradient of its input."""
    x, key_mask, segment_ids = inputs(masked)
    begin, end = EDGES[shards.rank], EDGES[shards.rank + 1]
    mine = x[:, begin:end].clone().requires_grad_()
    if key_mask is None or segment_ids is None:
        out = attention(mine, Context(ShardCache(shards, shards.layout(mine))))
    else:
        layout = shards.layout(mine, key_mask[:, begin:end], segment_ids[:, begin:end])
        out = attention(mine, Context(ShardCache(shards, layout), key_mask[:, :end], segment_ids[:, :end]))
    # Parameters are those of all threads, so gradients are asked for rather than added up.
    return out.detach(), torch.autograd.grad(out.square().sum(), mine)[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", READS_ALL)
def test_shards_are_the_sequence_of_one_process(name: str, masked: bool) -> None:
    torch.manual_seed(1)
    attention = MECHANISMS[name](16, 2).eval()
    x, key_mask, segment_ids = inputs(masked)
    whole = x.requires_grad_()
    out = attention(whole, Context(None, key_mask, segment_ids))
    out.square().sum().backward()
    outputs, gradients = zip(*in_threads(3, 16, partial(on_shard, attention=attention, masked=masked)), strict=True)
    seen = slice(None) if key_mask is None else key_mask
    assert_close(torch.cat(outputs, 1)[seen], out.detach()[seen], rtol=1e-4, atol=1e-5)
    assert whole.grad is not None
    assert_close(torch.cat(gradients, 1)[seen], whole.grad[seen], rtol=1e-4, atol=1e-5)


def test_all_processes_go_on_behind_the_sequence() -> None:
    attention = MECHANISMS["rope"](16, 2).eval()
    x, new = inputs(False)[0], torch.randn(2, 1, 16)

    def written(shards: ContextParallel) -> Tensor:
        mine, behind = x[:, EDGES[shards.rank] : EDGES[shards.rank + 1]], Cache()
        with torch.no_grad():
            attention(mine, Context(ShardCache(shards, shards.layout(mine), behind)))
            assert len(behind) == EDGES[-1]
            return attention(new, Context(behind))

    with torch.no_grad():
        expected = attention(torch.cat([x, new], 1))[:, -1:]
    for found in in_threads(3, 16, written):
        assert_close(found, expected)


def test_a_shard_is_remembered_once_and_what_goes_on_has_no_gradients() -> None:
    def twice(shards: ContextParallel) -> None:
        tokens = torch.zeros(1, 2, 3, 4)
        cache = ShardCache(shards, shards.layout(tokens[:, 0]))
        with pytest.raises(ValueError, match="takes the 3 tokens of its shard once, got 2"):
            cache.append(tokens[:, :, :2])
        cache.append(tokens)
        with pytest.raises(ValueError, match="of its shard once, got 3"):
            cache.append(tokens)
        with pytest.raises(ValueError, match="cache must be None where processes share sequences and gradients"):
            ShardCache(shards, cache.layout, Cache()).append(tokens.requires_grad_())

    in_threads(2, 16, twice)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_many_rows_are_read_piece_by_piece_with_the_gradients_of_all_at_once(
    dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = RotaryAttention(16, 2, dropout=dropout).double()
    before, x = torch.randn(2, 13, 16).double(), torch.randn(2, 24, 16).double().requires_grad_()

    def output_and_gradient() -> tuple[Tensor, Tensor]:
        cache = Cache()
        attention(before, Context(cache))
        torch.manual_seed(5)
        out = attention(x, Context(cache))
        return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]

    expected = output_and_gradient()
    monkeypatch.setattr("tra.attention.base.PAIRS_AT_ONCE", 10 * 37)
    found = output_and_gradient()
    if dropout == 0.0:
        assert_close(found, expected)
    # What backward computes again drops the same weights.
    monkeypatch.setattr("tra.attention.base.checkpoint", lambda call, *given, use_reentrant: call(*given))
    assert_close(found, output_and_gradient(), rtol=0.0, atol=0.0)

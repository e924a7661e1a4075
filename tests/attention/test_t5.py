"""T5's bias against the authors' mesh-tensorflow code (Raffel et al. 2020, arXiv 1910.10683) and transformers."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from tra.attention.t5 import BucketBiasAttention, bucket_of


def published_bucket(relative_position: int, num_buckets: int, max_distance: int) -> int:
    """_relative_position_bucket with bidirectional=False: key minus query position, logarithms in float32."""
    n = max(-relative_position, 0)
    max_exact = num_buckets // 2
    if n < max_exact:
        return n
    ratio = np.log(np.float32(n) / np.float32(max_exact)) / np.float32(math.log(max_distance / max_exact))
    return min(max_exact + int(ratio * np.float32(num_buckets - max_exact)), num_buckets - 1)


@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (16, 100), (33, 1000)])
def test_buckets_equal_the_original(buckets: int, max_distance: int) -> None:
    actual = bucket_of(torch.arange(1001), buckets, max_distance).tolist()
    assert actual == [published_bucket(-distance, buckets, max_distance) for distance in range(1001)]


def test_buckets_equal_their_definition_in_whole_numbers() -> None:
    """Bucket 16 + m opens at the first distance n >= 16 * 8^(m/16), that is n^16 >= 16^16 * 8^m."""
    actual = bucket_of(torch.arange(1001), 32, 128).tolist()
    assert actual[:16] == list(range(16))
    for distance in range(16, 1001):
        assert actual[distance] == 16 + sum(distance**16 >= 16**16 * 8**m for m in range(1, 16))
    assert (actual.index(17), actual.index(31)) == (19, 113)


def test_keys_ahead_would_share_bucket_zero_and_far_ones_the_last() -> None:
    assert published_bucket(3, 32, 128) == 0
    assert bucket_of(torch.tensor([128, 10**4, 10**7]), 32, 128).tolist() == [31, 31, 31]


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = BucketBiasAttention(8, 2, buckets=8, max_distance=20).double().eval()
    attention.bias.weight.normal_()
    x = torch.randn(30, 8, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for head, own in enumerate([slice(0, 4), slice(4, 8)]):
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(30):
            bias = [attention.bias.weight[published_bucket(j - i, 8, 20), head] for j in range(i + 1)]
            raw = [math.exp(query[i] @ key[j] / math.sqrt(4) + bias[j]) for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


@torch.no_grad()
def test_output_equals_transformers() -> None:
    """T5 does not divide scores by sqrt(D), so its queries are made smaller by that."""
    ours = BucketBiasAttention(32, 4, buckets=8, max_distance=20, qk_norm=False).double().eval()
    ours.bias.weight.normal_()
    config = T5Config(
        d_model=32,
        d_kv=8,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
        is_decoder=True,
        attn_implementation="eager",
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    theirs.q.weight.copy_(ours.query.weight / math.sqrt(8))
    theirs.k.weight, theirs.v.weight, theirs.o.weight = ours.key.weight, ours.value.weight, ours.output.weight
    theirs.relative_attention_bias.weight = ours.bias.weight
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    later = torch.full((1, 1, 40, 40), -math.inf).triu(1)
    assert_close(ours(x), theirs(x, mask=later)[0] + ours.output.bias)

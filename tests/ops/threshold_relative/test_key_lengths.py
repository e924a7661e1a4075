"""Decoding with a cache of fixed size: how many of its keys there are is data, for every implementation."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import random_inputs
from tests.ops.oracle import loop_attention
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS
from tra.ops.threshold_relative.op import operators

LENGTHS = [5, 23, 40]


@pytest.fixture(params=sorted(IMPLEMENTATIONS))
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


def cache(queries: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Three sequences of different lengths in a cache of 40, whose other keys and values were never written."""
    query, key, value, log_gate = random_inputs(3, 4, 2, queries, 40, value_width=5, dtype=dtype)
    for sequence, length in enumerate(LENGTHS):
        key[sequence, :, length:] = math.nan
        value[sequence, :, length:] = math.nan
    return query, key, value, log_gate


def alone(inputs: tuple[Tensor, ...], sequence: int) -> tuple[Tensor, ...]:
    """A sequence with the keys that it has."""
    query, key, value, log_gate = (x[sequence : sequence + 1] for x in inputs)
    length = LENGTHS[sequence]
    return query, key[:, :, :length], value[:, :, :length], log_gate


def masks_of(sequence: int, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: mask[sequence : sequence + 1, : LENGTHS[sequence]] for name, mask in masks.items()}


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("masked", [False, True])
def test_each_sequence_is_attended_as_if_it_had_no_room_behind_it(impl: str, queries: int, masked: bool) -> None:
    dtype = torch.float64 if impl == "reference" else torch.float32
    inputs = cache(queries, dtype)
    masks = {}
    if masked:
        masks = {"key_mask": torch.rand(3, 40) < 0.8, "segment_ids": torch.randint(2, (3, 40))}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32 if masked else torch.int64)
    out = threshold_relative_attention(*inputs, **masks, key_lengths=lengths, impl=impl)
    for sequence in range(3):
        expected = loop_attention(*alone(inputs, sequence), **masks_of(sequence, masks))
        assert_close(out[sequence : sequence + 1].double(), expected, rtol=2e-5, atol=2e-6)


def test_gradients_are_those_of_each_sequence_and_0_where_there_is_no_key(impl: str) -> None:
    leaves = [x.requires_grad_() for x in cache(3)]
    threshold = torch.randn(3, 4, 3).mul(0.1).requires_grad_()
    options: dict[str, Any] = {"straight_through": 0.5, "tolerance": 1e-4, "impl": impl}
    lengths = torch.tensor(LENGTHS)
    out = threshold_relative_attention(*leaves, threshold=threshold, key_lengths=lengths, **options)
    grad = torch.randn(out.shape)
    found = torch.autograd.grad(out, [*leaves, threshold], grad)
    for sequence, length in enumerate(LENGTHS):
        parts = [
            x.detach().requires_grad_() for x in (*alone(tuple(leaves), sequence), threshold[sequence : sequence + 1])
        ]
        its_out = threshold_relative_attention(*parts[:4], threshold=parts[4], **options)
        for ours, right in zip(found, torch.autograd.grad(its_out, parts, grad[sequence : sequence + 1]), strict=True):
            assert_close(ours[sequence : sequence + 1, :, : right.shape[2]], right, rtol=1e-4, atol=1e-5)
        assert (found[1][sequence, :, length:] == 0).all()
        assert (found[2][sequence, :, length:] == 0).all()


def test_bounds_of_scores_are_found_among_the_keys_that_there_are(impl: str) -> None:
    """A key of any size behind the last one makes no row read further, where it would meet a value that is NaN."""
    ones = torch.ones(1, 1, 60, 16)
    key, value = ones / 16, ones.clone()
    key[:, :, 50:] = 1e4
    value[:, :, :10] = math.nan
    out = threshold_relative_attention(
        ones[:, :, :1], key, value, torch.full((1, 1, 1), -1.0), key_lengths=torch.tensor([50]), impl=impl
    )
    assert_close(out, torch.ones_like(out))


@pytest.mark.skipif(cpu.unusable is not None, reason="needs the native kernel")
def test_the_kernel_computes_the_same_bits_with_room_behind_the_keys_and_without() -> None:
    inputs = cache(1)
    out = threshold_relative_attention(*inputs, key_lengths=torch.tensor(LENGTHS), impl="cpu")
    for sequence in range(3):
        expected = threshold_relative_attention(*alone(inputs, sequence), impl="cpu")
        assert torch.equal(out[sequence : sequence + 1], expected)


@pytest.mark.parametrize("length", [2, 41])
def test_a_length_without_room_for_queries_or_beyond_the_keys_is_an_error(impl: str, length: int) -> None:
    inputs = cache(3)
    message = f"key_lengths must lie between the 3 queries and the 40 keys, got {length}"
    with pytest.raises(ValueError, match=message):
        threshold_relative_attention(*inputs, key_lengths=torch.tensor([5, length, 40]), impl=impl)


def test_opcheck_finds_nothing(impl: str) -> None:
    rows = (None, None, None, None, None, torch.tensor(LENGTHS))
    ops = operators(impl)
    arguments = (*cache(1), *rows, 0.3, 0.0, 0.0, 0.0, 0.0, None)
    torch.library.opcheck(ops.forward, (*arguments, True))


def test_one_compiled_graph_serves_every_length() -> None:
    compiled = torch.compile(threshold_relative_attention, fullgraph=True)
    inputs = cache(1)
    lengths = torch.tensor([1, 2, 3])
    with torch.compiler.set_stance("default"):
        compiled(*inputs, key_lengths=lengths, impl="reference")
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(3):
            lengths += 1
            expected = threshold_relative_attention(*inputs, key_lengths=lengths, impl="reference")
            assert_close(compiled(*inputs, key_lengths=lengths, impl="reference"), expected, equal_nan=True)

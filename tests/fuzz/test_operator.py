"""The operator under random shapes, strides, masks and numbers, against exact scores and double precision."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tests.fuzz.strategies import TRIED, Call, attack, calls, tensors
from tests.ops.oracle import dense_attention
from tests.ops.straight_through_oracle import straight_through_attention
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu

pytestmark = pytest.mark.skipif(not cpu.LIBRARIES, reason="no kernel is built")


@pytest.fixture(autouse=True, scope="module")
def _poisoned_memory() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def of_every_variant(inputs: dict[str, Tensor], **options: Any) -> Iterator[Tensor]:
    for name in cpu.LIBRARIES:
        with mock.patch.object(cpu, "variant", name):
            yield threshold_relative_attention(*inputs.values(), impl="cpu", **options)


def kept(call: Call, inputs: dict[str, Tensor], masks: dict[str, Tensor | None]) -> Tensor:
    """Which keys each query keeps ``[B, Hq, Lq, Lk]``: scores are exact, and a key that is not finite is padding."""
    query, key = inputs["query"].double(), inputs["key"].double().repeat_interleave(call.group, 1)
    lk = key.shape[2]
    position = torch.arange(call.cached, lk)
    visible = (torch.arange(lk) <= position[:, None]) & key.isfinite().all(-1)[:, :, None]
    if masks["key_mask"] is not None:
        visible = visible & masks["key_mask"][:, None, None]
    if masks["segment_ids"] is not None:
        ids = masks["segment_ids"]
        visible = visible & (ids[:, None, :] == ids[:, position][:, :, None])[:, None]
    scores = query.nan_to_num(0.0, 0.0, 0.0) @ key.nan_to_num(0.0, 0.0, 0.0).mT * call.scale
    return visible & (scores > call.threshold)


def expected(call: Call, inputs: dict[str, Tensor], keep: Tensor) -> Tensor:
    """In double precision, NaN where the documentation says so."""
    finite = [x.double().nan_to_num(0.0, 0.0, 0.0) for x in inputs.values()]
    out = dense_attention(*finite, keep, call.scale)
    bad_row = ~inputs["query"].isfinite().all(-1) | ~inputs["log_gate"].isfinite()
    bad_value = ~inputs["value"].isfinite().all(-1).repeat_interleave(call.group, 1)
    bad_row = bad_row | (keep & bad_value[:, :, None]).any(-1)
    return out.masked_fill(bad_row[..., None], torch.nan)


def close(found: Tensor, wanted: Tensor, size: float, allowed: float) -> None:
    assert torch.equal(found.isnan(), wanted.isnan())
    if found.numel():
        error = (found.double() - wanted).nan_to_num(0.0).abs().max().item()
        assert error <= allowed * size, (error, allowed * size)


def rounding(call: Call) -> float:
    """What the dtype and the tolerance allow, relative to the largest value."""
    return 2 * torch.finfo(call.dtype).eps + 2e-5 + min(call.tolerance or 0.0, 1.0) * 2


@attack(60)
@given(calls())
def test_output_is_that_of_exact_scores_in_double_precision(call: Call) -> None:
    TRIED["operator, forward"] += 1
    inputs, masks = tensors(call)
    wanted = expected(call, inputs, kept(call, inputs, masks))
    for out in of_every_variant(inputs, **masks, **call.options):
        assert out.dtype == call.dtype
        close(out, wanted, call.value_size, rounding(call))


@attack(40)
@given(calls(spoiled=True))
def test_what_is_not_finite_spoils_its_own_rows_and_no_others(call: Call) -> None:
    TRIED["operator, spoiled"] += 1
    inputs, masks = tensors(call)
    wanted = expected(call, inputs, kept(call, inputs, masks))
    for out in of_every_variant(inputs, **masks, **call.options):
        if call.value_width:
            close(out, wanted, call.value_size, rounding(call))


@attack(40)
@given(calls())
def test_gradients_are_those_of_double_precision(call: Call) -> None:
    TRIED["operator, backward"] += 1
    call = call._replace(tolerance=None if call.tolerance is None else 0.0)
    inputs, masks = tensors(call)
    keep = kept(call, inputs, masks)
    exact = {name: x.double().detach().requires_grad_() for name, x in inputs.items()}
    grad = torch.randn(*inputs["query"].shape[:3], call.value_width, generator=torch.Generator().manual_seed(1))
    grad = grad.to(call.dtype)
    wanted = torch.autograd.grad(
        dense_attention(*exact.values(), keep, call.scale), list(exact.values()), grad.double()
    )
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    for out in of_every_variant(leaves, **masks, **call.options):
        found = torch.autograd.grad(out, list(leaves.values()), grad)
        for name, ours, theirs in zip(inputs, found, wanted, strict=True):
            assert ours.shape == inputs[name].shape
            # Backward reads the rounded output, of which the rounding of every column counts.
            size = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0, call.value_size)
            close(ours, theirs, size, rounding(call) * (1.0 + call.value_width**0.5) + 1e-4)


@attack(30)
@given(calls())
def test_gradients_that_pass_a_threshold_of_each_row_are_those_of_double_precision(call: Call) -> None:
    TRIED["operator, straight-through"] += 1
    call = call._replace(tolerance=None if call.tolerance is None else 0.0)
    inputs, masks = tensors(call)
    rng = torch.Generator().manual_seed(call.seed % 2**32)
    rows = inputs["query"].shape[:3]
    # Halfway between two scores, which are multiples of the scale.
    inputs["threshold"] = call.scale * (torch.randint(-4, 5, rows, generator=rng) + 0.5)
    temperature = 0.5 * call.scale * call.width**0.5
    grad = torch.randn(*rows, call.value_width, generator=rng).to(call.dtype)
    visible = kept(call._replace(threshold=-torch.inf), inputs, masks)
    exact = [x.double().detach().requires_grad_() for x in inputs.values()]
    out = straight_through_attention(*exact, temperature, visible, call.scale)
    wanted = torch.autograd.grad(out, exact, grad.double())
    options = {**call.options, **masks, "straight_through": temperature}
    for name in cpu.LIBRARIES:
        leaves = [x.detach().requires_grad_() for x in inputs.values()]
        with mock.patch.object(cpu, "variant", name):
            out = threshold_relative_attention(*leaves[:4], impl="cpu", **{**options, "threshold": leaves[4]})
        for ours, theirs in zip(torch.autograd.grad(out, leaves, grad), wanted, strict=True):
            size = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0, call.value_size)
            close(ours, theirs, size, rounding(call) * (1.0 + call.value_width**0.5) + 1e-4)


@attack(30)
@given(calls(dropout=True))
def test_dropout_removes_what_the_reference_removes(call: Call) -> None:
    TRIED["operator, dropout"] += 1
    inputs, masks = tensors(call)
    options = {**masks, **call.options, "dropout": call.dropout, "tolerance": 0.0}
    torch.manual_seed(call.seed % 2**32)
    doubles = [x.double() for x in inputs.values()]
    wanted = threshold_relative_attention(*doubles, impl="reference", **options)
    for name in cpu.LIBRARIES:
        torch.manual_seed(call.seed % 2**32)
        with mock.patch.object(cpu, "variant", name):
            out = threshold_relative_attention(*inputs.values(), impl="cpu", **options)
        close(out, wanted, call.value_size / (1 - call.dropout), rounding(call))


@attack(40)
@given(calls(), calls(spoiled=True))
def test_bits_depend_on_neither_threads_nor_the_way_of_reading(plain: Call, spoiled: Call) -> None:
    for call in (plain, spoiled):
        TRIED["operator, bits"] += 1
        inputs, masks = tensors(call)
        last = max(1, call.queries // 3)
        decoded = {name: x[:, :, -last:] if name in ("query", "log_gate") else x for name, x in inputs.items()}
        threads = torch.get_num_threads()
        try:
            outs = []
            for count in (1, 2):
                torch.set_num_threads(count)
                outs.append(list(of_every_variant(inputs, **masks, **call.options)))
            tails = of_every_variant(decoded, **masks, **call.options)
            for one, two, tail in zip(*outs, tails, strict=True):
                assert bits(one) == bits(two)
                assert bits(one[:, :, -last:]) == bits(tail)
        finally:
            torch.set_num_threads(threads)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""

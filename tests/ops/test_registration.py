"""The operator as a citizen of PyTorch: gradients, opcheck, compile, autocast."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import random_inputs
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.op import IMPLEMENTATIONS, forward_op


def with_gradients(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.requires_grad_() for x in inputs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"threshold": 0.2, "scale": 0.5},
        {"threshold": -0.3},
        {"key_mask": torch.tensor([[False, True, True, True, True, False, True, True, True]] * 2)},
        {"segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2)},
        {"dropout": 0.4},
    ],
    ids=lambda options: ",".join(options) or "plain",
)
@pytest.mark.parametrize(
    "shape", [{}, {"kv_heads": 2, "queries": 4, "keys": 9, "value_width": 3}], ids=["self", "decode"]
)
def test_gradients_of_the_reference_equal_finite_differences(shape: dict[str, int], options: dict[str, object]) -> None:
    inputs = with_gradients(random_inputs(**{"queries": 9, "width": 4, **shape}))

    def seeded(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)
        return threshold_relative_attention(*tensors, impl="reference", **options)

    assert torch.autograd.gradcheck(seeded, inputs)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
@pytest.mark.parametrize("masked", [False, True])
def test_opcheck_finds_nothing(impl: str, masked: bool) -> None:
    dtype = torch.float64 if impl == "reference" else torch.float32
    inputs = with_gradients(random_inputs(queries=5, keys=9, kv_heads=2, dtype=dtype))
    masks = (torch.rand(2, 9) < 0.8, torch.zeros(2, 9, dtype=torch.int64)) if masked else (None, None)
    seed = torch.tensor([12345]) if masked else None
    torch.library.opcheck(forward_op, (*inputs, *masks, seed, 0.3, 0.0, 0.2 if masked else 0.0, 0.0, None, impl))


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_compiles_without_graph_breaks_for_any_length(impl: str) -> None:
    compiled = torch.compile(threshold_relative_attention, fullgraph=True, dynamic=True)
    for length in (7, 12, 31):
        eager = with_gradients(random_inputs(queries=length, dtype=torch.float32))
        traced = with_gradients(random_inputs(queries=length, dtype=torch.float32))
        mask = torch.rand(2, length) < 0.8
        expected = threshold_relative_attention(*eager, key_mask=mask, impl=impl)
        actual = compiled(*traced, key_mask=mask, impl=impl)
        assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        for left, right in zip(traced, eager, strict=True):
            assert_close(left.grad, right.grad)


def test_compiles_with_dropout() -> None:
    compiled = torch.compile(threshold_relative_attention, fullgraph=True, dynamic=True)
    inputs = random_inputs(dtype=torch.float32)
    torch.manual_seed(1)
    first, second = compiled(*inputs, dropout=0.5), compiled(*inputs, dropout=0.5)
    torch.manual_seed(1)
    assert torch.equal(compiled(*inputs, dropout=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_autocast_lowers_the_inputs_and_nothing_else(impl: str) -> None:
    query, key, value, log_gate = random_inputs(dtype=torch.float32)
    lowered = [x.bfloat16() for x in (query, key, value)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = threshold_relative_attention(query, key.bfloat16(), value, log_gate, impl=impl)
    # Inside the operator autocast is off: the products are those of float32.
    assert torch.equal(out, threshold_relative_attention(*lowered, log_gate, impl=impl))


def test_autocast_reaches_gradients() -> None:
    inputs = with_gradients(random_inputs(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        threshold_relative_attention(*inputs).float().sum().backward()
    assert all(x.grad.dtype == torch.float32 and x.grad.isfinite().all() for x in inputs)


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_runs_on_the_meta_device_shapes(impl: str) -> None:
    query, key, value, log_gate = (x.to("meta") for x in random_inputs(value_width=3, dtype=torch.bfloat16))
    out = threshold_relative_attention(query, key, value, log_gate, impl=impl)
    assert out.shape == (2, 4, 17, 3)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("impl", sorted(IMPLEMENTATIONS))
def test_public_function_runs_on_fake_tensors(impl: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in random_inputs(dtype=torch.float32)]
        assert threshold_relative_attention(*inputs, impl=impl).shape == (2, 4, 17, 8)

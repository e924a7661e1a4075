"""What the operator does at its edges, as docs/kernel.md lists it: the same in the reference and every built variant."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import random_inputs
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu

BAD = [math.nan, math.inf, -math.inf]


@pytest.fixture(params=["reference", *sorted(cpu.LIBRARIES)])
def impl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "reference":
        return "reference"
    monkeypatch.setattr(cpu, "variant", request.param)
    return "cpu"


def all_kept(length: int, gate: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every query keeps every key before it, all with a score of 1."""
    ones = torch.ones(1, 1, length, 4)
    return ones, ones / 2, torch.randn(1, 1, length, 5), torch.full((1, 1, length), gate)


def gradients(inputs: tuple[Tensor, ...], grad: Tensor, **options: object) -> tuple[Tensor, ...]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = threshold_relative_attention(*leaves, **options)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("places", [(5, 60), (20, 60), (31, 33), (7, 8, 9)])
@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_every_bad_value_spoils_the_rows_that_keep_its_key(
    impl: str, bad: float, places: tuple[int, ...], tolerance: float | None
) -> None:
    query, key, value, gate = all_kept(64, -0.01)
    for place in places:
        value[0, 0, place, 2] = bad
    options = {"impl": impl, "tolerance": tolerance}
    rows = threshold_relative_attention(query, key, value, gate, **options).isnan().all(-1)[0, 0]
    assert rows.tolist() == [row >= min(places) for row in range(64)]
    decoded = [
        threshold_relative_attention(
            *(query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1], gate[:, :, row : row + 1]),
            **options,
        ).isnan()
        for row in range(0, 64, 5)
    ]
    assert [bool(row.all()) for row in decoded] == rows[::5].tolist()


def test_values_without_components_give_gradients_of_zero(impl: str) -> None:
    inputs = random_inputs(queries=63, value_width=0, dtype=torch.float32)
    torch.full((1 << 22,), math.nan)  # what fresh memory may hold
    out, *grads = gradients(inputs, torch.empty(*inputs[0].shape[:3], 0), impl=impl)
    assert out.shape == (2, 4, 63, 0)
    assert all((grad == 0).all() for grad in grads)

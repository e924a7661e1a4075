"""A walk over pieces on a GPU, or interpreted, has the bits of one call, wherever the sequence is cut."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.threshold_relative.test_pieces import Sequence, random_cuts
from tests.ops.threshold_relative.test_triton import use_tile
from tra.ops.threshold_relative import reference
from tra.ops.threshold_relative.call import Inputs, Result
from tra.ops.threshold_relative.pieces import Walk

LENGTH = 77
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES: dict[str, dict[str, Any]] = {
    "plain": {"dtype": torch.bfloat16},
    "masks": {"padding": True, "documents": 4, "straight_through": 0.5, "batch": 2},
    "thresholds": {"thresholds": True, "straight_through": 0.5, "gate": 4.0, "kv_heads": 2, "dtype": torch.float16},
    "every key": {"tolerance": 0.0, "padding": True},
}


@pytest.fixture
def packs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=32, keys=16)
    monkeypatch.setattr(launch, "PACKED_FROM", 16 if getattr(request, "param", False) else 2**30)
    monkeypatch.setattr(launch, "FIRST_ROUND", 16)
    monkeypatch.setattr(launch, "MOST_ROWS", 32)
    # Two blocks of keys at a time, so that a piece takes several in backward.
    monkeypatch.setattr(launch, "SCRATCH", 2 * 8 * 4 * 4 * 128)
    return getattr(request, "param", False)


def integer_sequence(length: int = LENGTH, **case: Any) -> Sequence:
    """Scores are exact, and half of the rows stop early."""
    sequence = Sequence(length, **{"batch": 1, "heads": 2, "kv_heads": 1, "width": 16, "value_width": 24} | case)
    torch.manual_seed(3)
    inputs = sequence.inputs
    query, key = (torch.randint(-1, 2, x.shape).to(x) for x in (inputs.query, inputs.key))
    query[:, :, ::7] = 0.0
    sequence.inputs = Inputs(*(None if x is None else x.to(DEVICE) for x in inputs._replace(query=query, key=key)))
    sequence.mask, sequence.segments, sequence.grad = (
        None if x is None else x.to(DEVICE) for x in (sequence.mask, sequence.segments, sequence.grad)
    )
    sequence.options = sequence.options._replace(scale=0.25, threshold=0.125, score_bound=4.0)
    return sequence


def walks(sequence: Sequence, cuts: list[int], impl: str = "triton", **span: int) -> tuple[Result, list[Tensor | None]]:
    result = sequence.walk(cuts, impl=impl, **span)
    return result, sequence.walk_back(result, cuts, impl=impl, **span)


@pytest.mark.parametrize(
    "case, packs", [*((case, False) for case in CASES), ("masks", True), ("thresholds", True)], indirect=["packs"]
)
def test_pieces_have_the_bits_of_one_call(packs: bool, case: str) -> None:
    from tra.ops.threshold_relative.triton import launch

    sequence = integer_sequence(**CASES[case])
    whole = launch.forward(sequence.inputs, sequence.options, True)
    expected = launch.backward(sequence.grad, sequence.inputs, whole, sequence.options)
    result, found = walks(sequence, random_cuts(LENGTH, 4, seed=2))
    assert torch.equal(result.out, whole.out)
    assert torch.equal(result.row_state[..., 0], whole.row_state[..., 0])
    assert result.residual is whole.residual is None or torch.equal(result.residual, whole.residual)
    for name, got, right in zip(expected._fields, found, expected, strict=True):
        assert (got is None) == (right is None), name
        if right is None:
            continue
        if packs and name in ("key", "value"):  # sums over rows, in another order
            assert_close(got, right, rtol=2 * torch.finfo(right.dtype).eps, atol=1e-5, msg=name)
        else:
            assert torch.equal(got, right), name


@pytest.mark.usefixtures("packs")
def test_numbers_that_are_not_finite_spoil_what_they_spoil_in_one_call() -> None:
    from tra.ops.threshold_relative.triton import launch

    sequence = integer_sequence(kv_heads=2)
    inputs = sequence.inputs
    inputs.query[0, 1, 47] = torch.nan
    inputs.value[0, 0, 33, 2] = torch.inf
    inputs.key[0, 0, 25, 3] = torch.nan
    inputs.log_gate[0, 1, 9] = -torch.inf
    whole = launch.forward(inputs, sequence.options, True)
    expected = launch.backward(sequence.grad, inputs, whole, sequence.options)
    result, found = walks(sequence, [20, 40])
    assert whole.out.isnan().any(-1).sum().item() > 2
    assert not whole.out.isnan().all()
    assert_close(result.out, whole.out, rtol=0, atol=0, equal_nan=True)
    for name, got, right in zip(expected._fields, found, expected, strict=True):
        if right is not None:
            assert_close(got, right, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.usefixtures("packs")
def test_some_rows_equal_the_reference_in_double_precision() -> None:
    """Rows that are far behind most keys, and not the last of the sequence."""
    from tests.ops.threshold_relative.sanitizer import watched

    begin, end, cuts = 30, 61, [32, 40]
    sequence = integer_sequence(documents=2, padding=True, straight_through=0.5, thresholds=True, batch=2)
    with nullcontext() if torch.cuda.is_available() else watched():  # no address beyond a piece
        result, found = walks(sequence, cuts, begin=begin, end=end)
    double: Any = (x.double() if x is not None and x.is_floating_point() else x for x in sequence.inputs)
    sequence.inputs, sequence.grad = Inputs(*double), sequence.grad.double()
    exact, expected = walks(sequence, cuts, impl="reference", begin=begin, end=end)
    for got, right in zip([result.out, *found], [exact.out, *expected], strict=True):
        assert got is not None
        assert right is not None
        assert_close(got.double(), right, rtol=1e-5, atol=1e-5 * (1 + right.abs().max().item()))


@pytest.mark.usefixtures("packs")
def test_rows_that_are_done_ask_for_no_more_keys() -> None:
    sequence = integer_sequence()
    sequence.inputs.log_gate.fill_(-8.0)
    sequence.inputs.query.fill_(1.0)
    sequence.inputs.key.fill_(1.0)
    walk = Walk(sequence.rows(60, LENGTH), impl="triton")
    with pytest.raises(ValueError, match="must hold the keys of all rows, up to 77, got one that ends at 70"):
        Walk(sequence.rows(60, LENGTH), impl="triton").visit(sequence.piece(0, 70))
    walk.visit(sequence.piece(50, LENGTH))  # of which those before 64, a multiple of a block, wait
    left = int(walk.unfinished.sum())
    assert 8 <= left < 34
    with pytest.raises(ValueError, match=f"{left} rows that need keys before 50"):
        walk.result()
    walk.visit(sequence.piece(20, 50))
    assert walk.done
    whole = reference.forward(sequence.inputs, sequence.options, False)
    assert_close(walk.result().out, whole.out[:, :, 60:])


@pytest.mark.usefixtures("packs")
def test_every_launch_is_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device."""
    from tra.ops.threshold_relative.triton import launch
    from tra.ops.threshold_relative.triton.prepare import Call

    current: list[torch.device] = []
    seen, launch_kernel = [], Call.launch

    @contextmanager
    def guard(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def noted(*given: Any, **named: Any) -> None:
        seen.append(list(current))
        launch_kernel(*given, **named)

    monkeypatch.setattr(launch, "guard", guard)
    monkeypatch.setattr(Call, "launch", noted)
    sequence = integer_sequence(20)
    walks(sequence, [9])
    assert len(seen) > 8
    assert all(devices == [sequence.inputs.query.device] for devices in seen)


def test_dropout_is_refused_by_name() -> None:
    sequence = integer_sequence(dropout=0.2)
    with pytest.raises(ValueError, match="impl 'triton' computes no dropout in pieces"):
        Walk(sequence.rows(0, LENGTH), impl="triton")

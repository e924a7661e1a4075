"""A walk over pieces of the sequence has the bits of one call, wherever the sequence is cut."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tra.ops.threshold_relative import cpu, reference
from tra.ops.threshold_relative.call import Inputs, Options, Result
from tra.ops.threshold_relative.pieces import (
    BackwardWalk,
    Piece,
    PiecesInOrder,
    Rows,
    Walk,
    value_center,
    value_range,
)


@pytest.fixture(params=sorted(cpu.LIBRARIES))
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "variant", request.param)
    return request.param


class Sequence:
    """A call of the operator, and the same call in pieces."""

    def __init__(
        self,
        length: int,
        *,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        batch: int = 2,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 12,
        value_width: int = 20,
        padding: bool = False,
        documents: int = 0,
        thresholds: bool = False,
        straight_through: float = 0.0,
        dropout: float = 0.0,
        tolerance: float = 1e-7,
        gate: float = 0.5,
    ) -> None:
        rng = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=rng).to(dtype)

        query, key = normal(batch, heads, length, width), normal(batch, kv_heads, length, width)
        value = normal(batch, kv_heads, length, value_width) + 3.0
        log_gate = -torch.rand(batch, heads, length, generator=rng) * gate
        self.mask = torch.rand(batch, length, generator=rng) < 0.8 if padding else None
        self.segments = None
        if documents:
            self.segments = torch.randint(length, (batch, documents), generator=rng).sort().values
            self.segments = torch.searchsorted(self.segments, torch.arange(length).expand(batch, -1).contiguous()).int()
        seed_tensor = torch.tensor([12345]) if dropout else None
        row_threshold = normal(batch, heads, length) * 0.3 if thresholds else None
        self.inputs = Inputs(query, key, value, log_gate, self.mask, self.segments, seed_tensor, row_threshold, None)
        self.options = Options(width**-0.5, 0.1, straight_through, dropout, tolerance, 9.0)
        self.grad = normal(batch, heads, length, value_width)
        self.length = length

    def rows(self, begin: int, end: int) -> Rows:
        inputs = self.inputs._replace(
            query=self.inputs.query[:, :, begin:end],
            log_gate=self.inputs.log_gate[:, :, begin:end],
            row_threshold=None if self.inputs.row_threshold is None else self.inputs.row_threshold[:, :, begin:end],
        )
        segments = starts = None
        if self.segments is not None:
            same = self.segments[:, :, None] == self.segments[:, None]
            segments, starts = self.segments[:, begin:end], same.int().argmax(-1)[:, begin:end]
        valid = None if self.mask is None else self.mask.sum(1)
        return Rows(inputs, self.options, begin, self.length, segments=segments, starts=starts, valid_keys=valid)

    def piece(self, begin: int, end: int) -> Piece:
        mask = self.mask
        return Piece(
            self.inputs.key[:, :, begin:end],
            self.inputs.value[:, :, begin:end],
            begin,
            None if mask is None else mask[:, begin:end],
            None if mask is None else mask[:, :begin].sum(1),
            None if self.segments is None else self.segments[:, begin:end],
        )

    def pieces(self, cuts: list[int], end: int) -> list[Piece]:
        edges = [0, *sorted({cut for cut in cuts if 0 < cut < end}), end]
        return [self.piece(low, high) for low, high in reversed(list(itertools.pairwise(edges)))]

    def walk(self, cuts: list[int], begin: int = 0, end: int | None = None, impl: str = "cpu") -> Result:
        end = self.length if end is None else end
        walk = Walk(self.rows(begin, end), impl=impl, training=True)
        for piece in self.pieces(cuts, end):
            walk.visit(piece)
        return walk.result()

    def walk_back(
        self, result: Result, cuts: list[int], begin: int = 0, end: int | None = None, impl: str = "cpu"
    ) -> list[Tensor | None]:
        end = self.length if end is None else end
        center = value_center([value_range(self.inputs.value, self.mask)], self.options.dropout)
        back = BackwardWalk(self.rows(begin, end), result, self.grad[:, :, begin:end], center, impl=impl)
        pieces = [piece.with_gradients() for piece in self.pieces(cuts, end)]
        for piece in pieces:
            back.visit(piece)
        rows = back.result()
        dtype = self.inputs.key.dtype
        key, value = (
            torch.cat([getattr(piece, name) for piece in reversed(pieces)], 2).to(dtype)
            for name in ("grad_key", "grad_value")
        )
        return [rows.query, key, value, rows.log_gate, rows.row_threshold]


def random_cuts(length: int, number: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(1, length), number))


CASES: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "straight_through": 0.5},
    {"dtype": torch.float16, "thresholds": True},
    {"straight_through": 0.5, "thresholds": True, "tolerance": 1e-3},
    {"padding": True, "straight_through": 0.5},
    {"padding": True, "documents": 5, "dtype": torch.bfloat16},
    {"documents": 4, "thresholds": True, "straight_through": 0.3},
    {"dropout": 0.3, "heads": 2, "padding": True},
    {"tolerance": 0.0, "heads": 2, "kv_heads": 1},
    {"tolerance": 0.0, "heads": 8, "kv_heads": 1, "batch": 1},  # several blocks of rows
    {"tolerance": 0.0, "heads": 8, "kv_heads": 1, "batch": 1, "dtype": torch.bfloat16, "straight_through": 0.5},
    {"gate": 0.01, "kv_heads": 4, "thresholds": True, "straight_through": 0.5, "dropout": 0.2},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("cuts", ["one", "two", "many"])
def test_pieces_have_the_bits_of_one_call(variant: str, case: dict[str, Any], cuts: str) -> None:
    sequence = Sequence(611, **case)
    where = {"one": [300], "two": [192, 417], "many": random_cuts(611, 40, seed=len(str(case)))}[cuts]
    whole = cpu.forward(sequence.inputs, sequence.options, True)
    result = sequence.walk(where)
    for got, expected in zip(result, whole, strict=True):
        assert got is expected is None or torch.equal(got, expected)
    gradients = cpu.backward(sequence.grad, sequence.inputs, whole, sequence.options)
    for name, got, expected in zip(gradients._fields, sequence.walk_back(result, where), gradients, strict=True):
        assert got is expected is None or torch.equal(got, expected), name


@pytest.mark.parametrize(
    "case", [{}, {"padding": True, "documents": 3, "dropout": 0.1, "straight_through": 0.5}], ids=str
)
def test_some_rows_have_the_bits_that_they_have_among_all(case: dict[str, Any]) -> None:
    sequence = Sequence(611, **case)
    whole = cpu.forward(sequence.inputs, sequence.options, True)
    gradients = cpu.backward(sequence.grad, sequence.inputs, whole, sequence.options)
    key_parts, value_parts = [], []
    edges = [0, 101, 102, 450, 611]
    for begin, end in itertools.pairwise(edges):
        result = sequence.walk(edges, begin, end)
        assert torch.equal(result.out, whole.out[:, :, begin:end])
        query, key, value, gate, _ = sequence.walk_back(result, edges, begin, end)
        assert torch.equal(query, gradients.query[:, :, begin:end])
        assert torch.equal(gate, gradients.log_gate[:, :, begin:end])
        key_parts.append(torch.nn.functional.pad(key, (0, 0, 0, 611 - end)))
        value_parts.append(torch.nn.functional.pad(value, (0, 0, 0, 611 - end)))
    # Gradients of keys are sums over rows, in another order.
    assert_close(sum(key_parts), gradients.key, rtol=1e-5, atol=1e-5)
    assert_close(sum(value_parts), gradients.value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [{k: v for k, v in case.items() if k != "dtype"} for case in CASES], ids=str)
def test_the_reference_in_pieces_is_the_reference(case: dict[str, Any]) -> None:
    sequence = Sequence(97, dtype=torch.float64, **case)
    whole = reference.forward(sequence.inputs, sequence.options, True)
    cuts = random_cuts(97, 6, seed=1)
    result = sequence.walk(cuts, impl="reference")
    assert_close(result.out, whole.out, rtol=1e-12, atol=1e-12)
    gradients = reference.backward(sequence.grad, sequence.inputs, whole, sequence.options)
    for got, expected in zip(sequence.walk_back(result, cuts, impl="reference"), gradients, strict=True):
        if expected is not None:
            assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_rows_that_are_done_read_no_more_keys() -> None:
    sequence = Sequence(4000, gate=4.0)
    sequence.inputs.log_gate.clamp_(max=-0.5)
    walk = Walk(sequence.rows(3500, 4000))
    walk.visit(sequence.piece(3400, 4000))
    assert not walk.done
    walk.visit(sequence.piece(2800, 3400))
    assert walk.done
    assert not walk.unfinished.any()
    whole = cpu.forward(sequence.inputs, sequence.options, False)
    assert torch.equal(walk.result().out, whole.out[:, :, 3500:])


def test_a_document_that_begins_in_the_piece_needs_no_other() -> None:
    sequence = Sequence(600, documents=1, gate=0.0)
    start = int((sequence.segments == 1).int().argmax(1).max())
    walk = Walk(sequence.rows(start, 600))
    low = int((sequence.segments == 1).int().argmax(1).min())
    walk.visit(sequence.piece(low - low % 192, 600))
    assert walk.done


def test_numbers_that_are_not_finite_spoil_what_they_spoil_in_one_call() -> None:
    sequence = Sequence(500)
    sequence.inputs.query[0, 1, 77] = torch.nan
    sequence.inputs.value[1, 0, 33, 2] = torch.inf
    sequence.inputs.key[0, 0, 250, 3] = torch.nan
    sequence.inputs.log_gate[1, 2, 9] = -torch.inf
    whole = cpu.forward(sequence.inputs, sequence.options, True)
    cuts = [40, 250, 251, 300]
    result = sequence.walk(cuts)
    assert whole.out.isnan().any()
    assert_close(result.out, whole.out, rtol=0, atol=0, equal_nan=True)
    gradients = cpu.backward(sequence.grad, sequence.inputs, whole, sequence.options)
    for got, expected in zip(sequence.walk_back(result, cuts), gradients, strict=True):
        if expected is not None:
            assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_what_cannot_be_walked_in_pieces_is_an_error() -> None:
    sequence = Sequence(64)
    rows = sequence.rows(0, 64)
    with pytest.raises(ValueError, match="score_bound must be given"):
        Rows(rows.inputs, rows.options._replace(score_bound=None), 0, 64)
    with pytest.raises(ValueError, match="start must leave room for 64 queries in a sequence of 64"):
        Rows(rows.inputs, rows.options, 1, 64)
    walk = Walk(rows)
    walk.visit(sequence.piece(30, 64))
    with pytest.raises(ValueError, match="ends at 30 was expected, got one that ends at 20"):
        walk.visit(sequence.piece(0, 20))
    with pytest.raises(ValueError, match="512 rows that need keys before 30"):
        walk.result()
    huge = Walk(Rows(rows.inputs, rows.options._replace(score_bound=1e6), 0, 64))
    with pytest.raises(ValueError, match="score_bound must be finite"):
        huge.visit(sequence.piece(0, 64))
    rows.inputs.log_gate[0, 0, 0] = 1.0
    for impl in ("cpu", "reference"):
        with pytest.raises(ValueError, match="log_gate must never be positive"):
            Walk(rows, impl=impl).visit(sequence.piece(0, 64))
    with pytest.raises(ValueError, match="value must have the"):
        Piece(sequence.inputs.key, sequence.inputs.value[:, :, 1:], 0)
    with pytest.raises(ValueError, match="impl must be"):
        Walk(rows, impl="fast")


def test_pieces_wait_until_a_span_is_whole() -> None:
    order, sequence = PiecesInOrder(8), Sequence(30)
    call, _ = order.next_call(sequence.piece(21, 30))
    assert call is not None
    assert (call.start, len(call)) == (24, 6)
    assert order.next_call(sequence.piece(18, 21))[0] is None
    call, parts = order.next_call(sequence.piece(5, 18))
    assert call is not None
    assert (call.start, len(call)) == (8, 16)
    assert [(part.start, len(part)) for part in parts] == [(8, 10), (18, 3), (21, 3)]
    assert torch.equal(call.key, sequence.inputs.key[:, :, 8:24])

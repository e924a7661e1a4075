"""What the Triton kernels promise beyond the operator's semantics: on a GPU where there is one, else interpreted."""

import json
import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.ops.inputs import integer_inputs, random_inputs
from tests.ops.threshold_relative.on_device import OnDevice
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu, implementations, triton
from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.triton.tiles import FLOAT32, HALF, Tile

ROOT = Path(__file__).parents[3]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="looks into Triton's interpreter")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tile(monkeypatch, rows=32, keys=16)


def use_tile(monkeypatch: pytest.MonkeyPatch, rows: int, keys: int) -> None:
    from tra.ops.threshold_relative.triton import tiles

    monkeypatch.setattr(tiles, "choices", lambda *_: (Tile(rows, 4),))
    monkeypatch.setattr(tiles, "keys_per_block", lambda *_: keys)


def run(*inputs: Tensor, impl: str = "triton", **options: object) -> Tensor:
    return threshold_relative_attention(*inputs, impl=impl, **options)


def gradients(inputs: tuple[Tensor, ...], grad: Tensor, **options: object) -> list[Tensor]:
    """Output and the four gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(0)
    out = run(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def grouped(length: int, width: int, value_width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Integer scores, four query heads to two key heads."""
    query, key, _, gate = integer_inputs(batch=2, heads=4, length=length, width=width, dtype=dtype)
    return query, key[:, :2], torch.randn(2, 2, length, value_width).to(dtype), gate.float()


MASK = torch.rand(2, 75, generator=torch.Generator().manual_seed(1)) < 0.7
SEGMENTS = torch.randint(3, (2, 75), generator=torch.Generator().manual_seed(2)).sort(dim=1).values
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "every key": {"tolerance": 0.0},
    "dropout": {"dropout": 0.3},
    "masks": {"key_mask": MASK, "segment_ids": SEGMENTS, "scale": 0.3, "threshold": -0.2},
    "bound": {"score_bound": 12.0, "tolerance": 1e-9},
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", CASES)
def test_equals_the_reference_in_double_precision_where_scores_are_exact(case: str) -> None:
    inputs = grouped(75, 40, 24)
    grad = torch.randn(2, 4, 75, 24)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", **CASES[case])
    for right, ours in zip(exact, gradients(inputs, grad, **CASES[case]), strict=True):
        assert_close(ours.double(), right, rtol=1e-5, atol=2e-6 * (1 + right.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_float32_sums(dtype: torch.dtype) -> None:
    inputs = grouped(97, 64, 16, dtype)
    grad = torch.randn(2, 4, 97, 16).to(dtype)
    exact = gradients(tuple(x.double() for x in inputs), grad.double(), impl="reference", tolerance=0.0)
    rounding = torch.finfo(dtype).eps
    for right, ours in zip(exact, gradients(inputs, grad), strict=True):
        assert_close(ours.double(), right, rtol=2 * rounding, atol=2 * rounding * right.abs().max().item())


def test_last_rows_alone_equal_the_last_rows_of_all() -> None:
    query, key, value, gate = grouped(111, 16, 16)
    full = run(query, key, value, gate)
    for rows in (1, 30):
        assert_close(run(query[:, :, -rows:], key, value, gate[:, :, -rows:]), full[:, :, -rows:])


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding in parts at small lengths."""
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=16, keys=16)
    monkeypatch.setattr(launch, "NEAR_KEYS", 16)
    monkeypatch.setattr(launch, "PART_KEYS", 32)


LONG_MASK, LONG_SEGMENTS = MASK.repeat(1, 2), SEGMENTS.repeat(1, 2).sort(dim=1).values


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("gate", [0.0, -0.01, -0.3, -2.0])
def test_decoding_in_parts_equals_the_reference(queries: int, gate: float) -> None:
    query, key, value, _ = grouped(150, 16, 24)
    inputs = query[:, :, -queries:], key, value, torch.full((2, 4, queries), gate)
    assert_parts_equal_the_reference(inputs, tolerance=1e-4)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "options", [{"dropout": 0.3}, {"key_mask": LONG_MASK, "segment_ids": LONG_SEGMENTS}], ids=["dropout", "masks"]
)
def test_decoding_in_parts_takes_every_argument(options: dict[str, Any]) -> None:
    query, key, value, gate = grouped(150, 16, 24)
    inputs = query[:, :, -2:], key, value, gate[:, :, -2:] / 20
    assert_parts_equal_the_reference(inputs, **options)


def assert_parts_equal_the_reference(inputs: tuple[Tensor, ...], **options: Any) -> None:
    outs = []
    for impl, tensors in (("triton", inputs), ("reference", tuple(x.double() for x in inputs))):
        torch.manual_seed(0)
        outs.append(run(*tensors, impl=impl, **options).double())
    allowed = options.get("tolerance", 0.0) * inputs[2].abs().max().item()
    assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-5 + allowed)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "place, spoilt", [(149, True), (148 - 50, True), (149 - 79, True), (149 - 80, False), (0, False)]
)
def test_a_decoded_row_ends_at_its_count_wherever_parts_do(place: int, spoilt: bool) -> None:
    ones = torch.ones(1, 1, 150, 16)
    value = torch.ones(1, 1, 150, 4)
    value[0, 0, place] = math.nan
    # U = 1.001, T = 0: the least C with 2 exp(U) x / (1 - x) <= 0.01, x = exp(-C / 13), is 80.
    gate = torch.full((1, 1, 1), -math.log1p(200 * math.exp(1.001)) / 79.5)
    out = run(ones[:, :, :1] / 16, ones, value, gate, scale=1.0, score_bound=1.0, tolerance=0.01)
    assert bool(out.isnan().all()) == spoilt


@interpreted
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("gate, last", [(-2.0, 128), (-0.02, 0)])
def test_decoding_reads_beyond_the_near_keys_only_where_a_row_needs_it(gate: float, last: int) -> None:
    from tests.ops.threshold_relative.sanitizer import watched

    ones = torch.ones(1, 1, 140, 16)
    value = torch.randn(1, 1, 140, 24)
    with watched() as touched:
        run(ones[:, :, :1] / 16, ones, value, torch.full((1, 1, 1), gate), score_bound=4.0)
    assert touched.rows_read(value) == list(range(last, 140))


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packing in rounds at small lengths; tells how many rows were in each of those after the first."""
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=16, keys=16)
    monkeypatch.setattr(launch, "PACKED_FROM", 64)
    monkeypatch.setattr(launch, "FIRST_ROUND", 16)
    monkeypatch.setattr(launch, "GROWTH", 2)
    monkeypatch.setattr(launch, "MOST_ROWS", 16)
    pack, rows = launch._pack, []

    def counted(*arguments: Any) -> Tensor:
        order = pack(*arguments)
        rows.append(int((order >= 0).sum()))
        return order

    monkeypatch.setattr(launch, "_pack", counted)
    return rows


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch, packed: list[int]) -> Any:
    """Run something without packing."""
    from tra.ops.threshold_relative.triton import launch

    def run_apart(something: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "PACKED_FROM", 2**30)
            return something()

    return run_apart


def uneven(length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Integer scores, and rows of which most end soon and some never."""
    query, key, value, gate = (x[:batch] for x in grouped(length, 16, 24, dtype))
    gate = -torch.empty_like(gate).log_normal_(0.5, 1.5, generator=torch.Generator().manual_seed(6))
    gate[:, :, ::17] = 0.0
    return query, key, value, gate


PACKED_CASES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {"tolerance": 1e-3, "score_bound": 12.0}),
    "float16": (torch.float16, {"tolerance": 1e-3}),
    "dropout": (torch.float32, {"dropout": 0.3}),
    "masks": (torch.float32, {"key_mask": LONG_MASK[:1, :100], "segment_ids": (torch.arange(100) > 9).long()[None]}),
}


@pytest.mark.parametrize("case", PACKED_CASES)
def test_packing_changes_no_bit(packed: list[int], apart: Any, case: str) -> None:
    dtype, options = PACKED_CASES[case]
    inputs, grad = uneven(100, dtype=dtype), torch.randn(1, 4, 100, 24)
    together = gradients(inputs, grad, **options)
    assert 400 > packed[0] > packed[1] > 0  # rows of the second round and the third
    assert packed[-1] == 400  # backward's order has every row
    expected = apart(lambda: gradients(inputs, grad, **options))
    for name, left, right in zip(("out", "query", "key", "value", "gate"), together, expected, strict=True):
        if name in ("key", "value"):  # sums over rows follow their order
            assert_close(left, right, rtol=2 * torch.finfo(dtype).eps, atol=2e-6 * right.abs().max().item())
        else:
            assert torch.equal(left, right), name


def test_packed_rows_with_numbers_that_are_not_finite(packed: list[int], apart: Any) -> None:
    query, key, value, gate = uneven(100)
    value[0, 0, 3] = math.nan  # spoils the rows of one key head that reach so far
    key[0, 0, 40, 0] = math.inf
    query[0, 3, 70] = math.nan
    expected = apart(lambda: run(query, key, value, gate))
    assert expected.isnan().any(-1).sum() > 10
    assert_close(run(query, key, value, gate), expected, rtol=0, atol=0, equal_nan=True)
    assert not expected[0, 3, 71:].isnan().any()
    assert packed


@pytest.mark.usefixtures("packed")
def test_certificate_holds_for_packed_rows() -> None:
    query, key, value, gate = uneven(100)
    value = value.sign()
    whole = run(query, key, value, gate, tolerance=0.0).double()
    stopped = run(query, key, value, gate, tolerance=0.05).double()
    assert not torch.equal(stopped, whole)
    assert (stopped - whole).abs().max() <= 0.05 + 2e-6


@interpreted
@pytest.mark.usefixtures("packed")
def test_slow_rows_hold_up_no_others(apart: Any) -> None:
    """One row in sixteen never ends: apart each tile goes on for it, packed they are a sixteenth as many tiles."""
    from tests.ops.threshold_relative.sanitizer import watched

    ones = torch.ones(1, 1, 256, 16)
    gate = torch.full((1, 1, 256), -9.0)
    gate[:, :, ::16] = 0.0

    def walk() -> int:
        with watched() as touched:
            run(ones, ones, ones, gate, score_bound=4.0)
        return touched.times

    # Of 256 keys a row sees 128 on average; packed, most rows walk 16 beyond their tile.
    assert walk() < 0.5 * apart(walk)


@pytest.mark.usefixtures("packed")
def test_no_launch_depends_on_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph replays is what was captured."""
    from tra.ops.threshold_relative.triton import launch

    query, key, value, gate = uneven(100)
    seen = []
    for gates in (gate, gate * 100, torch.zeros_like(gate)):
        launched: list[Any] = []
        with monkeypatch.context() as patch:
            for name in ("forward", "pack_rows", "backward_query", "list_visitors", "backward_key"):
                patch.setattr(launch.kernels, name, Counting(getattr(launch.kernels, name), launched))
            gradients((query, key, value, gates), torch.randn(1, 4, 100, 24))
        seen.append(launched)
    assert seen[0] == seen[1] == seen[2]


def test_packing_few_heads_at_a_time_changes_no_bit(packed: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch

    inputs = uneven(70, batch=2)
    expected, rounds = run(*inputs), len(packed)
    monkeypatch.setattr(launch, "SCRATCH", 3 * 4 * 140 * (32 + 4))  # three of four key heads
    assert torch.equal(run(*inputs), expected)
    assert len(packed) == 3 * rounds  # once, and then twice as often


def test_dropout_removes_the_weights_that_the_reference_removes() -> None:
    query, key, _, gate = grouped(70, 16, 16)
    identity = torch.eye(70).expand(2, 2, 70, 70).contiguous()
    removed = []
    for impl in ("triton", "reference", "cpu"):
        torch.manual_seed(5)
        removed.append(run(query, key, identity, gate / 100, dropout=0.4, tolerance=0.0, impl=impl) == 0)
    assert torch.equal(removed[0], removed[1])
    assert torch.equal(removed[0], removed[2])


@pytest.mark.parametrize("rows", [16, 128])
def test_rows_of_a_tile_change_no_bit(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    inputs, grad = tuple(x[:1] for x in grouped(100, 16, 16)), torch.randn(1, 4, 100, 16)
    options = {"tolerance": 1e-3, "score_bound": 4.0}
    use_tile(monkeypatch, 64, 32)
    expected = gradients(inputs, grad, **options)
    use_tile(monkeypatch, rows, 32)
    out, grad_query, grad_key, grad_value, grad_gate = gradients(inputs, grad, **options)
    assert torch.equal(out, expected[0])
    assert torch.equal(grad_query, expected[1])
    assert torch.equal(grad_gate, expected[4])
    # Sums over rows follow the blocks of rows, which for a device are fixed.
    assert_close(grad_key, expected[2])
    assert_close(grad_value, expected[3])


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles that were timed, by a stand-in for the clock to which the one with most stages is the fastest."""
    from tra.ops.threshold_relative.triton import tiles, tuning

    timed: list[Any] = []

    def clock(attempt: Any) -> float:
        attempt()
        choice = attempt.args[-1]
        timed.append(choice)
        return 1 / (choice if isinstance(choice, Tile) else choice[0]).stages

    monkeypatch.setattr(tiles, "choices", lambda *_: (Tile(32, 4, 2), Tile(32, 4, 4), Tile(32, 4, 3)))
    monkeypatch.setattr(tuning, "clock", clock)
    monkeypatch.setattr(tuning, "may_wait", lambda: True)
    monkeypatch.setattr(tuning, "fastest", {})
    return timed


def test_the_fastest_tile_is_found_once_for_each_kind_of_call(timed: list[Any]) -> None:
    from tra.ops.threshold_relative.triton import tuning

    inputs = tuple(x[:1] for x in grouped(40, 16, 16))
    run(*inputs)
    assert timed == [Tile(32, 4, 2), Tile(32, 4, 4), Tile(32, 4, 3)]
    assert list(tuning.fastest.values()) == [Tile(32, 4, 4)]
    run(*(x[:, :, :35] for x in inputs))  # as long, in powers of two
    assert len(timed) == 3
    run(*(x.bfloat16() for x in inputs))
    assert len(timed) == 6
    run(*(x[:, :, :20] for x in inputs))
    assert len(timed) == 9
    gradients(inputs, torch.randn(1, 4, 40, 16))
    assert len(timed) == 9 + 3 * 3  # backward has two kernels


def test_what_is_chosen_changes_no_bit(timed: list[Any]) -> None:
    from tra.ops.threshold_relative.triton import tuning

    inputs, grad = tuple(x[:1] for x in grouped(40, 16, 16)), torch.randn(1, 4, 40, 16)
    chosen = gradients(inputs, grad)
    assert timed
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "may_wait", lambda: False)
        patch.setattr(tuning, "fastest", {})
        first = gradients(inputs, grad)
    assert all(torch.equal(left, right) for left, right in zip(chosen, first, strict=True))


def test_nothing_is_timed_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import tuning

    timed: list[Any] = []
    capturing = True
    monkeypatch.setattr(tuning, "fastest", {})
    monkeypatch.setattr(tuning, "clock", lambda attempt: timed.append(attempt) or 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    assert tuning.choose("a call", ("first", "second"), print) == "first"
    assert not timed
    capturing = False  # and what was taken for want of time is not remembered
    tuning.choose("a call", ("first", "second"), print)
    assert len(timed) == 2
    assert tuning.choose("another", ("only",), print) == "only"
    assert len(timed) == 2


def test_tiles_to_choose_from_have_the_same_rows_and_warps() -> None:
    from tra.ops.threshold_relative.triton import tiles

    for family in tiles.HALF:
        for kernel in ("forward", "decode", "backward_query", "backward_key"):
            for dtype in triton.TYPES:
                for width in (16, 64, 65, 128, 129, 256):
                    found = tiles.choices(kernel, family, dtype, width, 16)
                    assert len({(tile.rows, tile.warps) for tile in found}) == 1
                    assert len({tile.stages for tile in found}) == len(found) <= 3


@pytest.mark.usefixtures("small_tiles")
def test_same_bits_alone_or_in_a_batch() -> None:
    inputs, grad = grouped(70, 16, 16), torch.randn(2, 4, 70, 16)
    together = gradients(inputs, grad)
    alone = gradients(tuple(x[1:] for x in inputs), grad[1:])
    assert all(torch.equal(left[1:], right) for left, right in zip(together, alone, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_backward_in_pieces_is_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch

    inputs, grad = tuple(x[:1] for x in grouped(70, 16, 16)), torch.randn(1, 4, 70, 16)
    whole = gradients(inputs, grad)
    launched = []
    monkeypatch.setattr(launch, "SCRATCH", 4 * 128 * 5)
    kernel = launch.kernels.backward_query
    monkeypatch.setattr(launch.kernels, "backward_query", Counting(kernel, launched))
    pieces = gradients(inputs, grad)
    assert len(launched) == 2 * 2 * 2  # clean and careful, two key heads, 140 rows of 128 each
    for left, right in zip(whole, pieces, strict=True):
        assert_close(left, right, rtol=1e-5, atol=1e-5)


class Counting:
    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.launched.append(grid)
        return self.kernel[grid]


def test_scratch_of_backward_is_capped_whatever_the_length() -> None:
    from tra.ops.threshold_relative.triton import launch

    for length in (1, 1000, 32768, 2**20, 2**23):
        key_blocks = math.ceil(length / 16)
        assert 4 * launch._chunk(key_blocks) * key_blocks <= launch.SCRATCH
        assert launch._chunk(key_blocks) % launch.MOST_ROWS == 0


@pytest.mark.parametrize("tolerance", [1e-1, 1e-3])
@pytest.mark.parametrize("kind", ["random", "rising"])
def test_certificate_holds(tolerance: float, kind: str) -> None:
    """|out(tolerance) - out(0)| <= tolerance * max |value|."""
    query, key, value, gate = random_inputs(batch=1, heads=2, queries=150, width=16, dtype=torch.float32)
    if kind == "rising":
        # The further back, the larger the score, up to the bound: the discarded tail is as heavy as it can be.
        query = torch.ones_like(query)
        key = torch.linspace(1.0, 0.01, 150)[:, None].expand(1, 2, 150, 16).contiguous()
        gate = torch.full_like(gate, -0.1)
    value = value.sign()
    whole = run(query, key, value, gate, tolerance=0.0).double()
    stopped = run(query, key, value, gate, tolerance=tolerance).double()
    assert (stopped - whole).abs().max() <= tolerance + 2e-6
    if kind == "rising":
        assert not torch.equal(stopped, whole)  # something was left out


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_no_key_is_read_beyond_the_blocks_that_rows_reach() -> None:
    from tests.ops.threshold_relative.sanitizer import watched

    ones = torch.ones(1, 1, 300, 16)
    leaves = [x.requires_grad_() for x in (ones.clone(), ones / 16, torch.randn(1, 1, 300, 16))]
    gate = torch.full((1, 1, 300), -1.0, requires_grad=True)
    options = {"tolerance": 1e-3, "score_bound": 4.0}
    last = [leaves[0][:, :, -20:], *leaves[1:], gate[:, :, -20:]]
    with watched() as touched:
        out = run(*last, **options)
        forward = touched.rows_read(leaves[2])
        touched.read.clear()
        torch.autograd.grad(out.sum(), [leaves[1]])
        backward = touched.rows_read(leaves[2])
    # The first of these rows stands at 280 and counts 12 keys; after 4 blocks of 16 it is asked.
    assert 269 in forward
    assert min(forward) >= 304 - 5 * 16
    assert set(forward) <= set(backward)


@interpreted
@pytest.mark.usefixtures("packed")
def test_no_access_of_packed_rows_is_out_of_bounds() -> None:
    from tests.ops.threshold_relative.sanitizer import watched

    with watched() as touched:
        gradients(uneven(75), torch.randn(1, 4, 75, 24), key_mask=MASK[:1], segment_ids=SEGMENTS[:1])
    assert touched.read


@interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width, value_width, queries", [(16, 40, 75), (23, 5, 37)])
def test_no_access_is_out_of_bounds(case: str, width: int, value_width: int, queries: int) -> None:
    from tests.ops.threshold_relative.sanitizer import watched

    query, key, value, gate = grouped(75, width, value_width)
    inputs = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value, gate))
    inputs = inputs[0][:, :, -queries:], *inputs[1:3], inputs[3][:, :, -queries:]
    with watched() as touched:
        gradients(inputs, torch.randn(2, 4, queries, value_width), **CASES[case])
    assert touched.read


@interpreted
def test_the_sanitizer_finds_an_access_out_of_bounds() -> None:
    import triton as compiler
    import triton.language as tl

    from tests.ops.threshold_relative.sanitizer import watched

    @compiler.jit
    def one_too_many(pointer, N: tl.constexpr):  # type: ignore[no-untyped-def]
        tl.load(pointer + tl.arange(0, N))

    with watched():
        one_too_many[(1,)](torch.zeros(16), 16)
        with pytest.raises(Exception, match="1 accesses out of bounds"):
            one_too_many[(1,)](torch.zeros(16)[:15], 16)


@pytest.mark.parametrize(
    "score, threshold, size", [(30.0, 0.0, 1e30), (8.0, 0.0, 1e35), (-35.0, -39.0, 1e-30), (0.0, -1.0, 1e-38)]
)
def test_weights_neither_overflow_nor_vanish(score: float, threshold: float, size: float) -> None:
    query, key = torch.ones(1, 1, 70, 1), torch.full((1, 1, 70, 1), score)
    value = torch.rand(1, 1, 70, 3) * size
    gate = torch.full((1, 1, 70), -0.1)
    inputs = (query, key, value, gate)
    grad = torch.ones(1, 1, 70, 3)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", threshold=threshold)
    ours = gradients(inputs, grad, threshold=threshold)
    for place in (0, 3):  # the output, and the gradient of values
        assert_close(ours[place].double(), exact[place], rtol=1e-5, atol=0.0)


def test_empty_rows_are_zero_with_zero_gradients_beside_others() -> None:
    query, key, value, gate = grouped(66, 16, 16)
    query[:, :, 5] = 0.0
    out, grad_query, *_, grad_gate = gradients((query, key, value, gate), torch.randn(2, 4, 66, 16))
    assert (out[:, :, 5] == 0).all()
    assert (grad_query[:, :, 5] == 0).all()
    assert (grad_gate[:, :, 5] == 0).all()
    assert (grad_query[:, :, 40:] != 0).any()


def test_kernels_compile_within_their_ceilings() -> None:
    """Two processors, one width; `make gpu-check` compiles for all. Not in this process, which interprets."""
    ceilings = json.loads(Path(__file__).with_name("ceilings.json").read_text())
    if version("triton") not in ceilings:
        pytest.skip(f"no ceilings are stored for Triton {version('triton')}, but for {', '.join(ceilings)}")
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.threshold_relative.ahead_of_time", "--fast"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"registers": 201}, "registers 201 > 200"),
        ({"stack": 8}, "stack 8 > 0"),
        ({"shared": 1025}, "shared 1025 > 1024"),
        ({"occupancy": 0.1}, "occupancy 0.1 < 0.25"),
        ({"scores": False}, "the scores' instruction is not mma.sync.aligned.m16n8k16"),
        ({"copies": 0}, "no asynchronous copies"),
        ({"width": 80}, "no ceiling is stored"),
    ],
    ids=str,
)
def test_what_compiles_worse_than_before_is_complained_of(changes: dict[str, Any], message: str | None) -> None:
    from tests.ops.threshold_relative.ahead_of_time import Compiled, complaints

    good = Compiled("sm_80", "forward", "bfloat16", 64, "", "64x32, 4 warps", 200, 0, 1024, 0.25, True, 8)
    ceilings = {good.name: {"registers": 200, "stack": 0, "shared": 1024, "occupancy": 0.25}}
    found = complaints([replace(good, **changes)], ceilings)
    assert (message is None and not found) or message in found[0]


@pytest.mark.parametrize(
    "inputs, message",
    [
        (random_inputs(), "impl 'triton' computes in float32, bfloat16 and float16, got torch.float64"),
        (random_inputs(width=257, dtype=torch.float32), "impl 'triton' takes widths up to 256, got 257 and 257"),
        (
            tuple(x[:1].expand(40_000, *x.shape[1:]) for x in random_inputs(1, 2, queries=1, dtype=torch.float32)),
            "impl 'triton' takes batches of up to 65535 key heads, got 80000",
        ),
    ],
)
def test_what_it_cannot_take_it_refuses(inputs: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*inputs)


OPTIONS = Options(1.0, 0.0, 0.0, 0.0, 0.0, None)


def on_fake_gpu(dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """As much of a call on a GPU as a refusal looks at."""
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=(1, 2, 8, 64))
    return Inputs(tensor, tensor, tensor, tensor, *[None] * 5)


def test_auto_takes_it_on_a_gpu_and_the_native_kernel_on_a_cpu() -> None:
    assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "triton"
    tensors = random_inputs(dtype=torch.float32)
    assert implementations.choose("auto", Inputs(*tensors, *[None] * 5), OPTIONS) == "cpu"
    assert implementations.choose("auto", on_fake_gpu(torch.float64), OPTIONS) == "reference"


def test_without_triton_auto_says_once_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INSTALLED", False)
    monkeypatch.setattr(implementations, "_said", set())
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "triton", triton)
    with pytest.warns(UserWarning, match=r"needs Triton: pip install 'threshold-relative-attention\[gpu\]'"):
        assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "reference"
    with pytest.raises(ValueError, match="impl 'triton' needs Triton"):
        implementations.choose("triton", on_fake_gpu(), OPTIONS)
    assert triton.about().endswith("not usable here: it needs Triton: pip install 'threshold-relative-attention[gpu]'")


def test_cpu_tensors_are_refused_unless_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INTERPRETED", False)
    tensors = random_inputs(dtype=torch.float32)
    reason = triton.refusal(Inputs(*tensors, *[None] * 5), OPTIONS)
    assert reason == "needs tensors on a GPU, got cpu"


def test_tiles_walk_whole_blocks_of_the_rows_that_are_gathered() -> None:
    from tra.ops.threshold_relative.triton import launch

    for kernels in (FLOAT32, *HALF.values()):
        for walked, gathered in zip(kernels["backward_query"], kernels["backward_key"], strict=True):
            assert walked[0] % gathered[0] == 0
            assert launch.MOST_ROWS % walked[0] == 0


def test_an_implementation_on_another_device_gives_what_it_gives_here() -> None:
    inputs, grad = grouped(20, 8, 8), torch.randn(2, 4, 20, 8)
    moved = OnDevice(cpu, torch.device("cpu"))
    call = Inputs(*inputs, *[None] * 5)
    assert moved.refusal(call, OPTIONS) is None
    result = moved.forward(call, OPTIONS, True)
    assert torch.equal(result.out, run(*inputs, impl="cpu", scale=1.0, tolerance=0.0))
    expected = gradients(inputs, grad, impl="cpu", scale=1.0, tolerance=0.0)[1:]
    for left, right in zip(moved.backward(grad, call, result, OPTIONS)[:4], expected, strict=True):
        assert torch.equal(left, right)


@on_gpu
def test_nothing_waits_for_the_device_and_a_graph_replays_it() -> None:
    inputs = [x.cuda().requires_grad_() for x in random_inputs(queries=300, width=64, dtype=torch.float32)]
    expected = run(*inputs)
    torch.autograd.grad(expected.sum(), inputs)  # the first call of a kind may wait: it times tiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(run(*inputs).sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = run(*inputs)
    graph.replay()
    assert torch.equal(out, expected)

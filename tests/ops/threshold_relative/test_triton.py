"""What the Triton kernels promise beyond the operator's semantics: on a GPU where there is one, else interpreted."""

import math
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.inputs import integer_inputs, random_inputs
from tests.ops.threshold_relative.on_device import OnDevice
from tests.ops.threshold_relative.test_straight_through import Case, strained
from tests.ops.threshold_relative.test_straight_through import gradients as gradients_through
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative import cpu, implementations, triton
from tra.ops.threshold_relative.call import Inputs, Options, Result
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
    batch = 2 if case == "masks" else 1
    inputs = tuple(x[:batch] for x in grouped(75, 40, 24))
    grad = torch.randn(batch, 4, 75, 24)
    exact = gradients(tuple(x.double() for x in inputs), grad, impl="reference", **CASES[case])
    for right, ours in zip(exact, gradients(inputs, grad, **CASES[case]), strict=True):
        assert_close(ours.double(), right, rtol=1e-5, atol=2e-6 * (1 + right.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_float32_sums(dtype: torch.dtype) -> None:
    inputs = tuple(x[:1] for x in grouped(97, 64, 16, dtype))
    grad = torch.randn(1, 4, 97, 16).to(dtype)
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
@pytest.mark.parametrize("queries, gate", [(1, 0.0), (1, -0.01), (1, -0.3), (1, -2.0), (5, -0.01), (5, -0.3)])
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
    allowed = options.get("tolerance", 0.0) * inputs[2].nan_to_num(0.0).abs().max().item()
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


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("gate", [-0.01, -0.3])
def test_decoding_in_parts_with_lengths_on_the_device_equals_the_reference(gate: float) -> None:
    query, key, value, _ = grouped(150, 16, 24)
    inputs = query[:, :, -2:], key, value, torch.full((2, 4, 2), gate)
    lengths = torch.tensor([3, 131])
    for sequence, length in enumerate(lengths):
        value[sequence, :, length:] = math.nan
    options: dict[str, Any] = {"key_lengths": lengths, "scale": 1.0, "threshold": row_thresholds(2, 4, 2)}
    assert_parts_equal_the_reference(inputs, tolerance=1e-4, **options)
    assert_parts_equal_the_reference(inputs, key_mask=LONG_MASK, segment_ids=LONG_SEGMENTS, **options)


@interpreted
@pytest.mark.usefixtures("parts")
def test_a_captured_step_of_decoding_serves_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is launched, with which numbers, depends neither on lengths nor on thresholds; nor is a key read that is not
    there."""
    from tests.ops.threshold_relative.sanitizer import watched
    from tra.ops.threshold_relative.triton import launch

    class Recording(Counting):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch_it(**given: Any) -> None:
                numbers = {name: x for name, x in given.items() if not isinstance(x, Tensor)}
                self.launched.append((self.kernel.__name__, grid, numbers))
                self.kernel[grid](**given)

            return launch_it

    ones, value = torch.ones(1, 1, 140, 16), torch.randn(1, 1, 140, 24)
    seen = []
    for length in (1, 20, 121):
        launched: list[Any] = []
        with monkeypatch.context() as patch, watched() as touched:
            for name in launch.kernels.__all__:
                patch.setattr(launch.kernels, name, Recording(getattr(launch.kernels, name), launched))
            options = {"key_lengths": torch.tensor([length]), "threshold": torch.full((1, 1, 1), length / 1000)}
            run(ones[:, :, :1] / 16, ones, value, torch.full((1, 1, 1), -0.02), score_bound=4.0, **options)
        assert touched.rows_read(value) == list(range(length))
        seen.append(launched)
    assert seen[0] == seen[1] == seen[2]


@on_gpu
def test_a_graph_of_a_step_is_replayed_while_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "triton", triton)  # not by way of CPU tensors
    query, key, value, gate = (x.cuda() for x in random_inputs(2, 4, 2, 1, 3000, 64, dtype=torch.bfloat16))
    lengths = torch.tensor([700, 1], device="cuda")
    threshold = torch.zeros(2, 4, 1, device="cuda")
    options: dict[str, Any] = {"key_lengths": lengths, "threshold": threshold, "score_bound": 60.0}
    run(query, key, value, gate.float(), **options)  # proves itself and times tiles
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        lengths += 1
        out = run(query, key, value, gate.float(), **options)
    for step in range(1, 40):
        graph.replay()
        for sequence, length in enumerate((700 + step, 1 + step)):
            its = (x[sequence : sequence + 1] for x in (query, key[:, :, :length], value[:, :, :length], gate.float()))
            assert_close(out[sequence : sequence + 1], run(*its, score_bound=60.0), rtol=2e-2, atol=2e-2)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Packing in rounds at small lengths; tells how many rows were in each of those after the first."""
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=16, keys=16)
    monkeypatch.setattr(launch, "PACKED_FROM", 64)
    monkeypatch.setattr(launch, "FIRST_ROUND", 16)
    monkeypatch.setattr(launch, "GROWTH", 2)
    monkeypatch.setattr(launch, "MOST_ROWS", 16)
    pack, rows = launch.pack, []

    def counted(*arguments: Any) -> Tensor:
        order = pack(*arguments)
        rows.append(int((order >= 0).sum()))
        return order

    monkeypatch.setattr(launch, "pack", counted)
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
    "masks and dropout": (
        torch.float32,
        {"dropout": 0.3, "key_mask": LONG_MASK[:1, :72], "segment_ids": (torch.arange(72) > 9).long()[None]},
    ),
}


@pytest.mark.parametrize("case", PACKED_CASES)
def test_packing_changes_no_bit(packed: list[int], apart: Any, case: str) -> None:
    dtype, options = PACKED_CASES[case]
    inputs, grad = uneven(72, dtype=dtype), torch.randn(1, 4, 72, 24)
    together = gradients(inputs, grad, **options)
    assert 288 > packed[0] > packed[1] > 0  # rows of the second round and the third
    assert packed[-1] == 288  # backward's order has every row
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

    query, key, value, gate = uneven(72)
    seen = []
    for gates in (gate * 100, torch.zeros_like(gate)):
        launched: list[Any] = []
        with monkeypatch.context() as patch:
            for name in launch.kernels.__all__:
                patch.setattr(launch.kernels, name, Counting(getattr(launch.kernels, name), launched))
            gradients((query, key, value, gates), torch.randn(1, 4, 72, 24))
        seen.append(launched)
    assert seen[0] == seen[1]


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
    inputs, grad = tuple(x[:1] for x in grouped(70, 16, 16)), torch.randn(1, 4, 70, 16)
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

    inputs = tuple(x[:1] for x in grouped(20, 16, 16))
    run(*inputs)
    assert timed == [Tile(32, 4, 2), Tile(32, 4, 4), Tile(32, 4, 3)]
    assert list(tuning.fastest.values()) == [Tile(32, 4, 4)]
    run(*(x[:, :, :18] for x in inputs))  # as long, in powers of two
    assert len(timed) == 3
    run(*(x.bfloat16() for x in inputs))
    assert len(timed) == 6
    run(*(x[:, :, :10] for x in inputs))
    assert len(timed) == 9
    gradients(inputs, torch.randn(1, 4, 20, 16))
    assert len(timed) == 9 + 3 * 3  # backward has two kernels


def test_what_is_chosen_changes_no_bit(timed: list[Any]) -> None:
    from tra.ops.threshold_relative.triton import tuning

    inputs, grad = tuple(x[:1] for x in grouped(20, 16, 16)), torch.randn(1, 4, 20, 16)
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
    assert tuning.run_fastest("a call", ("first", "second"), str.upper) == "FIRST"
    assert not timed
    capturing = False  # and what was taken for want of time is not remembered
    tuning.run_fastest("a call", ("first", "second"), str.upper)
    assert len(timed) == 2
    assert tuning.run_fastest("another", ("only",), str.upper) == "ONLY"
    assert len(timed) == 2


@pytest.mark.parametrize("may_wait", [True, False])
def test_a_tile_that_the_device_refuses_is_passed_over(monkeypatch: pytest.MonkeyPatch, may_wait: bool) -> None:
    from triton.runtime.errors import OutOfResources

    from tra.ops.threshold_relative.triton import tuning

    def attempt(choice: str) -> str:
        if "large" in choice:
            raise OutOfResources(200_000, 101_376, "shared memory")
        return choice

    monkeypatch.setattr(tuning, "fastest", {})
    monkeypatch.setattr(tuning, "may_wait", lambda: may_wait)
    monkeypatch.setattr(tuning, "clock", lambda attempt: attempt() and 1.0)
    assert tuning.run_fastest("a call", ("large", "small"), attempt) == "small"
    with pytest.raises(OutOfResources, match="shared memory"):
        tuning.run_fastest("another", ("large", "larger"), attempt)


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
    inputs, grad = grouped(40, 16, 16), torch.randn(2, 4, 40, 16)
    together = gradients(inputs, grad)
    alone = gradients(tuple(x[1:] for x in inputs), grad[1:])
    assert all(torch.equal(left[1:], right) for left, right in zip(together, alone, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_backward_in_pieces_is_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch

    inputs, grad = tuple(x[:1] for x in grouped(70, 16, 16)), torch.randn(1, 4, 70, 16)
    whole = gradients(inputs, grad)
    launched = []
    monkeypatch.setattr(launch, "SCRATCH", 4 * 128 * 5)  # 128 rows with a count for each of five key blocks
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

    @property
    def arg_names(self) -> list[str]:
        return self.kernel.arg_names


def test_scratch_of_backward_is_capped_whatever_the_length() -> None:
    from tra.ops.threshold_relative.triton import launch

    for length in (1, 1000, 32768, 2**20, 2**23):
        for learns in (False, True):
            plan = launch.plan_backward(16, length, length, 16, learns)
            assert 4 * (1 + learns) * plan.together * plan.rows * plan.stretches <= launch.SCRATCH
            assert plan.rows % launch.MOST_ROWS == 0
            assert plan.stretch * plan.stretches * 16 >= length


def test_backward_over_a_million_tokens_takes_few_launches_and_passes() -> None:
    """By arithmetic: docs/gpu.md names these numbers."""
    from tra.ops.threshold_relative.triton import launch

    places = 2**20 + 7 * launch.MOST_ROWS  # rows of each of eight rounds begin a tile
    plan = launch.plan_backward(units=16, places=places, keys=2**20, block=16, learns=False)
    assert plan.launches == 1360
    assert plan.scratch(learns=False, rows_of_a_tile=32) < 300 * 2**20
    programs = plan.pieces * plan.together * (plan.stretches + plan.rows // 64)
    assert programs < 2**20  # of both kernels, most of which find nothing and return
    longer = launch.plan_backward(units=16, places=places, keys=2**20, block=16, learns=True)
    assert longer.launches <= 2 * plan.launches


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
def test_no_walk_reads_a_key_beyond_the_blocks_that_rows_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.ops.threshold_relative.sanitizer import Touched, watched
    from tra.ops.threshold_relative.triton import launch

    class Forgotten(Counting):
        """The prologue, which looks at everything."""

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: (self.kernel[grid](**given), touched.read.clear())

    touched: Touched
    monkeypatch.setattr(launch.kernels, "look_at_keys", Forgotten(launch.kernels.look_at_keys, []))

    ones, value = torch.ones(1, 1, 300, 16), torch.randn(1, 1, 300, 16)
    query, gate = ones[:, :, -20:].clone().requires_grad_(), torch.full((1, 1, 20), -1.0)
    with watched() as touched:
        out = run(query, ones / 16, value, gate, tolerance=1e-3, score_bound=4.0)
        forward = touched.rows_read(value)
        touched.read.clear()
        out.sum().backward()  # of queries alone: for keys and values see the next test
        backward = touched.rows_read(value)
    # The first of these rows stands at 280 and counts 12 keys; after 4 blocks of 16 it is asked.
    assert forward == backward == list(range(304 - 4 * 16, 300))


@interpreted
@pytest.mark.usefixtures("small_tiles")
def test_backward_visits_the_blocks_that_rows_reach_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients do not tell: beyond the reach of a row they are 0."""
    from tests.ops.threshold_relative.sanitizer import watched
    from tra.ops.threshold_relative.triton import launch

    ones, listed, read = torch.ones(1, 1, 300, 16), [], []

    class Noting(Counting):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch_it(**given: Any) -> None:
                touched.read.clear()
                self.kernel[grid](**given)
                if "ADDS" in given and not given["CAREFUL"]:
                    read.append((given["ADDS"], touched.rows_read(given["v_ptr"])))
                    lists = given["visitors_ptr"].view(grid[0], -1)
                    tiles = given["first_place"] // 32
                    listed.append([{tiles + x for x in row[1 : 1 + row[0]].tolist()} for row in lists])

            return launch_it

    def visited(tile: int) -> range:
        """From that of its last row on, four: its rows count 12 keys, and are asked after four blocks."""
        last = min(2 * tile + 1, 18)
        return range(max(last - 3, 0), last + 1)

    monkeypatch.setattr(launch.kernels, "backward_key", Noting(launch.kernels.backward_key, []))
    for scratch in (launch.SCRATCH, 4 * 128 * 19):  # all 300 rows at once, and 128 of them
        monkeypatch.setattr(launch, "SCRATCH", scratch)
        listed.clear()
        read.clear()
        inputs = ones, ones / 16, ones, torch.full((1, 1, 300), -1.0)
        with watched() as touched:
            gradients(inputs, ones, tolerance=1e-3, score_bound=4.0)
        for block in range(19):
            found = set().union(*(lists[block] for lists in listed))
            assert found == {tile for tile in range(10) if block in visited(tile)}
        for piece, (adds, keys) in enumerate(read):
            blocks = {block for tile in range(4 * piece, min(4 * piece + 4, 10)) for block in visited(tile)}
            # The first piece writes zeros for keys that no row visits; later ones leave them alone.
            assert not adds or keys == [key for key in range(300) if key // 16 in blocks]
    assert [adds for adds, _ in read] == [False, True, True]


@interpreted
@pytest.mark.parametrize("stretch", [1, 3])
def test_lists_of_visitors_hold_each_tile_that_came_and_no_others(stretch: int) -> None:
    """Tiles that walked no block may be in lists of several blocks, each of which looks at their range again."""
    from tra.ops.threshold_relative.triton import kernels

    units, stretches, walks = 2, 9, 23  # walks of 32 rows, lists of tiles of 16
    begin = torch.randint(stretch * stretches, (units, walks))
    end = (begin - torch.randint(int(stretch > 1), 12, (units, walks))).clamp(min=-1)  # the next block
    visitors = torch.full((units, stretches, 1 + 2 * walks), -1, dtype=torch.int32)
    kernels.list_visitors[(stretches, units)](
        range_ptr=torch.stack([begin, end], 2).int(),
        visitors_ptr=visitors,
        walks=walks,
        row_blocks=2 * walks,
        stretch=stretch,
        WALKED=32,
        M=16,
        SIZE=32,
    )
    for unit in range(units):
        for place in range(stretches):
            blocks = torch.arange(place * stretch, (place + 1) * stretch)[:, None]
            came = ((blocks <= begin[unit]) & (blocks > end[unit])).any(0).repeat_interleave(2)
            expected = came.nonzero()[:, 0].tolist()
            padding = [-1] * (2 * walks - len(expected))
            assert visitors[unit, place].tolist() == [len(expected), *expected, *padding]


@interpreted
def test_walks_look_more_seldom_the_longer_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 4, 8, 12, 16, 20, 25, 31 and 38 blocks whether a row is left that needs 32 of them: a pipeline is filled
    anew after each look."""
    from tests.ops.threshold_relative.sanitizer import watched
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=16, keys=16)
    ones, value = torch.ones(1, 1, 800, 16), torch.randn(1, 1, 800, 16)
    monkeypatch.setattr(launch, "NEAR_KEYS", 784)
    with watched() as touched:
        gate = torch.full((1, 1, 1), -11.6 / 505)  # done after 506 keys
        run(ones[:, :, :1], ones / 16, value, gate, tolerance=1e-3, score_bound=4.0)
    assert touched.rows_read(value)[0] == 800 - 38 * 16


@interpreted
@pytest.mark.parametrize("exact, bits", [(False, 16), (True, 22)])
def test_sums_of_logit_gradients_are_exact_to_more_bits_than_a_bfloat16_has(exact: bool, bits: int) -> None:
    """Two parts of bfloat16 beside half precision, three beside float32."""
    import triton as compiler
    import triton.language as tl

    from tra.ops.threshold_relative.triton.kernels.backward import nearer_sum
    from tra.ops.threshold_relative.triton.kernels.walk import later_keys

    @compiler.jit
    def compute(x_ptr, out_ptr, SUM: tl.constexpr, LATER: tl.constexpr, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + place, SUM(tl.load(x_ptr + place), LATER(16), EXACT))

    x, out = torch.randn(16, 16), torch.empty(16, 16)
    compute[(1,)](x, out, nearer_sum, later_keys, exact)
    later = torch.ones(16, 16, dtype=torch.float64).tril(-1)
    error = (out.double() - x.double() @ later).abs()
    assert (error <= 2.0**-bits * (x.double().abs() @ later)).all()


@interpreted
@pytest.mark.usefixtures("packed")
def test_no_access_of_packed_rows_is_out_of_bounds() -> None:
    from tests.ops.threshold_relative.sanitizer import watched

    with watched() as touched:
        gradients(uneven(75), torch.randn(1, 4, 75, 24), key_mask=MASK[:1], segment_ids=SEGMENTS[:1])
    assert touched.read


@interpreted
@pytest.mark.parametrize(
    "width, value_width, queries, case",
    [*((23, 5, 37, case) for case in ("plain", "dropout", "masks", "bound")), (16, 40, 75, "masks")],
)
def test_no_access_is_out_of_bounds(width: int, value_width: int, queries: int, case: str) -> None:
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


def test_kernels_compile_within_their_limits() -> None:
    """Two processors at one width, and what needs most shared memory on a third that has little; `make gpu-check`
    compiles for all. Not in this process, which interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ops.threshold_relative.ahead_of_time", "--fast"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_processor_dtype_and_width_is_compiled_with_everything_at_once() -> None:
    """`make gpu-check`. Backward in float32 at width 256 once took more shared memory than three of these GPUs have."""
    from tests.ops.threshold_relative.ahead_of_time import PROCESSORS, WIDEST_OF_A_TILE, wanted

    assert {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"} == set(PROCESSORS)
    assert {PROCESSORS[target].limit for target in ("sm_86", "sm_89", "sm_120")} == {99 * 1024}
    found = set(wanted(fast=False))
    for variant in ("", "everything"):
        assert {(target, *kind, variant) for target in PROCESSORS for kind in WIDEST_OF_A_TILE} <= found
    assert {("bfloat16", 64), ("bfloat16", 128), ("bfloat16", 256), ("float32", 256)} <= set(WIDEST_OF_A_TILE)
    assert ("sm_86", "float32", 256, "") in wanted(fast=True)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({}, None),
        ({"stack": 8}, "8 bytes of stack, 0 are allowed"),
        ({"width": 256, "stack": 24}, None),
        ({"width": 256, "stack": 32}, "32 bytes of stack, 24 are allowed"),
        ({"registers": 300, "occupancy": 0.0}, "300 registers in 64x16, 4 warps are more than the processor has"),
        ({"shared": 101_377}, "101377 bytes of shared memory, the processor has 101376"),
        ({"scores": False}, "the instruction of the scores is missing"),
        ({"copies": 0}, "no asynchronous copies"),
    ],
    ids=str,
)
def test_what_compiles_badly_is_complained_of(changes: dict[str, Any], message: str | None) -> None:
    from tests.ops.threshold_relative.ahead_of_time import Compiled, complaints

    good = Compiled("sm_86", "forward", "bfloat16", 64, "", "64x16, 4 warps", 200, 0, 1024, 0.25, True, 8)
    found = complaints([replace(good, **changes)], {"sm_86 * 256*": 24, "*": 0})
    assert (message is None and not found) or message in found[0]


def test_the_product_of_the_count_does_not_pass_for_that_of_the_scores() -> None:
    from tests.ops.threshold_relative.ahead_of_time import has_instruction

    count = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %f1"
    scores = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1"
    assert not has_instruction(count, "sm_80", "bfloat16", 64, 16)
    assert has_instruction(count + scores, "sm_80", "bfloat16", 64, 16)
    wide = "wgmma.mma_async.sync.aligned.m64n32k16.f32.{0}.{0} %rs1"
    assert not has_instruction(wide.format("f16"), "sm_90", "bfloat16", 64, 32)
    assert has_instruction(wide.format("bf16"), "sm_90", "bfloat16", 64, 32)
    assert not has_instruction(wide.format("bf16"), "sm_90", "bfloat16", 64, 64)


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


def on_fake_gpu(dtype: torch.dtype = torch.bfloat16, shape: tuple[int, ...] = (1, 2, 8, 64)) -> Inputs:
    """As much of a call on a GPU as a refusal looks at."""
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, shape=shape)
    return Inputs(tensor, tensor, tensor, tensor, *[None] * 5)


@pytest.fixture
def believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels need not prove themselves, which takes the device they are for."""
    monkeypatch.setattr(triton, "CHECKED", ())


@pytest.mark.usefixtures("believed")
def test_auto_takes_it_on_a_gpu_and_the_native_kernel_on_a_cpu() -> None:
    assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "triton"
    tensors = random_inputs(dtype=torch.float32)
    assert implementations.choose("auto", Inputs(*tensors, *[None] * 5), OPTIONS) == "cpu"
    assert implementations.choose("auto", on_fake_gpu(torch.float64), OPTIONS) == "reference"


def test_without_triton_auto_says_once_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "INSTALLED", False)
    monkeypatch.setattr(implementations, "_said", set())
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "triton", triton)
    with pytest.warns(
        UserWarning, match=r"needs Triton: pip install '\.\[gpu\]' in a clone of threshold-relative-attention"
    ):
        assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert implementations.choose("auto", on_fake_gpu(), OPTIONS) == "reference"
    with pytest.raises(ValueError, match="impl 'triton' needs Triton"):
        implementations.choose("triton", on_fake_gpu(), OPTIONS)
    assert triton.about().endswith(
        "not usable here: it needs Triton: pip install '.[gpu]' in a clone of threshold-relative-attention"
    )


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
    assert OnDevice(triton, torch.device("cpu")).RESIDUAL is triton.RESIDUAL
    call = Inputs(*inputs, *[None] * 5)
    assert moved.refusal(call, OPTIONS) is None
    result = moved.forward(call, OPTIONS, True)
    assert torch.equal(result.out, run(*inputs, impl="cpu", scale=1.0, tolerance=0.0))
    expected = gradients(inputs, grad, impl="cpu", scale=1.0, tolerance=0.0)[1:]
    for left, right in zip(moved.backward(grad, call, result, OPTIONS)[:4], expected, strict=True):
        assert torch.equal(left, right)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).abs().max() / exact.abs().max()).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_gradient_of_the_gate_survives_rounding_at_large_distances(dtype: torch.dtype, mean: float) -> None:
    """One row over 2,048 keys: what rounding leaves of a sum that should be 0 must not be multiplied by distances."""
    query, key = torch.ones(1, 1, 1, 16), torch.full((1, 1, 2048, 16), 0.125)
    key[:, :, :2] = 8.0
    value = torch.randn(1, 1, 2048, 16) + mean
    inputs = *(x.to(dtype) for x in (query, key, value)), torch.full((1, 1, 1), -1e-3)
    grad = torch.ones(1, 1, 1, 16, dtype=dtype)
    options: dict[str, Any] = {"tolerance": 0.0, "scale": 1 / 16}
    exact = gradients(tuple(x.double() for x in inputs), grad.double(), impl="reference", **options)
    assert relative_error(gradients(inputs, grad, **options)[4], exact[4]) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradient_of_the_gate_survives_rounding_among_random_keys(dtype: torch.dtype) -> None:
    """Half of 2,048 keys are kept, values have a mean of 1."""
    query, key = (torch.randint(-2, 3, (1, 1, length, 16)) for length in (3, 2048))
    value, gate = torch.randn(1, 1, 2048, 16) + 1, torch.full((1, 1, 3), -1e-3)
    inputs, grad = (*(x.to(dtype) for x in (query, key, value)), gate), torch.randn(1, 1, 3, 16).to(dtype)
    options: dict[str, Any] = {"tolerance": 0.0, "scale": 1 / 16}
    exact = gradients(tuple(x.double() for x in inputs), grad.double(), impl="reference", **options)
    assert relative_error(gradients(inputs, grad, **options)[4], exact[4]) < 1e-5


@interpreted
def test_every_launch_is_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device: here that is 0, and the tensors are on 1. Also while tiles are timed."""
    from tra.ops.threshold_relative.triton import launch, tiles, tuning

    current, seen = [0], []

    class FakeDevice:
        def __init__(self, device: torch.device) -> None:
            self.index = device.index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Asking(Counting):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            seen.append(current[-1])
            return self.kernel[grid]

    for name in launch.kernels.__all__:
        monkeypatch.setattr(launch.kernels, name, Asking(getattr(launch.kernels, name), []))
    guard = launch.guard
    monkeypatch.setattr(torch.cuda, "device", FakeDevice)
    monkeypatch.setattr(launch, "guard", lambda device: guard(torch.device("cuda", 1)))
    monkeypatch.setattr(tiles, "choices", lambda *_: (Tile(32, 4, 2), Tile(32, 4, 3)))
    monkeypatch.setattr(tiles, "keys_per_block", lambda *_: 16)
    monkeypatch.setattr(launch, "NEAR_KEYS", 32)
    monkeypatch.setattr(launch, "PART_KEYS", 32)
    monkeypatch.setattr(tuning, "may_wait", lambda: True)
    monkeypatch.setattr(tuning, "clock", lambda attempt: float(attempt() is None))
    monkeypatch.setattr(tuning, "fastest", {})
    inputs = tuple(x[:1] for x in grouped(40, 16, 16))
    gradients(inputs, torch.randn(1, 4, 40, 16))
    run(inputs[0][:, :, -1:], *inputs[1:3], inputs[3][:, :, -1:])
    assert len(tuning.fastest) == 3
    assert len(seen) > 20
    assert set(seen) == {1}


GENERATING = """
import torch
from tests.ops.threshold_relative.ahead_of_time import recorded, signature_of
from tra.ops.threshold_relative.call import Inputs, Options, Result
from tra.ops.threshold_relative.triton import launch

kinds = {}
for length in (1000, 1001, 1008, 1024, 2600, 20000):  # of one round of decoding, two and three
    cache = torch.ones(2, 2, length, 64, dtype=torch.bfloat16)
    mask = torch.ones(2, length, dtype=torch.bool)
    query = torch.ones(2, 4, 1, 64, dtype=torch.bfloat16)
    inputs = Inputs(query, cache, cache, -torch.ones(2, 4, 1), mask, *[None] * 4)
    with recorded("warp") as found:
        launch.forward(inputs, Options(0.1, 0.0, 0.0, 0.0, 1e-7, None), training=False)
    for launched in found:
        kind = str((signature_of(launched), launched.options))
        kinds.setdefault(launched.kernel.__name__, set()).add(kind)
assert "join_parts" in kinds
assert all(len(found) == 1 for found in kinds.values()), kinds
"""


def test_nothing_is_compiled_again_while_tokens_are_generated() -> None:
    """A cache that grows by a token has another length, but no other kernels. Not in this process, which interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", GENERATING], cwd=ROOT, env=environment, check=True)


class Operations(TorchDispatchMode):
    """Names of the operations that launch something on a device: all but views and allocations."""

    FREE = ("empty", "view", "expand", "as_strided", "slice", "select", "transpose", "detach", "alias", "unbind")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        if not any(free in name for free in self.FREE):
            self.names.append(name)
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    "queries, bound, masks, expected",
    [
        (70, None, False, ["zeros", "look_at_keys", "cummax", "look_at_rows", "forward", "forward"]),
        (70, 4.0, False, ["zeros", "look_at_keys", "look_at_rows", "forward", "forward"]),
        (70, 4.0, True, ["full", "zeros", "look_at_masks", "look_at_keys", "look_at_rows", "forward", "forward"]),
        (1, 4.0, False, ["look_at_rows", "forward", "decode_part", "join_parts"]),
        (1, None, False, ["look_at_keys", "cummax", "look_at_rows", "forward", "decode_part", "join_parts"]),
    ],
    ids=["prefill", "prefill with a bound", "packed documents and padding", "decoding with a bound", "decoding"],
)
@pytest.mark.usefixtures("small_tiles")
def test_few_operations_surround_the_kernels(
    monkeypatch: pytest.MonkeyPatch, queries: int, bound: float | None, masks: bool, expected: list[str]
) -> None:
    from tra.ops.threshold_relative.triton import launch

    monkeypatch.setattr(launch, "NEAR_KEYS", 32)
    monkeypatch.setattr(launch, "PART_KEYS", 64)
    query, key, value, gate = grouped(70, 16, 16)
    some = (MASK[:, :70].contiguous(), SEGMENTS[:, :70].contiguous()) if masks else (None, None)
    inputs = Inputs(query[:, :, -queries:], key, value, gate[:, :, -queries:], *some, *[None] * 4)
    with Operations() as operations:
        for name in launch.kernels.__all__:
            kernel = getattr(launch.kernels, name)
            monkeypatch.setattr(launch.kernels, name, Listed(kernel, operations.names))
        launch.forward(inputs, Options(0.25, 0.0, 0.0, 0.0, 1e-7, bound), training=False)
        assert operations.names == expected
        if queries == 70:
            operations.names.clear()
            result = Result(query.new_empty(query.shape), query.new_empty(2, 4, 70, 2), None)
            launch.backward(query, inputs, result, Options(0.25, 0.0, 0.0, 0.0, 1e-7, bound))
            walks = ["backward_query", "backward_query", "list_visitors", "backward_key", "backward_key"]
            assert operations.names == [*expected[:-2], *walks]


@interpreted
@pytest.mark.usefixtures("parts")
def test_every_launch_says_whether_products_and_sums_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.10 changes the default, and with it the last bits."""
    from tra.ops.threshold_relative.triton import launch

    options: list[dict[str, Any]] = []

    class Noting(Counting):
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda **given: options.append({x: given[x] for x in given.keys() - set(self.arg_names)})

    for name in launch.kernels.__all__:
        monkeypatch.setattr(launch.kernels, name, Noting(getattr(launch.kernels, name), []))
    inputs = tuple(x[:1] for x in grouped(70, 16, 16))
    gradients(inputs, torch.randn(1, 4, 70, 16), key_mask=MASK[:1, :70])
    run(inputs[0][:, :, -1:], *inputs[1:3], inputs[3][:, :, -1:])
    assert len(options) > 10
    assert all(given["enable_fp_fusion"] is True for given in options)


class Listed:
    """A kernel that is not launched, but named."""

    def __init__(self, kernel: Any, names: list[str]) -> None:
        self.arg_names, self.name, self.names = kernel.arg_names, kernel.__name__, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda **_: self.names.append(self.name)


@interpreted
def test_gradients_that_nobody_asks_for_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch

    launched: list[Any] = []
    for name in ("list_visitors", "backward_key"):
        monkeypatch.setattr(launch.kernels, name, Counting(getattr(launch.kernels, name), launched))
    inputs = Inputs(*(x[:1] for x in grouped(20, 16, 16)), *[None] * 5)
    result = launch.forward(inputs, OPTIONS, training=True)
    found = launch.backward(result.out, inputs, result, OPTIONS, wants_keys=False)
    assert found.key is None
    assert found.value is None
    assert not launched
    expected = launch.backward(result.out, inputs, result, OPTIONS)
    assert torch.equal(found.query, expected.query)
    assert torch.equal(found.log_gate, expected.log_gate)
    assert launched
    launched.clear()
    query = inputs.query.clone().requires_grad_()
    run(query, *inputs[1:4], scale=1.0, tolerance=0.0).sum().backward()
    assert not launched
    assert query.grad is not None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"shape": (1, 2, 8, 320)}, "takes widths up to 256, got 320 and 320"),
        ({"shape": (40_000, 2, 8, 64)}, "takes batches of up to 65535 key heads, got 80000"),
        ({"shape": (1, 2, 2**25, 64)}, "takes up to 16777216 keys, got 33554432"),
        ({"version": (3, 4)}, r"needs Triton 3.7 or newer, got 3.4: pip install --upgrade"),
    ],
    ids=["wide", "many heads", "many keys", "old Triton"],
)
def test_a_fall_to_the_quadratic_reference_is_said_once(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], reason: str
) -> None:
    monkeypatch.setattr(implementations, "_said", set())
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "triton", triton)
    if "version" in change:
        monkeypatch.setattr(triton, "VERSION", change["version"])
    call = on_fake_gpu(**({"shape": change["shape"]} if "shape" in change else {}))
    with pytest.warns(UserWarning, match=f"holds matrices of queries x keys .*{reason}"):
        assert implementations.choose("auto", call, OPTIONS) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        implementations.choose("auto", call, OPTIONS)
        assert implementations.choose("auto", on_fake_gpu(torch.float64), OPTIONS) == "reference"  # as documented
    with pytest.raises(ValueError, match=reason):
        implementations.choose("triton", call, OPTIONS)


def test_a_round_of_decoding_is_at_most_so_many_times_as_far_as_the_last() -> None:
    from tra.ops.threshold_relative.triton import launch

    assert launch.decode_rounds(32, near=32, part=64) == []
    rounds = launch.decode_rounds(4096, near=32, part=64)  # 65,536 keys in blocks of 16
    assert rounds == [(32, 2), (160, 8), (672, 32), (2720, 22)]
    passed = 32
    for before, parts in rounds:
        assert before == passed
        assert parts * 64 <= launch.DECODE_GROWTH * passed
        passed += parts * 64
    assert passed >= 4096


@interpreted
@pytest.mark.parametrize("gate, last", [(-2.0, 192), (-0.5, 144), (-0.01, 0)])
def test_decoding_reads_in_growing_rounds(monkeypatch: pytest.MonkeyPatch, gate: float, last: int) -> None:
    """208 keys: 16 near ones, 48 more, then all the others."""
    from tests.ops.threshold_relative.sanitizer import watched
    from tra.ops.threshold_relative.triton import launch

    use_tile(monkeypatch, rows=16, keys=16)
    monkeypatch.setattr(launch, "NEAR_KEYS", 16)
    monkeypatch.setattr(launch, "PART_KEYS", 16)
    ones = torch.ones(1, 1, 208, 16)
    value = torch.randn(1, 1, 208, 24)
    with watched() as touched:
        run(ones[:, :, :1] / 16, ones, value, torch.full((1, 1, 1), gate), score_bound=4.0)
    assert touched.rows_read(value)[0] == last


@interpreted
def test_offsets_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 key heads with 2**15 queries each are more than 2**30 rows, of two numbers each. Only the first and last
    tile of the first and last head are walked, and memory that nobody touches costs nothing."""
    from triton.runtime import interpreter

    from tra.ops.threshold_relative.triton import launch

    def ends(*limits: int) -> Any:
        every = range(*limits)
        return every if len(every) < 1024 else (every[0], every[-1])

    use_tile(monkeypatch, rows=16, keys=16)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # it would copy all
    monkeypatch.setattr(interpreter, "range", ends, raising=False)
    monkeypatch.setattr(launch, "range", ends, raising=False)
    monkeypatch.setattr(launch, "PACKED_FROM", 2**30)
    options = Options(1.0, 0.0, 0.0, 0.0, 1e-3, 4.0)

    def compute(heads: int, length: int) -> list[Tensor]:
        query, key, value, grad = (torch.empty(1, heads, length, 2, dtype=torch.float16) for _ in range(4))
        gate = torch.empty(1, heads, length)
        numbers = torch.Generator().manual_seed(0)
        for tensor in (query, key, value, grad, gate):
            for head in {0, heads - 1}:
                last = tensor[0, head, -64:]
                last.copy_(torch.rand(last.shape, generator=numbers.manual_seed(0)) + 0.5)
        gate[0, 0, -64:] = gate[0, -1, -64:] = -9.0
        inputs = Inputs(query, key, value, gate, *[None] * 5)
        result = launch.forward(inputs, options, training=True)
        gradients = launch.backward(grad, inputs, result, options)
        found = (result.out, result.row_state, *gradients[:4])
        return [x[0, -1, -16:].clone() for x in found]

    for far, near in zip(compute(40_000, 2**15), compute(1, 64), strict=True):
        assert torch.equal(far, near)


@interpreted
def test_keys_far_apart_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of the prologue has 256 narrow keys, whose strides it multiplies in 32 bits; wider ones are copied."""
    from triton.runtime import interpreter

    from tests.ops.threshold_relative.sanitizer import watched
    from tra.ops.threshold_relative.triton import launch, prepare

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # it would copy all
    query, key, value, gate = integer_inputs(1, 1, 257, 4)
    for stride in (prepare.WIDEST_STRIDE - 1, prepare.WIDEST_STRIDE):
        memory = torch.empty(256 * stride + 4, dtype=torch.float16)  # of which most is never touched
        apart = memory.as_strided((1, 1, 257, 4), (1, 1, stride, 1)).copy_(key)
        inputs = Inputs(query[:, :, -1:].half(), apart, value.half(), gate[:, :, -1:], *[None] * 5)
        with watched():
            out = launch.forward(inputs, Options(1.0, 0.0, 0.0, 0.0, 1e-3, None), training=False).out
        near = inputs._replace(key=apart.contiguous())
        assert torch.equal(out, launch.forward(near, Options(1.0, 0.0, 0.0, 0.0, 1e-3, None), training=False).out)


STRAIGHT_THROUGH: dict[str, dict[str, Any]] = {
    "one threshold": {"threshold": -0.2},
    "one threshold, every key, masks": {"tolerance": 0.0, "key_mask": MASK[:1, :50], "segment_ids": SEGMENTS[:1, :50]},
    "per row": {},
    "per row, masks and dropout": {"dropout": 0.3, "key_mask": MASK[:1, :50], "segment_ids": SEGMENTS[:1, :50]},
}


def learned(
    inputs: tuple[Tensor, ...], grad: Tensor, thresholds: Tensor | None, impl: str, **options: Any
) -> list[Tensor]:
    """Output and the gradients of all inputs, that of a threshold tensor among them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    if thresholds is not None:
        leaves.append(thresholds.detach().clone().requires_grad_())
        options["threshold"] = leaves[4]
    torch.manual_seed(0)
    out = run(*leaves[:4], impl=impl, straight_through=0.7, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def assert_learns_as_the_reference(
    inputs: tuple[Tensor, ...], grad: Tensor, thresholds: Tensor | None, allowed: float = 1e-5, **options: Any
) -> None:
    exact = learned(
        tuple(x.double() for x in inputs),
        grad.double(),
        None if thresholds is None else thresholds.double(),
        "reference",
        **options,
    )
    for ours, right in zip(learned(inputs, grad, thresholds, "triton", **options), exact, strict=True):
        assert_close(ours.double(), right, rtol=allowed, atol=allowed * (1 + right.abs().max().item()))


def row_thresholds(*shape: int) -> Tensor:
    """Between integers, where no score lies; some that no key passes."""
    return torch.randint(-2, 4, shape, generator=torch.Generator().manual_seed(7)).float() * 2 - 0.5


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("case", STRAIGHT_THROUGH)
def test_gradients_pass_the_threshold(case: str) -> None:
    inputs, grad = tuple(x[:1] for x in grouped(50, 16, 24)), torch.randn(1, 4, 50, 24)
    thresholds = row_thresholds(1, 4, 50) if case.startswith("per row") else None
    assert_learns_as_the_reference(inputs, grad, thresholds, scale=1.0, **STRAIGHT_THROUGH[case])


@pytest.mark.usefixtures("small_tiles")
def test_forward_has_the_same_bits_with_gradients_through_the_threshold() -> None:
    query, *others = (x[:1] for x in grouped(50, 16, 16))
    query[:, :, 7] = 0.0  # keeps nothing
    plain = run(query, *others)
    assert torch.equal(run(query.requires_grad_(), *others, straight_through=0.5), plain)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_pass_the_threshold_in_half_precision(dtype: torch.dtype) -> None:
    query, key, value, gate = (x[:1] for x in grouped(50, 16, 24, dtype))
    inputs, grad = (query, key, value + 1, gate / 30), (torch.randn(1, 4, 50, 24) + 1).to(dtype)
    allowed = 2 * torch.finfo(dtype).eps
    assert_learns_as_the_reference(inputs, grad, row_thresholds(1, 4, 50), allowed, scale=1.0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_made_of_the_output_before_it_is_rounded(dtype: torch.dtype) -> None:
    """Kept keys weigh the same, so weights are exact and the output alone is rounded. Its values are 64 times as large
    as their differences, of which gradients are made."""
    key = (torch.randint(2, (1, 1, 40, 1)) - 0.5).expand(1, 1, 40, 16) / 2
    inputs = torch.full((1, 1, 40, 16), 0.25), key, torch.randn(1, 1, 40, 16) + 64, torch.zeros(1, 1, 40)
    halves, grad = (*(x.to(dtype) for x in inputs[:3]), inputs[3]), torch.ones(1, 1, 40, 16, dtype=dtype)
    exact = learned(tuple(x.double() for x in halves), grad.double(), None, "reference", scale=1.0)
    for ours, right in zip(learned(halves, grad, None, "triton", scale=1.0)[1:], exact[1:], strict=True):
        assert (ours.double() - right).norm() < torch.finfo(dtype).eps * right.norm()


def test_gradients_of_packed_rows_pass_the_threshold(packed: list[int]) -> None:
    inputs = uneven(72)
    assert_learns_as_the_reference(inputs, torch.randn(1, 4, 72, 24), row_thresholds(1, 4, 72), scale=1.0)
    assert packed


@pytest.mark.usefixtures("parts")
def test_gradients_of_few_rows_over_many_keys_pass_the_threshold() -> None:
    query, key, value, gate = (x[:1] for x in grouped(150, 16, 24))
    inputs = query[:, :, -2:], key, value, gate[:, :, -2:] / 20
    thresholds = row_thresholds(1, 4, 2)
    thresholds[0, 0] = 40.0  # keeps nothing: its largest score is in any of the parts
    assert_learns_as_the_reference(inputs, torch.randn(1, 4, 2, 24), thresholds, scale=1.0)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("tolerance, read", [(1e-3, 30), (1e-16, 160)])
def test_rows_stop_where_keys_that_are_left_out_no_longer_matter(tolerance: float, read: int) -> None:
    """As on the CPU: exp(g C) <= 2 temperature tolerance / keys. A kept key is done with after 20."""
    query, key, value, gate, threshold = (x[:, :1] for x in strained("left out", 160).inputs)
    inputs = query[:, :, -1:], key, value, gate[:, :, -1:], threshold[:, :, -1:]
    given = Case(inputs, torch.ones(1, 1, 1, 16), {"straight_through": 0.5, "score_bound": 0.05})
    grad_key = gradients_through(given, "triton", tolerance=tolerance)[2].abs().amax(-1)[0, 0]
    assert (grad_key != 0).tolist() == [key >= 160 - read for key in range(160)]


@pytest.mark.usefixtures("small_tiles")
def test_segments_that_share_a_slot_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import prepare

    inputs, grad = tuple(x[:1] for x in grouped(50, 16, 16)), torch.randn(1, 4, 50, 16)
    documents = torch.tensor([7, 2**40, 7, -3, 2**40 + 2**33]).repeat_interleave(10)[None]  # one comes twice
    options: dict[str, Any] = {"segment_ids": documents, "key_mask": MASK[:1, :50], "tolerance": 0.0}
    expected = gradients(inputs, grad, impl="reference", **options)
    found = gradients(inputs, grad, **options)
    for left, right in zip(found, expected, strict=True):
        assert_close(left, right, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(prepare, "slots_for", lambda keys: 1)
    alike = gradients(inputs, grad, **options)
    assert all(torch.equal(left, right) for left, right in zip(alike, found, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_stretches_of_several_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from tra.ops.threshold_relative.triton import launch

    inputs, grad = tuple(x[:1] for x in grouped(50, 16, 16)), torch.randn(1, 4, 50, 16)
    thresholds = row_thresholds(1, 4, 50)
    expected = learned(inputs, grad, thresholds, "triton")
    monkeypatch.setattr(launch, "MOST_STRETCHES", 2)
    assert launch.plan_backward(2, 100, 50, 16, learns=True).stretch == 2
    found = learned(inputs, grad, thresholds, "triton")
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


@pytest.mark.usefixtures("small_tiles")
def test_thresholds_and_bounds_may_have_any_strides_and_dtype() -> None:
    inputs = tuple(x[:1] for x in grouped(40, 16, 16))
    thresholds = row_thresholds(1, 40, 4).transpose(1, 2).double()
    bound = torch.full((1, 1, 1), 16.0, dtype=torch.float16)
    options: dict[str, Any] = {"scale": 1.0, "tolerance": 1e-3}
    ours = run(*inputs, threshold=thresholds, score_bound=bound, **options)
    same = run(*inputs, threshold=thresholds.contiguous().float(), score_bound=16.0, **options)
    assert torch.equal(ours, same)
    exact = run(*(x.double() for x in inputs), threshold=thresholds, impl="reference", **options)
    assert (ours.double() - exact).abs().max() <= 1e-3 * inputs[2].abs().max()


@pytest.mark.usefixtures("small_tiles")
def test_a_value_that_is_not_finite_and_left_out_spoils_no_gradient() -> None:
    query, key, value, gate = (x[:1] for x in grouped(40, 16, 16))
    key[:, :, 5] = 0.0  # scores 0, and is left out
    value[:, :, 5] = math.nan
    grad = torch.randn(1, 4, 40, 16)
    exact = learned(tuple(x.double() for x in (query, key, value, gate)), grad.double(), None, "reference")
    ours = learned((query, key, value, gate), grad, None, "triton")
    for left, right in zip(ours, exact, strict=True):
        assert_close(left.double(), right, rtol=1e-5, atol=1e-5)
    assert not ours[2].isnan().any()


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

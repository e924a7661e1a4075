"""The arithmetic behind docs/gpu.md: closed forms, and the launches as they stand there."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Options

ROOT = Path(__file__).parents[1]
estimate = runpy.run_path(str(ROOT / "benchmarks" / "gpu_estimate.py"))
WALKS: dict[str, Callable[[Tensor], float]] = {
    "block stop": estimate["block_stop"],
    "packed, forward": lambda needed: estimate["packed"](needed)[0],
    "regrouped, backward": lambda needed: estimate["packed"](needed)[1],
}


@pytest.mark.parametrize("walk", WALKS)
def test_rows_that_need_every_key_visit_what_a_dense_walk_does(walk: str) -> None:
    length = 4_096
    needed = torch.arange(1, length + 1)
    dense = (length + estimate["ROWS"]) / 2
    assert WALKS[walk](needed) == pytest.approx(dense, rel=0.02)


@pytest.mark.parametrize("walk", WALKS)
def test_rows_that_need_one_key_visit_the_diagonal_block_alone(walk: str) -> None:
    assert WALKS[walk](torch.ones(1_024, dtype=torch.long)) == estimate["ROWS"]


def test_one_slow_row_holds_its_block_but_not_when_rows_are_packed() -> None:
    length, rows = 65_536, estimate["ROWS"]
    needed = torch.ones(length, dtype=torch.long)
    slow = torch.arange(rows // 2, length, rows)  # one in each block, which needs all that it can see
    needed[slow] = slow + 1
    every = length / 2
    assert WALKS["block stop"](needed) == pytest.approx(every, rel=0.01)
    # 64 of them share a program, each a block further than the one before: a wasted start of at most 64 blocks.
    forward, backward = estimate["packed"](needed)
    assert every / rows < forward < every / rows + 5 * rows
    assert every / rows < backward < every / rows + 5 * rows


def test_needed_keys_have_the_mean_of_their_distribution() -> None:
    """Far from the start, with tolerance 2^-23 and D = 64: E[ceil(c / gate)] / p, over the log-normal gates."""
    c = 8 + 24 * torch.log(torch.tensor(2.0))
    gate = torch.empty(1_000_000, dtype=torch.float64).log_normal_(torch.tensor(0.7).log().item(), 1.1)
    expected = ((c / gate).ceil() / estimate["KEPT"]).mean().item()
    needed = estimate["keys_needed"](1 << 19, 64, torch.Generator().manual_seed(0))
    assert needed[1 << 18 :].double().mean().item() == pytest.approx(expected, rel=0.02)


def test_rounds_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from tra.ops.threshold_relative.triton import launch

    assert (estimate["FIRST"], estimate["GROWTH"], estimate["PACKED_FROM"]) == (
        launch.FIRST_ROUND,
        launch.GROWTH,
        launch.PACKED_FROM,
    )
    options = Options(1.0, 0.0, 0.0, 0.0, 1e-7, None)
    for length in (4_096, 16_384, 131_072):
        assert estimate["rounds"](length) == launch.rounds_of(length, length, options)


def test_rates_are_those_of_the_white_papers() -> None:
    assert estimate["A100"].peak == pytest.approx(312e12, rel=0.01)
    assert estimate["H100"].peak == pytest.approx(989e12, rel=0.01)
    assert [model.parameters / 1e6 for model in estimate["MODELS"]] == pytest.approx([16, 124, 909], rel=0.02)


def test_traffic_follows_the_keys_that_are_visited() -> None:
    """A tile of 64 rows reads 256 bytes of each key and value it visits, and its queries and outputs once."""
    keys = estimate["Visited"](4_096, 0.0, 0.0, 0.0, packed=128.0, regrouped=64.0)
    found = estimate["traffic"](keys, 4_096, estimate["A100"], heads=1)
    assert found.forward == 64 * (128 * 256 + 64 * 256)
    # Of blocks of 16 keys each visiting row is read again, with its count, which was written before.
    assert found.backward == 4_096 * (64 * 256 / 64 + 64 * (256 + 8) / 16 + 3 * 256)


def test_launches_of_a_million_tokens_are_those_of_the_plan() -> None:
    pytest.importorskip("triton")
    from tra.ops.threshold_relative.triton import launch

    found = estimate["launches"](2**20, estimate["A100"])
    plan = launch.plan_backward(16, 2**20 + 7 * 128, 2**20, 16, learns=False)
    assert found.backward == plan.launches + 8
    assert found.backward < 1_500
    assert found.seconds < 0.01
    assert estimate["launches"](1_024, estimate["A100"]).forward == 6  # test_triton.py lists them
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert f"{plan.pieces} pieces of up to {plan.rows:,} rows, {plan.launches:,} launches" in page


def test_launches_in_docs_are_those_of_the_plan() -> None:
    pytest.importorskip("triton")
    page = (ROOT / "docs" / "gpu.md").read_text()
    for length in estimate["LAUNCHED_AT"]:
        found = estimate["launches"](length, estimate["A100"])
        assert f"| {length:,} | {found.forward:,} | {found.backward:,} | {1e3 * found.seconds:.1f} ms |" in page

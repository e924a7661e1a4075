"""The arithmetic behind docs/gpu.md: closed forms, and the tables as they stand there."""

import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
estimate = runpy.run_path(str(ROOT / "benchmarks" / "gpu_estimate.py"))


@pytest.mark.parametrize("walk", ["block_stop", "packed"])
def test_rows_that_need_every_key_visit_what_a_dense_walk_does(walk: str) -> None:
    length = 4_096
    needed = torch.arange(1, length + 1)
    dense = (length + estimate["ROWS"]) / 2
    assert estimate[walk](needed) == pytest.approx(dense, rel=0.01)


@pytest.mark.parametrize("walk", ["block_stop", "packed"])
def test_rows_that_need_one_key_visit_the_diagonal_block_alone(walk: str) -> None:
    assert estimate[walk](torch.ones(1_024, dtype=torch.long)) == estimate["ROWS"]


def test_one_slow_row_holds_its_block_but_not_when_rows_are_packed() -> None:
    length, rows = 65_536, estimate["ROWS"]
    needed = torch.ones(length, dtype=torch.long)
    slow = torch.arange(rows // 2, length, rows)  # one in each block, which needs all that it can see
    needed[slow] = slow + 1
    every = length / 2
    assert estimate["block_stop"](needed) == pytest.approx(every, rel=0.01)
    # 64 of them share a program, each a block further than the one before: a wasted start of at most 64 blocks.
    assert every / rows < estimate["packed"](needed) < every / rows + 4 * rows + rows


def test_needed_keys_have_the_mean_of_their_distribution() -> None:
    """Far from the start, with tolerance 2^-23 and D = 64: E[ceil(c / gate)] / p, over the log-normal gates."""
    c = 8 + 24 * torch.log(torch.tensor(2.0))
    gate = torch.empty(1_000_000, dtype=torch.float64).log_normal_(torch.tensor(0.7).log().item(), 1.1)
    expected = ((c / gate).ceil() / estimate["KEPT"]).mean().item()
    needed = estimate["keys_needed"](1 << 19, 64, torch.Generator().manual_seed(0))
    assert needed[1 << 18 :].double().mean().item() == pytest.approx(expected, rel=0.02)


def test_rates_are_those_of_the_white_papers() -> None:
    assert estimate["A100"].peak == pytest.approx(312e12, rel=0.01)
    assert estimate["H100"].peak == pytest.approx(989e12, rel=0.01)
    assert [model.parameters / 1e6 for model in estimate["MODELS"]] == pytest.approx([16, 124, 909], rel=0.02)

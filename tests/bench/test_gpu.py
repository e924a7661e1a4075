"""`tra bench --device cuda`, its logic: on the CPU, with interpreted kernels and a stand-in for the clock."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.cli.calling import Captured, fails
from tra.bench import compare, gpu, run, timing
from tra.errors import RunError


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SHAPES", ((1, 1, 32),))
    monkeypatch.setattr(gpu, "BATCHES", (1, 2))
    monkeypatch.setattr(gpu, "HEADS", 1)
    monkeypatch.setattr(gpu, "CACHED", (40,))


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_side_computes_the_shape_that_the_row_says() -> None:
    cases = list(gpu.gpu_cases("cpu"))
    assert [(case.what, case.shape) for case in cases] == [
        ("forward, every key", "1x1x32"),
        ("forward, default tolerance", "1x1x32"),
        ("forward + backward, every key", "1x1x32"),
        ("forward + backward, default tolerance", "1x1x32"),
        ("decode one token", "1x1x40"),
        ("decode one token", "2x1x40"),
    ]
    assert list(cases[0].others) == ["SDPA", "FlexAttention", "paper, eager", "paper, compiled"]
    for prepare in (cases[0].ours, *cases[0].others.values()):
        assert prepare()().shape == (1, 1, 32, 64)
    assert cases[4].ours()().shape == cases[4].others["SDPA"]()().shape == (1, 1, 1, 64)
    gradients = cases[2].ours()()
    assert [x.dtype for x in gradients] == [torch.bfloat16] * 3 + [torch.float32]


@pytest.mark.usefixtures("small")
def test_rows_hold_ratios_of_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(timing.time, "perf_counter", clock)
    rows = compare.measured_rows([case for case in gpu.gpu_cases("cpu") if "decode" in case.what], 1.0)
    assert [(row.against, row.shape, row.ratio) for row in rows] == [
        ("SDPA", "1x1x40", 1.0),
        ("SDPA", "2x1x40", 1.0),
    ]


def test_kernels_that_are_wrong_get_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare.check_kernel("triton", "cpu")
    right = compare.threshold_relative_attention

    def wrong(*inputs: torch.Tensor, impl: str) -> torch.Tensor:
        return right(*inputs, impl=impl) * (1.01 if impl == "triton" else 1.0)

    monkeypatch.setattr(compare, "threshold_relative_attention", wrong)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run, "check_kernel", lambda impl, device: compare.check_kernel(impl, "cpu"))
    with pytest.raises(RunError, match="no figures"):
        run.run_benchmarks(run.BenchRequest(folder=tmp_path / "new", device="cuda"))
    assert not (tmp_path / "new").exists()


def test_a_device_that_is_not_there_is_one_line(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert fails(["bench", "--device", "tpu"], capsys) == "device must be cpu or cuda, got 'tpu'"
    assert fails(["bench", "--device", "cuda"], capsys) == "device must be cpu where PyTorch finds no GPU, got 'cuda'"

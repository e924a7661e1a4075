"""The measurements from beginning to end."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tra.bench import BenchRequest, compare, run, run_benchmarks
from tra.bench.cases import Case
from tra.bench.workloads import attention, native, papers_listing
from tra.errors import RunError
from tra.ops.threshold_relative import cpu
from tra.progress import shown


def small_cases() -> list[Case]:
    def ours() -> object:
        return attention(native(), 1, 2, 63, 63)

    others = {"SDPA": lambda: attention(papers_listing, 1, 2, 63, 63), "paper, eager": ours}
    return [
        Case("forward, every key", "1x2x63", ours, others, goal=0.5),
        Case("decode one token", "1x2x63", ours, {"SDPA": ours}),
    ]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases that take no time; all others are listed in the test of cases."""
    monkeypatch.setattr(run, "cases", small_cases)


@pytest.mark.usefixtures("few")
def test_every_row_has_its_ratio_and_the_first_comparison_its_goal(tmp_path: Path) -> None:
    content = run_benchmarks(BenchRequest(folder=tmp_path / "new" / "folder", seconds=0.01, only="e"))
    rows = content["rows"]
    assert [(row["what"], row["against"], row["goal"]) for row in rows] == [
        ("forward, every key", "SDPA", 0.5),
        ("forward, every key", "paper, eager", None),
        ("decode one token", "SDPA", None),
    ]
    assert all(row["ratio"] == row["milliseconds"] / row["against_milliseconds"] for row in rows)
    assert json.loads((tmp_path / "new" / "folder" / "bench.json").read_text()) == content
    assert (tmp_path / "new" / "folder" / "bench.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("few")
def test_only_leaves_out_other_rows_and_what_belongs_to_all_of_them(tmp_path: Path) -> None:
    content = run_benchmarks(
        BenchRequest(folder=tmp_path, seconds=0.01, only="decode one", command="tra bench --only x")
    )
    assert [row["what"] for row in content["rows"]] == ["decode one token"]
    assert content["command"] == "tra bench --only x"
    assert content["environment"]["cores"] >= 1
    assert "share_of_sgemm" not in content
    assert "peak_memory_megabytes" not in content


@pytest.mark.usefixtures("few")
@pytest.mark.skipif(not cpu.LIBRARIES, reason="the CPU kernel is not built")
def test_a_variant_of_the_kernel_is_measured_by_name_and_only_meanwhile(tmp_path: Path) -> None:
    before = cpu.variant
    request = BenchRequest(folder=tmp_path, seconds=0.01, only="decode", variant=next(iter(cpu.LIBRARIES)))
    assert run_benchmarks(request)["variant"] == request.variant
    assert cpu.variant == before
    with pytest.raises(ValueError, match="variant"):
        run_benchmarks(replace(request, variant="avx1024"))


@pytest.mark.usefixtures("few")
def test_without_only_the_machines_share_and_peak_memory_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "share_of_sgemm", lambda seconds: 0.63)
    monkeypatch.setattr(run, "peak_of_attention", lambda every_key: 411 if every_key else 263)
    content = run_benchmarks(BenchRequest(folder=tmp_path, seconds=0.01))
    assert content["share_of_sgemm"] == 0.63
    assert content["peak_memory_megabytes"] == {"default tolerance": 263, "every key": 411}


@pytest.mark.usefixtures("few")
def test_a_figure_that_fails_loses_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no font")

    monkeypatch.setattr(run, "save_figure", fail)
    with pytest.raises(OSError, match="no font"):
        run_benchmarks(BenchRequest(folder=tmp_path, seconds=0.01, only="decode"))
    assert json.loads((tmp_path / "bench.json").read_text())["rows"]


@pytest.mark.usefixtures("few")
def test_rows_are_said_only_to_whoever_looks_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = BenchRequest(folder=tmp_path, seconds=0.01, only="decode")
    run_benchmarks(request)
    assert capsys.readouterr().out == ""
    with shown(Console(soft_wrap=True)):
        run_benchmarks(request)
    assert capsys.readouterr().out.startswith("decode one token")


def test_a_kernel_that_is_wrong_gets_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare.threshold_relative_attention

    def wrong(*tensors: torch.Tensor, impl: str) -> torch.Tensor:
        out = right(*tensors, impl=impl)
        return out if impl == "reference" else out * 1.01

    monkeypatch.setattr(compare, "threshold_relative_attention", wrong)
    with pytest.raises(RunError, match="no figures: the kernel's results differ from the reference's"):
        run_benchmarks(BenchRequest(folder=tmp_path / "none", seconds=0.01, only="decode"))
    assert not (tmp_path / "none").exists()


def test_a_kernel_whose_gradients_are_wrong_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    right = compare.threshold_relative_attention

    def wrong(*tensors: torch.Tensor, impl: str) -> torch.Tensor:
        out = right(*tensors, impl=impl)
        return out if impl == "reference" else out.detach() + (out - out.detach()) * 1.01

    monkeypatch.setattr(compare, "threshold_relative_attention", wrong)
    with pytest.raises(RunError, match="no figures"):
        compare.check_kernel()


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"seconds": -1.0}, r"seconds must be positive, got -1\.0"),
        ({"device": "tpu"}, "device must be cpu or cuda, got 'tpu'"),
        ({"device": "cuda", "run": Path("x")}, "run must be left out with device cuda: it is measured on the CPU"),
        ({"cost": True, "variant": "avx2"}, "variant must be left out with --cost, which measures training"),
        ({"scale": "paper"}, "attention and scale must be given with --cost alone"),
        ({"lengths": (64,)}, r"lengths must be given with a run, got \(64,\) and none"),
    ],
)
def test_what_cannot_be_asked_for_is_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchRequest(**asked)

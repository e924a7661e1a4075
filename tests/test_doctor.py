"""`tra doctor`: what it says of a sound machine, of a kernel that computes wrongly, and of what is missing."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from tra import doctor
from tra.cli import main
from tra.ops.threshold_relative import cpu, triton
from tra.ops.threshold_relative.call import Result
from tra.ops.threshold_relative.triton import trust

needs_kernel = pytest.mark.skipif(cpu.unusable is not None, reason="needs the native kernel")


def found(findings: list[doctor.Finding], beginning: str) -> list[doctor.Finding]:
    return [finding for finding in findings if finding.check.startswith(beginning)]


@needs_kernel
def test_a_sound_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    findings = [doctor.Finding(**finding) for finding in said["findings"]]
    assert 0 < said["seconds"] < 60
    kernels = found(findings, "CPU kernel")
    assert len(kernels) >= 3 * len(cpu.LIBRARIES)
    assert sum("(in use)" in finding.check for finding in kernels) >= 3
    assert {finding.result for finding in kernels} <= {"ok", "refused"}
    assert found(findings, "torch")[0].result == torch.__version__
    assert found(findings, "threads")[0].result == str(torch.get_num_threads())


@needs_kernel
def test_a_wrong_kernel_is_named_and_the_exit_code_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = cpu.forward

    def wrong(*arguments: Any) -> Result:
        result = forward(*arguments)
        return result._replace(out=result.out * 1.5 if cpu.variant == "generic" else result.out)

    monkeypatch.setattr(cpu, "forward", wrong)
    monkeypatch.setattr(doctor, "gpu_kernels", lambda: [])
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("|--")
    failed = [line for line in lines if "| failed " in line]
    assert failed
    assert all("CPU kernel, generic" in line and "forward: out is off by 5" in line for line in failed)


def test_what_is_missing_comes_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "transformers" else name)
    findings = list(doctor.extras())
    if findings[0].check == "extras":
        pytest.skip("the package is not installed")
    hub = found(findings, "extra hub")[0]
    assert hub.result == "missing"
    assert hub.detail == "transformers: pip install '.[hub]' in a clone of threshold-relative-attention"
    assert found(findings, "extra train")[0].result == "ok"


def test_gpus_are_examined_and_verdicts_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    examined, kept = [], []

    def examine(device: torch.device, dtype: torch.dtype, kind: str) -> trust.Verdict:
        examined.append((device.index, dtype, kind))
        wrong = device.index == 1 and kind == "decode"
        return trust.Verdict(kind, str(dtype), 1e-3, 1e-3, "out is off by 9.0e-01" if wrong else None)

    def store(device: torch.device, verdict: trust.Verdict) -> trust.Verdict:
        kept.append(verdict)
        return verdict

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU of {device}")
    monkeypatch.setattr(trust, "examine", examine)
    monkeypatch.setattr(trust, "store", store)
    monkeypatch.setattr(triton, "VERSION", triton.OLDEST)
    monkeypatch.setattr(triton, "INSTALLED", True)
    findings = list(doctor.gpu_kernels())
    assert len(examined) == len(kept) == 2 * 3 * len(trust.ALL_KINDS)
    assert {finding.result for finding in found(findings, "GPU 0 kernels")} == {"ok"}
    assert {finding.detail for finding in found(findings, "GPU 1 kernels")} == {"decode: out is off by 9.0e-01"}
    monkeypatch.setattr(triton, "INSTALLED", False)
    assert "pip install '.[gpu]' in a clone of threshold-relative-attention" in list(doctor.gpu_kernels())[1].detail


def test_it_runs_without_the_extras() -> None:
    hidden = "import sys; sys.modules.update(rich=None, transformers=None, triton=None); "
    program = hidden + "import tra.doctor; print(list(tra.doctor.versions())[0].check)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "tra\n"

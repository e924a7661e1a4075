"""What this machine computes and what it lacks: `tra doctor`, or `python -m tra.doctor` where extras are missing."""

import importlib.metadata
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.environment import environment, version_of
from tra.errors import DISTRIBUTION, how_to_install
from tra.ops.threshold_relative import cpu, triton
from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.triton import trust

EXTRAS = ("train", "hub", "gpu")
PACKAGES = ("triton", "numpy", "accelerate", "safetensors", "tokenizers", "transformers")


class Finding(NamedTuple):
    check: str
    result: str
    """ok, missing, failed, or what was found."""
    detail: str = ""


def examine() -> list[Finding]:
    """Every finding, in the order in which a reader wants them."""
    return [*versions(), *threads(), *cpu_kernels(), *gpu_kernels(), *extras()]


def versions() -> Iterator[Finding]:
    found = environment()
    yield Finding("tra", found["tra"], f"Python {found['python']}, {found['system']}")
    gpu = torch.version.cuda or torch.version.hip
    yield Finding("torch", found["torch"], f"built for {gpu}" if gpu else "built without GPU support")
    for name in PACKAGES:
        if (number := version_of(name)) is not None:
            yield Finding(name, number)
    yield Finding("processor", found["processor"], f"{found['cores']} cores")


def threads() -> Iterator[Finding]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    used, named = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    detail = f"of {allowed} cores" + (f", OMP_NUM_THREADS={named}" if named else "")
    yield Finding("threads", str(used), detail + (": more threads than cores are slow" if used > allowed else ""))


def cpu_kernels() -> Iterator[Finding]:
    """Each variant of the native kernel that runs here, against the reference."""
    if cpu.unusable is not None:
        yield Finding("CPU kernel", "missing", f"it {cpu.unusable}")
    for variant in cpu.LIBRARIES:
        name = f"CPU kernel, {variant}" + (" (in use)" if variant == cpu.variant else "")
        for dtype in cpu.TYPES:
            with cpu.using(variant):
                yield from _judged(name, dtype, cpu, "cpu")


def gpu_kernels() -> Iterator[Finding]:
    """Each kind of kernel on each GPU, against the reference. What is found is kept for later processes."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        yield Finding(
            "GPU", "none", "" if built else "torch is built without GPU support: https://pytorch.org says how"
        )
        return
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        yield Finding(f"GPU {number}", torch.cuda.get_device_name(device), trust.driver())
        if triton.missing() is not None:
            yield Finding("GPU kernels", "missing", f"impl 'triton' {triton.missing()}")
            continue
        for dtype in triton.TYPES:
            verdicts = [trust.store(device, trust.examine(device, dtype, kind)) for kind in trust.ALL_KINDS]
            yield _told(f"GPU {number} kernels", dtype, verdicts)


def extras() -> Iterator[Finding]:
    """Packages that an extra of this one would bring, and the line that installs them."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("extras", "unknown", f"{DISTRIBUTION} is not installed, its sources are used")
        return
    for extra in EXTRAS:
        brings = re.compile(rf"([\w-]+).*extra == [\"']{extra}[\"']")
        names = [match[1] for line in requirements if (match := brings.match(line))]
        absent = [name for name in names if find_spec(name.replace("-", "_")) is None]
        line = how_to_install(extra)
        yield Finding(f"extra {extra}", "missing" if absent else "ok", f"{', '.join(absent)}: {line}" if absent else "")


def _judged(name: str, dtype: torch.dtype, implementation: Any, impl: str) -> Iterator[Finding]:
    """One line for the kinds that the implementation computes, and one for each that it refuses."""
    verdicts = []
    for kind in trust.KINDS:
        inputs, options, _ = trust.problem(kind, dtype)
        reason = implementation.refusal(inputs, options)
        if reason is None:
            verdicts.append(trust.compare_with_reference(kind, dtype, lambda *given: _computed(implementation, *given)))
        else:
            yield Finding(f"{name}, {kind}", "refused", f"impl {impl!r} {reason}")
    yield _told(name, dtype, verdicts)


def _computed(implementation: Any, inputs: Inputs, options: Options, grad: Tensor, trains: bool) -> dict[str, Tensor]:
    result = implementation.forward(inputs, options, trains)
    found = {"out": result.out}
    if trains:
        gradients = implementation.backward(grad, inputs, result, options)
        found |= {f"grad_{name}": x for name, x in gradients._asdict().items() if x is not None}
    return found


def _told(name: str, dtype: torch.dtype, verdicts: list[trust.Verdict]) -> Finding:
    label = f"{name}, {str(dtype).removeprefix('torch.')}"
    for verdict in verdicts:
        if verdict.failure is not None:
            return Finding(label, "failed", f"{verdict.kind}: {verdict.failure}")
    errors = ", ".join(f"{verdict.kind} {verdict.error:.0e}" for verdict in verdicts)
    return Finding(label, "ok", f"error: {errors}")


def table(findings: list[Finding]) -> str:
    """Markdown, which is readable as it is."""
    rows = [("check", "result", "detail"), *findings]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def run(as_json: bool) -> int:
    """Print the findings; 1 if a kernel computes something wrong."""
    began = time.perf_counter()
    findings = examine()
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"findings": [finding._asdict() for finding in findings], "seconds": seconds}, indent=2))
    else:
        print(table(findings))
        print(f"\n{len(findings)} findings in {seconds:.0f} s. Paste the table into a bug report.")
    return 1 if any(finding.result == "failed" for finding in findings) else 0


if __name__ == "__main__":
    sys.exit(run("--json" in sys.argv[1:]))

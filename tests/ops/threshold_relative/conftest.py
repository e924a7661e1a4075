from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops.threshold_relative.on_device import OnDevice
from tra.ops.threshold_relative import triton
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS

if torch.cuda.is_available():
    # The tests hand over CPU tensors; what is computed from them is then computed on the GPU.
    IMPLEMENTATIONS["triton"] = OnDevice(triton, torch.device("cuda"))


def _patch_once_per_launch() -> None:
    """Triton's interpreter replaces its language at every call of a function within a kernel: half of its time."""
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def once(function: Any) -> Any:
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        return patch(function)

    def fresh(executor: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()
        return launch(executor, *arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, fresh


def _leave_out_what_no_gpu_does() -> None:
    """A third of the interpreter's time: checks that GPUs do not make, and a table that is made anew at every use."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    find, known = interpreter._get_np_dtype, {}

    def found_once(given: Any) -> Any:
        name = given.scalar.name
        if name not in known:
            known[name] = find(given)
        return known[name]

    interpreter._get_np_dtype = found_once


def _round_as_gpus_do() -> None:
    """Triton's interpreter cuts bfloat16 off, where every GPU rounds to nearest even."""
    from triton.runtime import interpreter

    convert, single, brain = interpreter._convert_float, "fp32", "bf16"

    def rounded(given: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source.name, target.name) == (brain, single):
            return given.astype(np.uint32) << 16
        if (source.name, target.name) != (single, brain):
            return convert(given, source, target, mode)
        bits = np.ascontiguousarray(given).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(given), 0x7FFF, nearest).astype(np.uint16)

    interpreter._convert_float = rounded


def _multiply_each_row_alike() -> None:
    """As GPUs do. With OpenBLAS a row's bits depend on its place in the matrix on some processors (Zen, Haswell)."""
    from triton.runtime import interpreter

    def dot(builder: Any, a: Any, b: Any, total: Any, *_: Any) -> Any:
        rows, columns = a.data[:, None], np.ascontiguousarray(b.data)
        with np.errstate(all="ignore"):  # NaN and infinity are promised to pass
            found = np.matmul(rows, columns, dtype=total.data.dtype)[:, 0] + total.data
        return interpreter.TensorHandle(found, total.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = dot


if triton.INSTALLED and triton.INTERPRETED:
    _patch_once_per_launch()
    _leave_out_what_no_gpu_does()
    _round_as_gpus_do()
    _multiply_each_row_alike()


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory holds NaN or nonsense where kernels are tested, so that an output that is never written shows."""
    poisoned = ("test_cpu.py", "test_straight_through.py", "test_triton.py", "test_triton_pieces.py", "test_trust.py")
    if request.path.name not in poisoned:
        yield
        return
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if triton.INSTALLED:
        return
    skip = pytest.mark.skip(reason="needs Triton: pip install --no-deps triton")
    for item in items:
        parameters = getattr(item, "callspec", None)
        if item.path.name in ("test_triton.py", "test_triton_pieces.py", "test_trust.py") or (
            parameters and "triton" in parameters.params.values()
        ):
            item.add_marker(skip)

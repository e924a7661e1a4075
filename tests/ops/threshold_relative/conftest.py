from collections.abc import Iterator
from typing import Any

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


if triton.INSTALLED and triton.INTERPRETED:
    _patch_once_per_launch()


@pytest.fixture(autouse=True)
def _poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fresh memory holds NaN or nonsense where kernels are tested, so that an output that is never written shows."""
    if request.path.name not in ("test_cpu.py", "test_straight_through.py", "test_triton.py", "test_trust.py"):
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
        if item.path.name in ("test_triton.py", "test_trust.py") or (
            parameters and "triton" in parameters.params.values()
        ):
            item.add_marker(skip)

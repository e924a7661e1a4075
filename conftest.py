import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

# A compiled graph cached by an earlier state of the code would be tested instead of this one.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import pytest
import torch

if not torch.cuda.is_available():
    # Without a GPU Triton's kernels run in Python, on CPU tensors. Read when the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"

if find_spec("triton") is None:
    # Collecting doctests imports every module.
    kernels = "tra/ops/threshold_relative/triton"
    collect_ignore = [f"{kernels}/{name}" for name in ("kernels", "launch.py", "pieces.py", "prepare.py", "tuning.py")]
    collect_ignore += [f"tests/ops/threshold_relative/{name}.py" for name in ("sanitizer", "ahead_of_time")]


def pytest_configure(config: pytest.Config) -> None:
    # Two test processes share two cores.
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _path_restored() -> Iterator[None]:
    """A plug-in's folder joins the path, where its modules would be found by every later test."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace: dict[str, object]) -> None:
    doctest_namespace["torch"] = torch

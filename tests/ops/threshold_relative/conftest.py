import pytest
import torch

from tests.ops.threshold_relative.on_device import OnDevice
from tra.ops.threshold_relative import triton
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS

if torch.cuda.is_available():
    # The tests hand over CPU tensors; what is computed from them is then computed on the GPU.
    IMPLEMENTATIONS["triton"] = OnDevice(triton, torch.device("cuda"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if triton.installed():
        return
    skip = pytest.mark.skip(reason="needs Triton: pip install --no-deps triton")
    for item in items:
        parameters = getattr(item, "callspec", None)
        if item.path.name == "test_triton.py" or (parameters and "triton" in parameters.params.values()):
            item.add_marker(skip)

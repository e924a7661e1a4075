"""Memory that a run uses again."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource
import torch
from tra.runs.memory import reuse_memory

torch.set_num_threads(1)
if {reuses}:
    reuse_memory()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):  # the first touch is always a fault
    torch.zeros({numbers})
before = faults()
for _ in range(10):
    torch.zeros({numbers})
print(faults() - before)
"""


def page_faults(megabytes: int, reuses: bool) -> int:
    """Of making a block ten times, each time when the one before it is freed."""
    code = FAULTS.format(reuses=reuses, numbers=megabytes * (1 << 18))
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc's allocator")
def test_blocks_of_a_step_are_used_again_and_the_largest_go_back() -> None:
    assert page_faults(megabytes=40, reuses=False) > 150  # were every page of 2 MiB
    assert page_faults(megabytes=40, reuses=True) < 50
    assert page_faults(megabytes=80, reuses=True) > 150

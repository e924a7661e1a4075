"""The native CPU kernel: one source, built once per instruction set, each build optional.

Without a compiler the package installs all the same and computes with the reference implementation. The library has a
plain C interface, so neither torch nor Python's headers are needed to build it, and it is loaded with ctypes.
"""

import platform
from glob import glob

from setuptools import Extension, setup

FOLDER = "tra/ops/threshold_relative"
COMMON = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
VARIANTS = {"generic": []}
if platform.machine().lower() in ("x86_64", "amd64"):
    VARIANTS |= {
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": [
            *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
            "-mprefer-vector-width=512",
        ],
    }

setup(
    ext_modules=[
        Extension(
            f"tra.ops.threshold_relative._cpu_{variant}",
            sources=[f"{FOLDER}/cpu.cpp"],
            depends=sorted(glob(f"{FOLDER}/*.h")),
            define_macros=[("TRA_VARIANT", variant), *([("TRA_DISPATCH", "1")] if variant == "generic" else [])],
            extra_compile_args=[*COMMON, *flags],
            optional=True,
        )
        for variant, flags in VARIANTS.items()
    ]
)

"""The native CPU kernel: one source, built once per instruction set, each build optional.

The kernel is an operator on PyTorch's stable ABI. It is built against the headers of the torch that is installed where
the package goes, and then runs with every torch from 2.10 on. The headers are found without importing torch. Without
torch or without a compiler the package installs all the same, says so, and computes with the reference implementation.
The libraries know nothing of Python: neither their names nor the wheel's tag holds its version.
"""

import os
import platform
import re
import sys
import sysconfig
from copy import copy
from glob import glob
from importlib.machinery import PathFinder
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "tra/ops/threshold_relative"
OLDEST = (2, 10)
COMMON = [
    "-std=c++20",
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fvisibility=hidden",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
    "-Wno-unknown-warning-option",  # clang does not know the one before
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
NEEDED = {"avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"}, "avx2": {"avx2", "fma", "f16c"}}
"""What a processor must say that it has, the richest variant first."""


def chosen_variants():
    """All of them; with TRA_VARIANTS=native only the richest that this machine runs, which is built in a third of the
    time and serves nobody else."""
    if os.environ.get("TRA_VARIANTS") != "native":
        return VARIANTS
    try:
        has = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
    except (OSError, IndexError):
        return VARIANTS
    best = next((name for name, needed in NEEDED.items() if name in VARIANTS and needed <= has), "generic")
    return {best: VARIANTS[best]}


def find_torch():
    """The folder of torch, or why the kernel cannot be built with it.

    pip builds in an environment of its own, but the paths of `sysconfig` are still those of the one it installs into.
    """
    paths = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    spec = PathFinder.find_spec("torch", paths)
    if spec is None or spec.origin is None:
        return None, "torch is not found: install it first, and let uv or build use --no-build-isolation"
    torch = Path(spec.origin).parent
    header = torch / "include" / "torch" / "headeronly" / "version.h"
    numbers = re.findall(r"#define TORCH_VERSION_M\w+ (\d+)", header.read_text()) if header.exists() else []
    if tuple(map(int, numbers[:2])) < OLDEST:
        return None, f"the kernel needs torch {'.'.join(map(str, OLDEST))} or newer, found an older one in {torch}"
    return torch, None


class OperatorLibraries(build_ext):
    """Shared libraries that know torch but not Python, under the names that cpu.py looks for."""

    def build_extensions(self):
        torch, missing = find_torch()
        if self.compiler.compiler_type == "msvc":
            missing = "it is written for gcc and clang"
        if missing:
            print(f"\nthreshold-relative-attention: the native CPU kernel is left out: {missing}\n", file=sys.stderr)
            self.extensions = []
        for extension in self.extensions:
            extension.include_dirs.append(str(torch / "include"))
            extension.library_dirs.append(str(torch / "lib"))
        self.parallel = self.parallel or os.cpu_count()  # a minute of one core for each variant
        super().build_extensions()

    def build_extension(self, ext):
        # At the same time as the others, which have the same sources: their objects must not overwrite these.
        own = copy(self)
        own.build_temp = f"{self.build_temp}/{ext.name}"
        build_ext.build_extension(own, ext)

    def get_ext_filename(self, fullname):
        return f"{fullname.replace('.', '/')}.so"

    def get_libraries(self, ext):
        return ext.libraries

    def get_export_symbols(self, ext):
        return ext.export_symbols


class AnyPython3(bdist_wheel):
    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": OperatorLibraries, "bdist_wheel": AnyPython3},
    ext_modules=[
        Extension(
            f"tra.ops.threshold_relative._kernel_{variant}",
            sources=[f"{FOLDER}/cpu.cpp", f"{FOLDER}/op.cpp"],
            depends=sorted(glob(f"{FOLDER}/*.h")),
            define_macros=[("TRA_VARIANT", variant), ("TORCH_TARGET_VERSION", "0x020a000000000000")],
            libraries=["torch_cpu"],
            extra_compile_args=[*COMMON, *flags],
            optional=True,
        )
        for variant, flags in chosen_variants().items()
    ],
)

"""The native CPU kernel: one source, built once per instruction set, each build optional.

Without a compiler the package installs all the same and computes with the reference implementation. The library has a
plain C interface, so neither torch nor Python's headers are needed to build it, and it is loaded with ctypes: neither
its name nor the wheel's tag holds a version of Python, and one wheel per platform serves them all.
"""

import platform
from glob import glob

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FOLDER = "tra/ops/threshold_relative"
COMMON = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
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


class PlainLibraries(build_ext):
    """Shared libraries that know nothing of Python, under the names that cpu.py looks for."""

    def build_extensions(self):
        if self.compiler.compiler_type == "msvc":
            print("the native kernel is written for gcc and clang: with Microsoft's compiler it is left out")
            self.extensions = []
        super().build_extensions()

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
    cmdclass={"build_ext": PlainLibraries, "bdist_wheel": AnyPython3},
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
    ],
)

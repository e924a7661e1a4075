"""The operator as a package for the `kernels` library of Hugging Face: `make kernel-package`.

    python tools/kernel_package.py FOLDER

Writes FOLDER/build/torch-cpu, torch-cuda and torch-rocm: the operator with its Triton kernels and its reference, with
relative imports only, operators in a namespace of their own, and metadata.json. Nothing in it is compiled ahead of
time, so the CPU variant computes with the reference.
"""

import argparse
import hashlib
import json
import re
import shutil
from pathlib import Path

SOURCES = Path(__file__).parent.parent / "tra"
PARTS = ("ops", "lookup.py", "errors.py", "version.py")
BACKENDS = ("cpu", "cuda", "rocm")
NAME = "threshold-relative-attention"
ENTRY = '''"""Threshold relative attention: see `threshold_relative_attention`."""

from .ops import threshold_relative_attention, threshold_relative_attention_varlen

__all__ = ["threshold_relative_attention", "threshold_relative_attention_varlen"]
'''


def package(folder: Path) -> None:
    """Write the variants into a folder, which must not hold a build yet."""
    if (folder / "build").exists():
        raise ValueError(f"folder must not hold a build yet, got {folder}")
    files = {"__init__.py": ENTRY}
    for part in PARTS:
        found = [SOURCES / part] if part.endswith(".py") else sorted((SOURCES / part).rglob("*.py"))
        files |= {str(file.relative_to(SOURCES)): file.read_text() for file in found}
    digest = hashlib.sha256("".join(files.values()).encode()).hexdigest()[:8]
    for backend in BACKENDS:
        identity = f"_{NAME.replace('-', '_')}_{backend}_{digest}"
        variant = folder / "build" / f"torch-{backend}"
        for name, text in files.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_text(rewritten(text, name, identity))
        metadata = {
            "name": NAME,
            "id": identity,
            "version": 1,
            "license": "MIT",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(SOURCES.parent / "LICENSE", folder / "LICENSE")


def rewritten(text: str, name: str, namespace: str) -> str:
    """With imports relative to the package's root, and operators in this namespace, so that versions do not collide."""
    dots = "." * (name.count("/") + 1)
    text = re.sub(r"^(\s*)from tra\.", rf"\1from {dots}", text, flags=re.MULTILINE)
    if name.endswith("registration.py"):
        text = text.replace('Library("tra"', f'Library("{namespace}"').replace('"tra::', f'"{namespace}::')
        text = text.replace("torch.ops.tra", f"torch.ops.{namespace}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    package(parser.parse_args().folder)


if __name__ == "__main__":
    main()

"""`import tra` needs torch alone."""

import subprocess
import sys


def test_import_loads_no_optional_dependency() -> None:
    optional = ["accelerate", "tyro", "rich", "matplotlib", "safetensors", "datasets", "transformers", "filelock"]
    program = (
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import tra\n"
        f"print(sorted((set(sys.modules) - before) & set({optional!r})))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_import_adds_no_visible_time() -> None:
    program = (
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import tra\n"
        "print(len([name for name in set(sys.modules) - before if not name.startswith('tra')]))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(loaded.stdout) < 50  # modules beyond torch's own

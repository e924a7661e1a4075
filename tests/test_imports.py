"""`import tra` needs torch alone."""

import ast
import subprocess
import sys
from pathlib import Path


def test_import_loads_no_optional_dependency() -> None:
    train = ["accelerate", "tyro", "rich", "matplotlib", "safetensors", "filelock"]
    optional = [*train, "datasets", "transformers", "tokenizers", "pyarrow"]
    program = (
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import tra\n"
        f"print(sorted((set(sys.modules) - before) & set({optional!r})))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_modules_import_only_from_those_before_them() -> None:
    """ops, attention, model and tasks, recipes, then what works on runs, then the commands."""
    order = [
        {"version", "lookup", "errors", "files", "memory", "progress"},
        {"ops"},
        {"attention"},
        {"model", "tasks"},
        {"text"},
        {"recipes"},
        {"checkpoint", "hub", "report"},
        {"evaluation", "figures", "runs"},
        {"training"},
        {"bench", "demo", "export", "grid", "inspection"},
        {"cost", "generation", "reproduce"},
        {"cli"},
    ]
    rank = {name: index for index, names in enumerate(order) for name in names}
    package = Path(__file__).parent.parent / "tra"
    for file in package.rglob("*.py"):
        name = file.relative_to(package).parts[0].removesuffix(".py")
        if name.startswith("__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "tra":
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tra."):
                imported = [node.module.split(".")[1]]
            else:
                continue
            for other in imported:
                assert other == name or rank[other] < rank[name], f"{file.relative_to(package)} imports tra.{other}"

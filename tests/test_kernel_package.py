"""The package for the `kernels` library: loadable from any path, beside this one, and of the same results."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.kernel_package import BACKENDS, package
from tra import threshold_relative_attention


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    package(folder)
    return folder / "build"


def loaded(variant: Path) -> Any:
    """As the library loads one: under a name of its own, from a path that Python does not know."""
    name = f"kernel_{variant.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_variants_have_metadata_and_import_nothing_but_themselves_and_torch(built: Path) -> None:
    assert sorted(variant.name for variant in built.iterdir()) == [f"torch-{backend}" for backend in BACKENDS]
    identities = set()
    for variant in built.iterdir():
        metadata = json.loads((variant / "metadata.json").read_text())
        assert metadata["backend"]["type"] == variant.name.removeprefix("torch-")
        assert metadata["python-depends"] == []
        identities.add(metadata["id"])
        for file in variant.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    names.append(node.module or "")
                allowed = {*sys.stdlib_module_names, "torch", "triton"}
                assert {name.split(".")[0] for name in names} <= allowed, file
    assert len(identities) == len(BACKENDS)


def test_two_variants_are_loaded_beside_this_package_and_compute_the_same(built: Path) -> None:
    query, key, value = torch.randn(3, 2, 4, 33, 8, requires_grad=True).unbind(0)
    log_gate = torch.nn.functional.logsigmoid(torch.randn(2, 4, 33))
    expected = threshold_relative_attention(query, key, value, log_gate, impl="reference")
    (gradient,) = torch.autograd.grad(expected.sum(), query, retain_graph=True)
    for backend in ("cuda", "rocm"):  # "cpu" is the one that the library loads
        kernel = loaded(built / f"torch-{backend}")
        assert kernel.threshold_relative_attention is not threshold_relative_attention
        found = kernel.threshold_relative_attention(query, key, value, log_gate, impl="reference")
        assert torch.equal(found, expected)
        assert torch.equal(torch.autograd.grad(found.sum(), query, retain_graph=True)[0], gradient)
    lengths = torch.tensor([0, 20, 33])
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    assert kernel.threshold_relative_attention_varlen(*packed, log_gate[0].T, lengths, lengths, impl="reference").shape


def test_the_library_loads_it_from_a_folder(built: Path) -> None:
    kernels = pytest.importorskip("kernels")
    kernel = kernels.get_local_kernel(built.parent, backend="cpu")
    assert kernel.__name__ == json.loads((built / "torch-cpu" / "metadata.json").read_text())["id"]
    query, key, value = torch.randn(3, 2, 4, 33, 8).unbind(0)
    given = query, key, value, torch.nn.functional.logsigmoid(torch.randn(2, 4, 33))
    expected = threshold_relative_attention(*given, impl="reference")
    assert torch.equal(kernel.threshold_relative_attention(*given, impl="reference"), expected)


def test_a_build_that_is_there_is_left_alone(built: Path) -> None:
    with pytest.raises(ValueError, match="folder must not hold a build yet"):
        package(built.parent)

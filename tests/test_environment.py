"""Where something was measured: what is said is what the machine says."""

import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import tra
from tra.environment import PACKAGES, best_device, environment, environment_of_run, version_of


def test_the_environment_names_machine_and_versions() -> None:
    found = environment()
    assert found["tra"] == tra.__version__
    assert (found["torch"], found["python"]) == (torch.__version__, platform.python_version())
    assert found["cores"] == os.cpu_count()
    assert found["threads"] == torch.get_num_threads()
    assert json.loads(json.dumps(found)) == found


def test_that_of_a_run_names_packages_commit_and_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = environment_of_run({"my_lab": "my-lab 1.2"})
    assert json.loads(json.dumps(found)) == found
    assert environment().items() <= found.items()
    assert found["packages"] == {name: version(name) for name in PACKAGES if version_of(name)}
    assert {"numpy", "safetensors", "accelerate"} <= set(found["packages"])
    assert (found["plugins"], found["processes"], found["host"]) == ({"my_lab": "my-lab 1.2"}, 4, platform.node())


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path(tra.__file__).parent
    asked = subprocess.run(["git", "-C", package, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    monkeypatch.chdir(tmp_path)
    found = environment_of_run({})
    assert (found["commit"] or {}).get("hash", "") == asked.stdout.strip()
    assert found["working_folder"] == {"commit": None}


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment_of_run({})["commit"] is None


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("numpy") == version("numpy")
    assert version_of("no-such-package-at-all") is None


def test_the_best_device_is_the_accelerator_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert best_device() == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert best_device() == torch.device("cuda")

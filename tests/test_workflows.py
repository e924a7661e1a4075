"""What GitHub runs: every pull request on CPUs, a GPU where there is one, and next month's PyTorch each week."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


def workflow(name: str) -> dict[Any, Any]:
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def commands(job: dict[str, Any]) -> list[str]:
    return [line.strip() for step in job["steps"] for line in step.get("run", "").splitlines()]


def test_pull_requests_are_tested_with_the_oldest_python_and_another() -> None:
    found = workflow("test")
    assert "pull_request" in found[True]  # which YAML takes `on` for
    job = found["jobs"]["cpu"]
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest is not None
    assert oldest[1] in job["strategy"]["matrix"]["python"]
    assert len(job["strategy"]["matrix"]["python"]) >= 2
    assert commands(job) == ["make test"]


def test_a_gpu_is_used_where_there_is_one_and_not_for_code_of_forks() -> None:
    job = workflow("test")["jobs"]["gpu"]
    assert "vars.GPU_RUNNER != ''" in job["if"]
    assert "head.repo.full_name == github.repository" in job["if"]
    assert commands(job) == ["make gpu-test", ".venv/bin/tra doctor"]


def test_each_week_has_the_next_pytorch_and_all_kernels_compiled() -> None:
    found = workflow("nightly")
    assert found[True]["schedule"][0]["cron"].endswith("* * 1")
    assert any("--pre --upgrade torch" in line for line in commands(found["jobs"]["torch"]))
    assert commands(found["jobs"]["triton"]) == ["make gpu-check"]


@pytest.mark.parametrize("name", ["test", "nightly"])
def test_what_is_run_exists_and_what_is_used_is_pinned(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in workflow(name)["jobs"].values():
        assert {line.split()[1] for line in commands(job) if line.startswith("make ")} <= targets
        for step in job["steps"]:
            assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"])

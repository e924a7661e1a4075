"""Where and with what something was measured or trained."""

import os
import platform
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypedDict

import torch

from tra.version import __version__

PACKAGES = ("accelerate", "numpy", "safetensors", "tokenizers", "transformers", "triton")
"""Whose versions may matter to what a run computes, besides torch's."""


class Commit(TypedDict):
    hash: str
    dirty: bool


class Environment(TypedDict):
    tra: str
    torch: str
    python: str
    system: str
    processor: str
    cores: int | None
    threads: int
    accelerators: list[str]


class RunEnvironment(Environment):
    kernel: str | None
    packages: dict[str, str]
    plugins: dict[str, str]
    commit: Commit | None
    working_folder: dict[str, Commit | None]
    command: str
    host: str
    processes: int


def environment() -> Environment:
    """The machine and the versions behind a figure."""
    return {
        "tra": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def environment_of_run(plugins: dict[str, str]) -> RunEnvironment:
    """As above, and all else that somebody who repeats a run may ask for: packages, the code's commit, the command.

    ``plugins`` are the modules that the run needs, with their versions.
    """
    from tra.ops.threshold_relative import cpu

    return {
        **environment(),
        "kernel": cpu.variant,
        "packages": {name: found for name in PACKAGES if (found := version_of(name))},
        "plugins": plugins,
        "commit": _commit(Path(__file__).parent),
        "working_folder": {"commit": _commit(Path.cwd())},
        "command": shlex.join(sys.argv),
        "host": platform.node(),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
    }


def version_of(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> Commit | None:
    """The commit of the work tree that holds a folder and whether it has changes; None where there is no work tree."""

    def git(*arguments: str) -> str:
        # Looking must lock nothing: several runs may begin at once, and somebody may be committing.
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        return {"hash": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def best_device() -> torch.device:
    """Where to compute: the accelerator if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")

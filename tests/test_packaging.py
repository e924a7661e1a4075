"""What is built from the sources: a wheel for any Python 3, with a compiler or without, and a complete sdist."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from tra.errors import INSTALL_FROM
from tra.ops.threshold_relative import cpu
from tra.version import __version__

ROOT = Path(__file__).parent.parent
KERNELS = "tra/ops/threshold_relative/_kernel_"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of what a build reads, with nothing built."""
    tree = tmp_path / "sources"
    shutil.copytree(ROOT / "tra", tree / "tra", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    return tree


def set_up(tree: Path, *words: str, **surroundings: str) -> str:
    """Run setup.py and return what it printed on standard error."""
    environment = {**os.environ, "PYTHONPATH": str(tree), **surroundings}
    command = [sys.executable, "setup.py", *words]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


def wheel_of(tree: Path, **surroundings: str) -> zipfile.ZipFile:
    set_up(tree, "bdist_wheel", "--dist-dir", "dist", **surroundings)
    (wheel,) = (tree / "dist").iterdir()
    return zipfile.ZipFile(wheel)


def tags_of(wheel: zipfile.ZipFile) -> list[str]:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    return re.findall("^Tag: (.*)$", wheel.read(metadata).decode(), re.MULTILINE)


COMPILER = """#!/bin/sh
for word in "$@"; do case "$word" in -I*) test -e "${word#-I}/torch/csrc/stable/library.h" && found=1; esac; done
case "$*" in *" -c "*) test "$found" || { echo "no headers of torch" >&2; exit 1; }; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && : > "$2"; shift; done
"""


@pytest.fixture
def compiler(sources: Path) -> dict[str, str]:
    """One that makes empty files, and looks for the headers that sources need: `make test` has built them already."""
    file = sources / "compiler"
    file.write_text(COMPILER)
    file.chmod(0o755)
    return {"CC": str(file), "CXX": str(file)}


def test_one_wheel_serves_every_python_3_and_is_built_without_importing_torch(
    sources: Path, compiler: dict[str, str]
) -> None:
    (sources / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    wheel = wheel_of(sources, **compiler)
    variants = ["avx2", "avx512", "generic"] if platform.machine() == "x86_64" else ["generic"]
    built = sorted(name for name in wheel.namelist() if name.endswith(".so"))
    assert built == [f"{KERNELS}{variant}.so" for variant in variants]
    (tag,) = tags_of(wheel)
    assert re.fullmatch(r"py3-none-(linux|macosx)_\w+", tag)
    assert Path(str(wheel.filename)).name.endswith(f"-{tag}.whl")
    folders = {name.split("/")[0] for name in wheel.namelist()}
    assert sorted(folder.rpartition(".")[2] for folder in folders) == ["dist-info", "tra"]


def test_without_a_compiler_the_package_still_works_and_says_so_once(sources: Path) -> None:
    wheel = wheel_of(sources, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert not [name for name in wheel.namelist() if name.endswith(".so")]
    # For one platform all the same: elsewhere pip must not prefer it to the sources.
    assert re.fullmatch(r"py3-none-(linux|macosx)_\w+", *tags_of(wheel))
    installed = sources / "installed"
    wheel.extractall(installed)
    program = """
import json, torch, warnings
from tra import threshold_relative_attention
from tra.ops.threshold_relative import cpu
x, gate = torch.randn(1, 2, 9, 8), -torch.rand(1, 2, 9)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    first = threshold_relative_attention(x, x, x, gate)
    threshold_relative_attention(x, x, x, gate)
try:
    threshold_relative_attention(x, x, x, gate, impl="cpu")
except ValueError as error:
    refusal = str(error)
same = torch.equal(first, threshold_relative_attention(x, x, x, gate, impl="reference"))
print(json.dumps([[str(w.message) for w in caught], refusal, cpu.about(), same, cpu.__file__]))
"""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    environment.pop("TRITON_INTERPRET", None)
    output = subprocess.run(
        [sys.executable, "-c", program], cwd=installed, env=environment, capture_output=True, text=True, check=True
    )
    (message,), refusal, about, same, file = json.loads(output.stdout)
    assert file.startswith(str(installed))
    assert "a C++ compiler" in message
    assert refusal == (
        "impl 'cpu' is not built: with torch installed and a C++ compiler (gcc or clang) at hand, "
        "reinstall threshold-relative-attention"
    )
    assert about.startswith("native kernel; not usable here: it is not built: with torch installed")
    assert same


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the processor does not say what it has")
def test_for_this_machine_alone_only_the_variant_that_it_runs_is_built(sources: Path, compiler: dict[str, str]) -> None:
    for asked, expected in (("native", [cpu.variant]), ("", sorted(cpu.VARIANTS))):
        set_up(sources, "build_ext", "--inplace", "--force", TRA_VARIANTS=asked, **compiler)
        built = sorted(file.stem.removeprefix("_kernel_") for file in (sources / "tra").rglob("_kernel_*.so"))
        assert built == (expected if platform.machine() == "x86_64" else ["generic"])


WITHOUT_TORCH = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: None if name == "torch" else find(name, path, target)
"""


def test_without_torch_the_kernel_is_left_out_and_the_build_says_how_to_get_it(sources: Path) -> None:
    (sources / "sitecustomize.py").write_text(WITHOUT_TORCH)
    said = set_up(sources, "bdist_wheel", "--dist-dir", "dist")
    assert "the native CPU kernel is left out: torch is not found: install it first" in said
    (wheel,) = (sources / "dist").iterdir()
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def test_headers_of_an_older_torch_are_refused_by_name(sources: Path) -> None:
    headers = sources / "torch" / "include" / "torch" / "headeronly"
    headers.mkdir(parents=True)
    (sources / "torch" / "__init__.py").touch()
    (headers / "version.h").write_text("#define TORCH_VERSION_MAJOR 2\n#define TORCH_VERSION_MINOR 9\n")
    said = set_up(sources, "build_ext", "--inplace")
    assert "the kernel needs torch 2.10 or newer, found an older one in" in said


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git knows what belongs to the sources")
def test_the_sdist_holds_every_source_and_nothing_else(tmp_path: Path) -> None:
    git = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    known = {name for name in subprocess.check_output(git, cwd=ROOT, text=True).splitlines() if (ROOT / name).exists()}
    tree = tmp_path / "tree"
    for name in known:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    # What lies about where tests have run, and must stay at home.
    for name in ("tra/__pycache__/version.cpython-311.pyc", f"{KERNELS}generic.so", "runs/a/recipe.json", ".venv/x"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    set_up(tree, "sdist", "--dist-dir", "dist")
    (archive,) = (tree / "dist").iterdir()
    with tarfile.open(archive) as sdist:
        held = {member.name.split("/", 1)[1] for member in sdist.getmembers() if member.isfile()}
    written = {name for name in held if name in ("PKG-INFO", "setup.cfg") or ".egg-info/" in name}
    assert held - written == known


def test_releases_are_published_with_no_more_rights_than_they_need() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items()} == {
        "wheels": {"contents": "read"},
        "sdist": {"contents": "read"},
        "publish": {"id-token": "write"},
    }
    # Who may publish runs nothing but what is pinned, and no code of the repository.
    assert not [step for step in jobs["publish"]["steps"] if "run" in step or "checkout" in step["uses"]]
    assert set(jobs["publish"]["needs"]) == {"wheels", "sdist"}
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action) for action in used), used


def test_the_version_to_cite_is_that_of_the_package() -> None:
    (cited,) = (line for line in (ROOT / "CITATION.cff").read_text().splitlines() if line.startswith("version:"))
    assert cited == f"version: {__version__}"


def test_nothing_says_that_the_package_is_published() -> None:
    """Until it is, one constant says where to install from: `tra.errors.INSTALL_FROM`."""
    assert INSTALL_FROM == "."
    places = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.*")]
    for file in [*places, *(ROOT / "tra").rglob("*.py")]:
        if file.suffix in (".md", ".py", ".ipynb"):
            found = re.search(r"pip install (-\S+ )*\\?['\"]?threshold-relative-attention", file.read_text())
            assert found is None, file

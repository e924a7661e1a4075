"""The example project, installed into a fresh environment and used from end to end by the command."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PROJECT = Path(__file__).parent.parent / "examples" / "own_mechanism"
LOADED = """
import sys
import torch
import tra.hub
from tra.runs import load_run
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
tokens = torch.tensor([[1, 0, 1, 10], [1, 1, 1, 10]])
with torch.inference_mode():
    found, expected = model(tokens).logits, load_run(sys.argv[2]).model(tokens)
assert torch.equal(found, expected)
print(type(model.model.decoder.blocks[0].attention).__module__, model.model.decoder.blocks[0].attention.window)
"""


class Fresh:
    """An environment of its own that sees the packages of this one, and in which more can be installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.python = folder / "venv" / "bin" / "python"
        paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # As for a folder of packages, whose own .pth files count too: this package may be installed in place.
        (packages / "shared.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in paths))
        script = (Path(sys.executable).parent / "tra").read_text().split("\n", 1)[1]
        self.command = folder / "venv" / "bin" / "tra"
        self.command.write_text(f"#!{self.python}\n{script}")
        self.command.chmod(0o755)

    def run(self, *command: object, code: int = 0) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRA_"))}
        process = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env={**clean, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == code, process.stdout + process.stderr
        return process.stdout

    def tra(self, *arguments: object, code: int = 0) -> str:
        return self.run(self.command, *arguments, code=code)


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Fresh:
    folder = tmp_path_factory.mktemp("example")
    made = Fresh(folder)
    # Building writes into the sources.
    ignore = shutil.ignore_patterns("build", "*.egg-info", "__pycache__", ".*")
    shutil.copytree(PROJECT, folder / "sources", ignore=ignore)
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    made.run(made.python, "-m", "pip", "install", *offline, folder / "sources")
    shutil.move(folder / "sources" / "compare.py", folder / "compare.py")
    shutil.rmtree(folder / "sources")
    return made


@pytest.fixture(scope="module")
def trained(fresh: Fresh) -> Path:
    """A run of the project's mechanism on its task."""
    run = fresh.folder / "run"
    shown = fresh.tra("train", "digit-sum-small", "--model.options", "window=4", "--steps", "20", "--output", run)
    assert shown.splitlines()[-1] == str(run)
    return run


def test_what_the_example_brings_is_listed(fresh: Fresh) -> None:
    listed = json.loads(fresh.tra("list", "--json"))
    assert "Options: qk_norm=True, window=16." in listed["attention"]["sliding-window"]
    assert listed["tasks"]["digit_sum"] == (
        "Add up digits, modulo ten. The sum of a string of digits, each below ``largest + 1``, modulo ten. "
        "Options: largest=9."
    )
    assert "digit-sum-small" in listed["recipes"]
    assert listed["plugins"] == {"own_mechanism": "own-mechanism 1.0: sliding-window, digit_sum, digit-sum-small"}


def test_a_run_knows_the_plugin_and_its_version(trained: Path) -> None:
    assert json.loads((trained / "recipe.json").read_text())["plugins"] == ["own_mechanism"]
    (environment,) = json.loads((trained / "environment.json").read_text())
    assert environment["plugins"] == {"own_mechanism": "own-mechanism 1.0"}


def test_a_run_is_measured_and_looked_into(fresh: Fresh, trained: Path) -> None:
    shown = fresh.tra("evaluate", trained, "--lengths", "3", "12", "--examples", "20")
    assert "| sliding-window window=4 | sum |" in shown
    found = json.loads(fresh.tra("inspect", trained, "--length", "8", "--json"))
    assert found["attention"] == "sliding-window window=4"
    assert all(head["reach"] <= 4 for head in found["heads"])


def test_the_mechanism_is_compared_with_tra(fresh: Fresh) -> None:
    compared = fresh.folder / "compared"
    fresh.tra("reproduce", "compare.py", "--jobs", "2", "--output", compared)
    table = (compared / "table.md").read_text()
    assert "\n| sliding-window window=2 |" in table
    assert "\n| tra |" in table
    assert json.loads((compared / "results.json").read_text())["finished"] == 4


def test_a_run_is_exported_and_loaded_by_transformers(fresh: Fresh, trained: Path) -> None:
    exported = fresh.folder / "exported"
    assert fresh.tra("export", trained, exported).strip() == str(exported)
    assert "of the plug-in own_mechanism (own-mechanism 1.0)" in (exported / "README.md").read_text()
    assert fresh.run(fresh.python, "-c", LOADED, exported, trained).split()[-2:] == [
        "own_mechanism.sliding_window",
        "4",
    ]


def test_where_the_example_is_not_installed_a_run_says_what_is_missing(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tra", "evaluate", trained]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr.startswith("tra: error: the plug-in own_mechanism is needed and not loaded: install the pack")
    assert process.stderr.count("\n") == 1


def test_the_examples_own_tests_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(PROJECT / "tests")]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(command, env=environment, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert " passed" in process.stdout

"""The tests that transformers has for every model, on models of this package and on a Llama as control.

    python tools/mixins.py [--checkout TRANSFORMERS] [-k NAME]

The tests are those of the transformers that is installed: from its source distribution, which pip fetches and which
holds the common ones, or from a checkout of its repository at that version, which has those of generation too. Prints
how many passed, failed and were skipped for each model, and why those are skipped that the Llama passes. What fails
here and not for the Llama makes the exit code 1.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import transformers

CONTROL = "LlamaTest"
ABSENT = {
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
}
"""What the source distribution lacks of what its tests import."""


def fetch_tests(folder: Path) -> Path:
    """The folder of tests in the source distribution of the installed version."""
    wanted = f"transformers=={transformers.__version__}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*command, wanted], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("transformers-*/tests"))


def outcomes(report: Path) -> dict[str, dict[str, dict[str, str]]]:
    """Tests by class and by what became of them, each with the reason why it was skipped."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag: child.get("message", "") for child in case}
        failed = children.keys() & {"failure", "error"}
        kind = "failed" if failed else "skipped" if "skipped" in children else "passed"
        of_class = found.setdefault(case.attrib["classname"].split(".")[-1], {})
        of_class.setdefault(kind, {})[case.attrib["name"]] = children.get("skipped", "")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, help="a checkout of transformers at the version installed")
    parser.add_argument("-k", metavar="NAME", help="as for pytest")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tests = fetch_tests(folder) if arguments.checkout is None else folder / "tests"
        if arguments.checkout is not None:
            shutil.copytree(arguments.checkout / "tests", tests)
        for path, text in ABSENT.items():
            if not (tests / path).exists():
                print(f"tests/{path} is not in the source distribution: its tests are left out")
                (tests / path).parent.mkdir(exist_ok=True)
                (tests / path).write_text(text)
        for package in (tests, *(path for path in tests.iterdir() if path.is_dir())):
            (package / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("mixin_cases.py"), tests / "test_mixin_cases.py")
        report = folder / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-c", "/dev/null"]
        command += ["--rootdir", str(tests.parent), "--tb=short", f"--junitxml={report}"]
        command += ["-k", arguments.k] if arguments.k else []
        subprocess.run([*command, str(tests / "test_mixin_cases.py")], cwd=tests.parent, check=False)
        found = outcomes(report)
    print(f"\n{'':20}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for model, kinds in found.items():
        print(f"{model:20}" + "".join(f"{len(kinds.get(kind, ())):8}" for kind in ("passed", "failed", "skipped")))
    control = found[CONTROL]
    for model, kinds in found.items():
        reasons = Counter(
            reason for test, reason in kinds.get("skipped", {}).items() if test in control.get("passed", {})
        )
        for reason, count in reasons.most_common():
            print(f"{model} skips {count} that the Llama passes: {reason}")
    worse = {
        model: sorted(kinds.get("failed", {}).keys() - control.get("failed", {})) for model, kinds in found.items()
    }
    for model, names in worse.items():
        for test in names:
            print(f"{model} fails {test}, which the Llama does not")
    return 1 if any(worse.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

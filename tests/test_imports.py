"""`import tra` needs torch alone; what needs more says what to install."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tra.errors import how_to_install


def test_import_loads_no_optional_dependency() -> None:
    train = ["accelerate", "rich", "matplotlib", "safetensors", "filelock"]
    optional = [*train, "datasets", "transformers", "tokenizers", "pyarrow", "triton"]
    program = (
        "import torch, sys\n"
        "before = set(sys.modules)\n"
        "import tra\n"
        f"print(sorted((set(sys.modules) - before) & set({optional!r})))"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def without(missing: str, statement: str) -> subprocess.CompletedProcess[str]:
    """A process in which a finder in front of all others hides a module."""
    program = f"""
import sys, torch
from importlib.abc import MetaPathFinder
class Hiding(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == {missing!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hiding())
def command(*words):
    from tra.__main__ import run
    sys.argv[1:] = words
    sys.exit(run())
{statement}
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "missing, statement, extra",
    [
        ("transformers", "import tra.hub", "hub"),
        ("accelerate", "from tra.runs import train", "train"),
        ("matplotlib", "import tra.report", "train"),
        ("tokenizers", "import tra.text", "hub"),
        ("filelock", "command('train', 'flip-flop-small')", "train"),
        ("rich", "command('list')", "train"),
        ("transformers", "command('export', 'a', 'b')", "hub"),
    ],
)
def test_what_is_missing_is_named_in_one_line_with_what_brings_it(missing: str, statement: str, extra: str) -> None:
    done = without(missing, statement)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    said = f"No module named '{missing}': {how_to_install(extra)}"
    if statement.startswith("command"):
        assert lines == [f"tra: error: {said}"]
    else:
        assert lines[-1] == f"ModuleNotFoundError: {said}"


def test_names_and_recipes_need_torch_alone() -> None:
    program = "import tra.recipes; tra.recipes.build_recipe('flip-flop-small'); command('train')"
    assert "RECIPE or --resume RUN must be given" in without("safetensors", program).stderr


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tra"


def order() -> list[set[str]]:
    """The rooms as CONTRIBUTING lists them."""
    layout = (ROOT / "CONTRIBUTING.md").read_text().split("## Layout", 1)[1].split("|", 1)[0]
    chain = " ".join(line.strip() for line in layout.splitlines() if line.startswith("    "))
    return [{name.strip() for name in names.split(",")} for names in chain.split("→")]


def rank_of(name: str) -> int:
    """Rooms joined by a plus may import each other."""
    return next(index for index, names in enumerate(order()) if any(name in pair.split(" + ") for pair in names))


def rooms() -> set[str]:
    """What lies in the package: folders and modules."""
    found = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    return {name for name in found if not name.startswith("__")}


def test_contributing_lists_the_rooms_that_there_are() -> None:
    listed = [name for names in order() for pair in names for name in pair.split(" + ")]
    assert sorted(listed) == sorted(rooms())


def test_modules_import_only_from_rooms_before_them() -> None:
    rank = {name: rank_of(name) for name in rooms()}
    friends = [set(pair.split(" + ")) for names in order() for pair in names]
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
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
                fine = rank[other] < rank[name] or any({other, name} <= pair for pair in friends)
                assert fine, f"{file.relative_to(PACKAGE)} imports tra.{other}"


def test_only_the_hub_imports_transformers() -> None:
    for file in PACKAGE.rglob("*.py"):
        if file.relative_to(PACKAGE).parts[0] != "hub":
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not any(name.split(".")[0] == "transformers" for name in names), file


def test_tests_mirror_the_package() -> None:
    """A folder of the package has a folder of tests, and besides the attacks, which are on all of it, no other is."""
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and not path.name.startswith("__")}
    tested = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert tested == {*folders, "fuzz"}


OTHERS = ("torch", "transformers", "accelerate", "submitit", "peft", "triton")
NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
"""Python's own public names that begin with an underscore; os._exit is another."""
WITHOUT_A_PUBLIC_WAY = {"hub/modeling.py": {"_is_hf_initialized", "_weight_conversions"}}
"""transformers has no other way to say that weights are drawn already and that old names are not written again. Tests
of the hub fail when these move."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """What a file defines itself: functions, classes, variables, and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names(source: str, of_package: set[str] = frozenset()) -> list[str]:
    """Private names and modules of other libraries that a file imports or reaches through a module or an object: any
    private attribute that the file, or for ``self`` the package, does not define."""
    tree = ast.parse(source)
    own, found = defined_names(tree) | NAMED_TUPLES, []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) and node.level == 0 else ""
            names = [module + alias.name for alias in node.names]
            found += [name for name in names if name.split(".")[0] in OTHERS and any(map(private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and private(node.attr):
            of_others = ast.unparse(node.value).split(".")[0] in OTHERS
            inherited = ast.unparse(node.value) in ("self", "cls") and node.attr in of_package
            if of_others or not (node.attr in own or inherited or ast.unparse(node) == "os._exit"):
                found.append(ast.unparse(node))
    return found


def test_the_search_for_private_names_finds_them() -> None:
    source = (
        "import torch._C\nfrom torch.autograd import _x, y\nfrom torch import __version__\ntorch._C._f()\n"
        "state._shared['x'] = 1\nexecutor._inner.run()\nself._theirs\nself._inherited\nself._own = values._replace(x=1)"
    )
    found = ["torch._C", "torch.autograd._x", "torch._C._f", "torch._C", "state._shared", "executor._inner"]
    assert sorted(private_names(source, {"_inherited"})) == sorted([*found, "self._theirs"])


def test_no_private_name_of_another_library_is_used() -> None:
    sources = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in PACKAGE.rglob("*.py")}
    of_package = set().union(*(defined_names(ast.parse(source)) for source in sources.values()))
    found = {}
    for file, source in sources.items():
        allowed = WITHOUT_A_PUBLIC_WAY.get(file, set())
        used = {name for name in private_names(source, of_package) if name.rpartition(".")[2] not in allowed}
        if used:
            found[file] = used
    assert not found

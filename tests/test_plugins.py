"""Names from outside the package behave like its own, and no file causes an import."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.calling import Captured, fails, help_of, json_of, shows, without_plugins
from tra import plugins
from tra.errors import RunError
from tra.experiments import Experiment, load_experiment, reproduce
from tra.experiments.grid import chosen_rows
from tra.model import Decoder, DecoderConfig
from tra.recipes import RECIPES, Recipe, build_recipe
from tra.runs import load_run, train
from tra.tasks import build_task

MODULE = '''
"""Everything that a plug-in may bring."""
from dataclasses import dataclass, replace
from tra.attention.nope import UnpositionedAttention
from tra.experiments import Experiment
from tra.model import DecoderConfig
from tra.recipes import Evaluation, Recipe
from tra.tasks import FlipFlop

class Doubled(UnpositionedAttention):
    """Values count twice, or as often as asked."""
    def __init__(self, width, heads, kv_heads=None, *, times: float = 2.0, **shared):
        super().__init__(width, heads, kv_heads, **shared)
        self.times = times
    def attend(self, x, query, key, value, context):
        return self.times * super().attend(x, query, key, value, context)

@dataclass(frozen=True)
class Noted(FlipFlop):
    """Flip-flop under another name."""
    name = "noted"

def short(attention: str = "doubled") -> Recipe:
    return Recipe(
        name="short",
        model=DecoderConfig(vocabulary=6, layers=1, heads=2, width=16, dropout=0.0, attention=attention),
        task="noted",
        length=8,
        steps=2,
        batch=4,
        learning_rate=1e-3,
        evaluations=(Evaluation("iid", 8, 4),),
    )

MECHANISMS = {"doubled": Doubled}
TASKS = {"noted": Noted}
RECIPES = {"short": short}
experiment = Experiment(scales={"small": {"noted": short}}, rows=["doubled", "nope"])
'''


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Every test begins without plug-ins, and leaves none."""
    before = set(sys.modules)
    with without_plugins():
        yield
    for name in set(sys.modules) - before:
        if name.startswith(("mine", "other")):
            del sys.modules[name]


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module that can be imported, and on demand a package that was installed with it."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def write_module(name: str, content: str = MODULE, installed: bool = False, entry: str = "") -> Path:
        monkeypatch.delitem(sys.modules, name, raising=False)  # another test's
        file = site / f"{name}.py"
        file.write_text(content)
        if installed:
            dist = site / f"{name}-1.2.dist-info"
            dist.mkdir()
            (dist / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
            (dist / "entry_points.txt").write_text(f"[tra.plugins]\n{name} = {entry or name}\n")
        return file

    return write_module


def by_name(write: Write) -> str:
    write("mine")
    return plugins.load("mine").__name__


def by_file(write: Write) -> str:
    plugins.load(str(write("mine")))
    return "mine.py"


def by_entry_point(write: Write) -> str:
    write("mine", installed=True)
    return "mine"


@pytest.fixture(params=[by_name, by_file, by_entry_point])
def plugin(request: pytest.FixtureRequest, write: Write) -> str:
    """A plug-in that is there, however it came; what it is called."""
    return request.param(write)


def test_its_names_are_found(plugin: str) -> None:
    recipe = build_recipe("short")
    assert (recipe.model.attention, recipe.task) == ("doubled", "noted")
    assert build_task("noted").vocabulary == 6
    assert recipe.plugins == [plugin]
    assert build_recipe("short", "rope").plugins == [plugin], "its task is from there"
    assert build_recipe("flip-flop-small", "doubled").plugins == [plugin]
    assert build_recipe("flip-flop-small").plugins == []
    assert plugins.source("MECHANISMS", "doubled") == plugin
    assert plugins.source("MECHANISMS", "rope") is None


def test_a_mechanism_is_one_like_any_other(plugin: str) -> None:
    config = DecoderConfig(7, 1, 2, 16, attention="doubled", attention_options={"times": 3})
    assert config.label == "doubled times=3"
    once = Decoder(DecoderConfig(7, 1, 2, 16, attention="doubled", attention_options={"times": 1.0})).eval()
    plain = Decoder(DecoderConfig(7, 1, 2, 16, attention="nope")).eval()
    plain.load_state_dict(once.state_dict())
    tokens = torch.randint(7, (2, 9))
    assert torch.equal(once(tokens), plain(tokens))
    with pytest.raises(ValueError, match="attention_options of doubled must be among qk_norm, times, got 'tmies'; did"):
        DecoderConfig(7, attention="doubled", attention_options={"tmies": 3})


def test_its_names_are_suggested(plugin: str) -> None:
    with pytest.raises(ValueError, match="got 'dubled'; did you mean 'doubled'"):
        DecoderConfig(7, attention="dubled")
    with pytest.raises(ValueError, match="got 'notd'; did you mean 'noted'"):
        build_task("notd")
    with pytest.raises(ValueError, match="got 'shrt'; did you mean 'short'"):
        build_recipe("shrt")


def test_its_names_are_listed(plugin: str, capsys: Captured) -> None:
    listed = json_of(["list"], capsys)
    assert "Values count twice, or as often as asked. Options: qk_norm=True, times=2." in listed["attention"]["doubled"]
    assert listed["recipes"]["short"].startswith("noted, up to 8 tokens")
    assert "noted" in listed["tasks"]
    assert listed["plugins"][plugin].endswith(": doubled, noted, short")
    assert " short " in help_of(["train"], capsys)


def test_a_run_is_trained_stored_and_loaded(plugin: str, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "run"
    shows(["train", "short", "--model.options", "times=1.5", "--output", str(folder)], capsys)
    assert json.loads((folder / "recipe.json").read_text())["plugins"] == [plugin]
    version = "mine 1.2" if (tmp_path / "site" / "mine-1.2.dist-info").exists() else ""
    assert json.loads((folder / "environment.json").read_text())[0]["plugins"] == {plugin: version}
    run = load_run(folder)
    assert run.recipe == build_recipe("short").changed({"model.attention_options": {"times": 1.5}})
    assert "| doubled times=1.5 | iid |" in shows(["evaluate", str(folder)], capsys)


def test_a_grid_in_other_processes_knows_it(plugin: str, tmp_path: Path) -> None:
    plugins.load_installed()
    outcome = reproduce(plugins._loaded[plugin].experiment, tmp_path / "out", jobs=2)
    assert outcome.failures == {}
    assert "| doubled |" in outcome.shown
    assert "| nope |" in outcome.shown


def test_an_exported_folder_names_it(plugin: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tra import hub
    from tra.hub.export import export

    export(train(build_recipe("short"), tmp_path / "run"), tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "config.json").read_text())
    assert stored["plugins"] == [plugin]
    card = (tmp_path / "model" / "README.md").read_text()
    assert f'tra.plugins.load("{plugin}")' in card
    assert f"of the plug-in {plugin}" in card
    config = hub.TraConfig.from_pretrained(tmp_path / "model")
    assert hub.TraConfig(**config.to_dict()).to_diff_dict() == config.to_diff_dict()
    model = hub.TraForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.randint(6, (2, 9))
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, load_run(tmp_path / "run").model(tokens))
    assert "plugins" not in hub.TraConfig(attention="rope").to_dict()


@pytest.fixture
def orphan(write: Write, tmp_path: Path) -> Path:
    """A run whose plug-in was loaded by name, and is now forgotten though it could be imported."""
    by_name(write)
    train(build_recipe("short"), tmp_path / "run")
    plugins._loaded.clear()
    del sys.modules["mine"]
    return tmp_path / "run"


def test_a_run_without_its_plug_in_says_which_and_how_to_get_it(orphan: Path, capsys: Captured) -> None:
    for command in (["evaluate"], ["inspect"], ["train", "--resume"], ["generate", "--prompt", "a"]):
        error = fails([*command, str(orphan)], capsys, code=1)
        assert "the plug-in mine is needed and not loaded: install the package that brings it" in error
        assert "or give --plugin mine (in Python: tra.plugins.load('mine'))" in error
    assert "mine" not in sys.modules, "no file causes an import"
    assert "| doubled | iid |" in shows(["evaluate", str(orphan), "--plugin", "mine"], capsys)


def test_an_exported_folder_without_its_plug_in_says_so_and_imports_nothing(
    orphan: Path, tmp_path: Path, capsys: Captured
) -> None:
    pytest.importorskip("transformers")
    from tra import hub

    shows(["export", str(orphan), str(tmp_path / "model"), "--plugin", "mine"], capsys)
    plugins._loaded.clear()
    del sys.modules["mine"]
    for load in (hub.TraConfig, hub.TraForCausalLM):
        with pytest.raises(RunError, match="the plug-in mine is needed and not loaded"):
            load.from_pretrained(tmp_path / "model")
    assert "mine" not in sys.modules
    plugins.load("mine")
    assert hub.TraForCausalLM.from_pretrained(tmp_path / "model").config.attention == "doubled"


@pytest.mark.parametrize("named", [["json.tool"], "json.tool", [3], None])
def test_whatever_a_file_names_is_not_imported(named: Any, tmp_path: Path) -> None:
    recipe = json.loads(build_recipe("flip-flop-small").to_json())
    sys.modules.pop("json.tool", None)
    with pytest.raises((RunError, ValueError), match=r"plug-?in"):
        Recipe.from_json(json.dumps({**recipe, "plugins": named}))
    assert "json.tool" not in sys.modules


def test_a_file_is_known_by_its_last_part(write: Write, tmp_path: Path, capsys: Captured) -> None:
    file = write("mine")
    plugins.load(str(file))
    train(build_recipe("short"), tmp_path / "run")
    plugins._loaded.clear()
    plugins._paths.clear()
    error = fails(["evaluate", str(tmp_path / "run")], capsys, code=1)
    assert "or give --plugin PATH/mine.py" in error
    moved = tmp_path / "moved" / "mine.py"
    moved.parent.mkdir()
    shutil.move(file, moved)
    assert "| doubled | iid |" in shows(["evaluate", str(tmp_path / "run"), "--plugin", str(moved)], capsys)
    assert plugins.loaded() == (str(moved),)


def test_two_files_of_one_name_are_refused(write: Write, tmp_path: Path) -> None:
    first = plugins.load(str(write("mine")))
    (tmp_path / "mine.py").write_text("TASKS = {}\n")
    with pytest.raises(ValueError, match=r"must have a name of its own: .*site/mine\.py is loaded already"):
        plugins.load(str(tmp_path / "mine.py"))
    assert plugins.load(str(tmp_path / "site" / "mine.py")) is first


def test_a_plug_in_is_imported_once(write: Write) -> None:
    write("mine", MODULE + "\nimport tra\ntra.count = getattr(tra, 'count', 0) + 1\n", installed=True)
    import tra

    try:
        assert plugins.load("mine") is plugins.load("mine")
        plugins.load_installed()
        assert build_recipe("short").plugins == ["mine"]
        assert tra.count == 1  # type: ignore[attr-defined]
        assert plugins.versions(["mine"]) == {"mine": "mine 1.2"}
    finally:
        del tra.count  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind, name", [("MECHANISMS", "rope"), ("TASKS", "flip_flop"), ("RECIPES", "flip-flop")])
def test_a_name_of_the_package_cannot_be_taken(kind: str, name: str, write: Write, capsys: Captured) -> None:
    write("mine", f"from tra.attention import Attention\n{kind} = {{{name!r}: Attention}}\n")
    error = fails(["train", "flip-flop-small", "--plugin", "mine"], capsys)
    assert error == f"plug-in mine must bring new names, but tra has {name!r} in {kind} already"
    assert plugins.loaded() == ()
    assert build_recipe("flip-flop-small", "rope").model.new_attention(0).__class__.__name__ == "RotaryAttention"


def test_a_name_of_another_plug_in_cannot_be_taken(write: Write) -> None:
    plugins.load(by_name(write))
    write("other")
    with pytest.raises(ValueError, match="plug-in other must bring new names, but mine has 'doubled' in MECHANISMS"):
        plugins.load("other")
    assert plugins.loaded() == ("mine",)


@pytest.mark.parametrize(
    "content, message",
    [
        ("MECHANISMS = ['mine']", "must have a dict of names as MECHANISMS, got list"),
        ("TASKS = {3: int}", "must have a dict of names as TASKS, got dict"),
        (
            "MECHANISMS = {'mine': int}",
            "'mine' in MECHANISMS of plug-in mine must be a subclass of tra.attention.Attention",
        ),
        ("RECIPES = {'mine': 3}", "'mine' in RECIPES of plug-in mine must be a class or a function, got 3"),
    ],
)
def test_what_is_no_plug_in_is_refused(content: str, message: str, write: Write) -> None:
    write("mine", content)
    with pytest.raises(ValueError, match=message):
        plugins.load("mine")
    assert plugins.loaded() == ()


@pytest.mark.parametrize(
    "content, said",
    [
        ("x = 1\ny = undefined\n", "NameError: name 'undefined' is not defined"),
        ("import no_such_library\n", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("x = 1\ndef broken(:\n", "SyntaxError: invalid syntax"),
    ],
)
@pytest.mark.parametrize("as_file", [True, False])
def test_a_broken_plug_in_is_one_line_with_the_place(
    content: str, said: str, as_file: bool, write: Write, capsys: Captured
) -> None:
    file = write("mine", content)
    error = fails(["list", "--plugin", str(file) if as_file else "mine"], capsys, code=1)
    assert f"could not be loaded: {said}" in error
    assert f"{file}, line {2 if 'x = 1' in content else 1})" in error
    assert not {"mine", "tra_plugin_mine"} & set(sys.modules)


@pytest.mark.parametrize("name", ["no_such_module", "json.no_such_module", "runs/mine", "no_such_file.py", ""])
def test_what_is_not_there_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"plugin must be .*, got"):
        plugins.load(name)


@pytest.mark.parametrize(
    "content, entry, said",
    [
        ("raise OSError('no licence')", "", "no licence"),
        ("MECHANISMS = {'rope': int}", "", "must bring new names"),
        (MODULE, "mine:MECHANISMS", "its entry point must name a module, got 'mine:MECHANISMS'"),
        (MODULE, "mine_too", "No module named 'mine_too'"),
    ],
)
def test_a_broken_installed_plug_in_costs_one_warning(content: str, entry: str, said: str, write: Write) -> None:
    write("mine", content, installed=True, entry=entry)
    write("other", installed=True)
    with pytest.warns(UserWarning, match=f"plug-in mine.* is installed and left out: .*{said}") as warned:
        assert build_recipe("short").plugins == ["other"]
    assert len(warned) == 1
    assert set(plugins.every("RECIPES", RECIPES)) == {*RECIPES, "short"}


def test_built_in_names_need_no_plug_in(write: Write) -> None:
    write("mine", "raise OSError('looked at')", installed=True)
    build_recipe("flip-flop-small", "rope")
    Recipe.from_json(build_recipe("flip-flop-small").to_json())
    assert not plugins._installed_done


def test_the_current_folder_is_looked_in_by_the_command(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "here").mkdir()
    shutil.move(write("found_here"), tmp_path / "here" / "found_here.py")  # no other test has a module of this name
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert " short " in help_of(["train", "--plugin", "found_here"], capsys)


def test_an_experiment_file_is_a_plug_in(write: Write) -> None:
    found = load_experiment(str(write("mine")))
    assert isinstance(found, Experiment)
    assert [row.label for row in chosen_rows(found.rows, [])] == ["doubled", "nope"]
    assert build_recipe("short").plugins == ["mine.py"]


def test_a_file_may_import_its_neighbour_from_anywhere(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    neighbour = write("neighbour")
    main = neighbour.with_name("compared.py")
    main.write_text("from neighbour import MECHANISMS, TASKS, RECIPES, experiment")
    monkeypatch.chdir("/")
    found = load_experiment(str(main))
    assert isinstance(found, Experiment)
    assert str(main.parent) in plugins.folders()
    sys.modules.pop("neighbour")


def test_a_recipe_that_cannot_be_made_does_not_hide_the_others(write: Write, capsys: Captured) -> None:
    write("mine", MODULE.replace("steps=2", "steps=0"), installed=True)
    shown = help_of(["train"], capsys)
    assert " short cannot be made: steps must be at least 1, got 0 " in f"{shown} "
    assert "flip-flop-small" in shown
    assert fails(["train", "short"], capsys) == "steps must be at least 1, got 0"

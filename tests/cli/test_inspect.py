"""`tra inspect`."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.calling import Captured, fails, json_of, shows
from tra.cli import main


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def test_heads_are_summarised_and_drawn_beside_the_run(run: Path, capsys: Captured) -> None:
    shown = shows(["inspect", str(run), "--length", "10"], capsys)
    folder = run / "inspection"
    assert shown.splitlines()[-1] == str(folder)
    table = (folder / "heads.md").read_text()
    assert table in shown
    for heading in table.splitlines()[0].strip("| ").split(" | ")[2:]:
        assert f"\n{heading.removesuffix(' 10% / 50% / 90%')}: " in shown, "what it means is said below the table"
    assert any(file.read_bytes().startswith(b"\x89PNG") for file in folder.glob("*.png"))
    assert not list(folder.glob("*.svg"))


@pytest.mark.parametrize("options", [[], ["--html"]])
def test_where_nothing_can_be_written_the_option_that_helps_is_named(
    options: list[str], run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)  # as in a folder that is read-only, which stops no superuser
    assert main(["inspect", str(run), *options]) == 1
    said = f"tra: error: could not write {run / 'inspection'}: Read-only file system; --output names another folder\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", ["svg pdf", "svg,pdf"])
def test_figures_come_in_the_formats_asked_for(words: str, run: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "elsewhere"
    content = json_of(["inspect", str(run), "--output", str(folder), "--figures", *words.split()], capsys)
    assert json.loads((folder / "heads.json").read_text()) == content
    assert {file.suffix for file in folder.iterdir()} == {".json", ".md", ".svg", ".pdf"}
    assert not (run / "inspection").exists()


def test_a_run_on_text_reads_a_text_a_file_or_its_own(language_run: Path, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "text.txt").write_text("The river")
    command = ["inspect", str(language_run), "--output", str(tmp_path / "found")]
    given = json_of([*command, "--text", "The river"], capsys)
    assert json_of([*command, "--text", f"@{tmp_path / 'text.txt'}"], capsys) == given
    own = json_of([*command, "--length", "12"], capsys)
    assert own != given
    assert own == json_of([*command, "--length", "12"], capsys), "always the same sequence"


def test_a_page_takes_the_place_of_the_figure_and_can_hold_another_run_and_a_long_text(
    language_run: Path, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    shown = shows(["inspect", str(run), "--html", "--beside", str(run)], capsys)
    page = run / "inspection" / "explorer.html"
    assert shown.splitlines()[-1] == str(page)
    assert {file.name for file in page.parent.iterdir()} == {"explorer.html", "heads.json", "heads.md"}
    assert '"label":"tra (run) 2"' in page.read_text()
    folder = tmp_path / "long"
    (tmp_path / "text.txt").write_text("The river rises . " * 100)
    command = ["inspect", str(language_run), "--html", "--text", f"@{tmp_path / 'text.txt'}", "--output", str(folder)]
    content = json_of(command, capsys)
    assert len(content["tokens"]) > 256, "more than a figure can show"
    assert len(content["heads"]) == 4
    assert (folder / "explorer.html").stat().st_size < 4e6


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--beside elsewhere", "beside must be given with --html"),
        ("--html --beside elsewhere", "run must be a folder that holds recipe.json, got elsewhere"),
        ("--text hello", "text must be left out: "),
        ("--length 0", "length must be"),
        ("--figures gif", "figures must be one of "),
        ("--lenght 5", "--lenght is no option of tra inspect; did you mean --length?"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: str, message: str, run: Path, capsys: Captured) -> None:
    assert fails(["inspect", str(run), *arguments.split()], capsys).startswith(message)

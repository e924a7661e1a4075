"""`tra export`."""

import re
from pathlib import Path

from tests.cli.calling import Captured, fails, shows
from tests.faults import full_disk
from tra.cli import main


def test_an_existing_folder_is_left_alone(
    language_run: Path,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    (tmp_path / "mine").mkdir()
    assert main(["export", str(language_run), str(tmp_path / "mine")]) == 2
    assert "folder must not exist yet" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_full_disk_is_one_line_and_leaves_nothing(language_run: Path, tmp_path: Path, capsys: Captured) -> None:
    with full_disk(20_000):
        assert main(["export", str(language_run), str(tmp_path / "model")]) == 1
    assert re.fullmatch(r"tra: error: could not write .*model: .*File too large.*\n", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_made_and_printed(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "new" / "model"
    assert shows(["export", str(finished_run), str(folder)], capsys) == f"{folder}\n"
    assert {"config.json", "model.safetensors", "README.md"} <= {file.name for file in folder.iterdir()}


def test_the_file_that_leads_to_the_package_is_optional(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    for words, expected in (([], ["tra_model.py"]), (["--no-auto-map"], [])):
        folder = tmp_path / str(len(words))
        shows(["export", str(finished_run), str(folder), *words], capsys)
        assert [file.name for file in folder.glob("*.py")] == expected


def test_a_wrong_argument_is_one_line(finished_run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert fails(["export", str(finished_run)], capsys) == "FOLDER must be given; see tra export --help"
    error = fails(["export", str(tmp_path), str(tmp_path / "model")], capsys)
    assert error == f"run must be a folder that holds recipe.json, got {tmp_path}"
    error = fails(["export", str(finished_run), str(tmp_path / "model"), "--jsno"], capsys)
    assert error.startswith("--jsno is no option of tra export")
    assert list(tmp_path.iterdir()) == []

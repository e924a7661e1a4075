"""Files appear whole or not at all, whatever happens to the process that writes them."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from filelock import FileLock

from tests.faults import full_disk
from tra.files import locked, remove_folder, remove_partial, write_json, write_text, written_aside
from tra.progress import shown


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_replaces_what_was_there(tmp_path: Path) -> None:
    for content in ("first\n", "sécond\n"):
        write_text(tmp_path / "notes.txt", content)
        assert (tmp_path / "notes.txt").read_bytes() == content.encode()
    write_json(tmp_path / "some.json", {"a": [1, None]})
    assert (tmp_path / "some.json").read_text() == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'
    assert names(tmp_path) == {"notes.txt", "some.json"}


def test_a_folder_replaces_what_was_there(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with written_aside(tmp_path / "made") as aside:
            aside.mkdir()
            (aside / content).write_text(content)
            assert not (tmp_path / "made" / content).exists()
    assert names(tmp_path) == {"made"}
    assert names(tmp_path / "made") == {"second"}


def test_a_file_never_replaces_a_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").mkdir()
    (tmp_path / "notes.txt" / "thesis").write_text("years of work")
    with pytest.raises(IsADirectoryError, match=f"a file does not replace: '{tmp_path / 'notes.txt'}'"):
        write_text(tmp_path / "notes.txt", "words")
    with pytest.raises(IsADirectoryError, match="a file does not replace"):
        write_json(tmp_path / "notes.txt", {})
    assert names(tmp_path) == {"notes.txt"}
    assert (tmp_path / "notes.txt" / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_after_an_error_what_was_there_stays_and_nothing_else(tmp_path: Path, kind: type[BaseException]) -> None:
    write_text(tmp_path / "notes.txt", "before")

    def fail(aside: Path) -> None:
        aside.write_text("half")
        raise kind

    with pytest.raises(kind), written_aside(tmp_path / "notes.txt") as aside:
        fail(aside)
    assert names(tmp_path) == {"notes.txt"}
    assert (tmp_path / "notes.txt").read_text() == "before"


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    write_text(tmp_path / "notes.txt", "before")
    message = re.escape(f"File too large: '{tmp_path / 'notes.txt'}'")
    with full_disk(100), pytest.raises(OSError, match=message):
        write_text(tmp_path / "notes.txt", "x" * 101)
    assert (tmp_path / "notes.txt").read_text() == "before"
    assert names(tmp_path) == {"notes.txt"}


def test_a_folder_that_is_missing_is_named_as_it_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{tmp_path / 'no' / 'notes.txt'}'")):
        write_text(tmp_path / "no" / "notes.txt", "words")


def test_an_error_of_another_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="'/nowhere/at-all'"), written_aside(tmp_path / "notes.txt"):
        open("/nowhere/at-all").close()


KILLED = """
import os, signal, sys
from pathlib import Path
from tra.files import written_aside
with written_aside(Path(sys.argv[1])) as aside:
    aside.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_leaves_is_no_file_and_is_removed_by_the_next_one(tmp_path: Path) -> None:
    write_text(tmp_path / "notes.txt", "before")
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "notes.txt")], check=False)
    assert process.returncode == -signal.SIGKILL
    assert (tmp_path / "notes.txt").read_text() == "before"
    (left,) = names(tmp_path) - {"notes.txt"}
    assert left.startswith(".notes.txt.")
    assert left.endswith(".partial")
    with locked(tmp_path / "notes.txt"):
        assert names(tmp_path) == {"notes.txt", ".notes.txt.lock"}


def test_only_what_is_left_of_a_locked_file_is_removed(tmp_path: Path) -> None:
    kept = {".other.tokens.7.partial", ".train-12.tokens.7.partial", "train-1.tokens"}
    for name in (*kept, ".train-1.tokens.7.partial", ".train-1.json.9.partial"):
        (tmp_path / name).write_text("")
    with locked(tmp_path / "train-1.tokens"):
        assert names(tmp_path) == kept | {".train-1.tokens.lock"}


def test_partial_files_and_folders_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step.1.partial").mkdir()
    (tmp_path / ".step.1.partial" / "model").write_text("")
    (tmp_path / ".notes.2.partial").write_text("")
    (tmp_path / "notes").write_text("")
    remove_partial(tmp_path)
    remove_partial(tmp_path / "nowhere")
    assert names(tmp_path) == {"notes"}


def test_a_folder_is_never_seen_half_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "model").write_text("")

    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tra.files.shutil.rmtree", stopped)
    with pytest.raises(KeyboardInterrupt):
        remove_folder(tmp_path / "step")
    assert not (tmp_path / "step").exists()
    monkeypatch.undo()
    remove_partial(tmp_path)
    assert names(tmp_path) == set()


def test_one_who_waits_for_a_lock_says_so_and_gets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, held, let_go = tmp_path / "made", threading.Event(), threading.Event()

    def hold() -> None:
        with FileLock(tmp_path / ".made.lock"):
            held.set()
            let_go.wait()

    threading.Thread(target=hold).start()
    held.wait()
    timer = threading.Timer(1.3, let_go.set)
    timer.start()
    with shown(), locked(path):
        assert let_go.is_set()
    assert capsys.readouterr().out == f"waiting for another process, which makes {path}\n"
    with shown(), locked(path):
        pass
    assert capsys.readouterr().out == ""


def test_files_are_flushed_before_they_take_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("flush") or sync(descriptor))
    monkeypatch.setattr(os, "replace", lambda *paths: order.append("rename") or replace(*paths))
    write_text(tmp_path / "notes.txt", "words")
    assert order == ["flush", "rename", "flush"]  # the file, its name, the folder that holds the name

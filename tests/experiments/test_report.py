"""`report.html`: what it says of a grid that has ended, and of one that runs."""

import re
import time
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.experiments.small import content_of, of_flip_flop
from tra.errors import Interrupted
from tra.experiments import Request, Row, Tuning, grid_report
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import run_cell
from tra.report.conclusions import conclusions
from tra.report.tables import comparison_tables

TUNED = of_flip_flop(
    rows=("tra", Row("rope", changes={"clip": 0.5}, name="<b>rope</b>")),
    tuning=Tuning({"learning_rate": (1e-3, 2e-3, 4e-3)}, rows=("tra",)),
)


def text_of(page: str) -> str:
    """What a reader sees, without the tags."""
    body = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.mark.usefixtures("run_here")
def test_a_report_says_what_was_run_how_what_came_of_it_and_what_tuning_took(tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    request = Request(folder, "smoke", seeds=2, command="tra reproduce mine.py & more")
    outcome = TUNED.perform(request)
    page = (folder / "report.html").read_text()
    said = text_of(page)
    assert "runs 4 of 4 finished seeds 0, 1" in said
    assert "command tra reproduce mine.py & more 7 runs in" in said, "tuning included"
    environment = content_of(folder)["sessions"][0]["environment"]
    assert f"tra {environment['tra']}, torch {environment['torch']}, Python {environment['python']}" in said
    for table in comparison_tables(outcome.records):
        assert table.title in said
        for row in table.rows:
            assert " ".join(cell for cell in row if cell) in said
    assert page.count("<strong>") == sum(len(table.best) for table in comparison_tables(outcome.records)) + 1
    links = [folder / unquote(link) for link in re.findall(r'<a href="([^"]+)">', page)]
    runs, explorers = ([link for link in links if (link.suffix == ".html") == html] for html in (False, True))
    assert len(runs) == 7
    assert all((run / "recipe.json").exists() for run in runs)
    assert len(explorers) == 2, "one for the first seed of each row"
    assert all("explorer" in page.read_text() for page in explorers)
    assert page.count("<polyline") == 7
    assert page.count('<svg role="img"') == 2
    assert 'aria-label="training, flip_flop"' in page
    (sentence,) = conclusions(outcome.records).values()
    assert f"What came out flip_flop {sentence}" in said
    assert "grid learning_rate = 0.001, 0.002, 0.004 seeds 1000 rows tra budget 3 runs of" in said
    chosen = content_of(folder)["tuning"]["flip_flop tra"]["chosen"]["learning_rate"]
    edge = "" if chosen == 2e-3 else " (at the edge of what was tried: learning_rate)"
    assert f"chosen for flip_flop tra learning_rate = {chosen}{edge}" in said
    assert ("at the edge" in said) == bool(edge)
    assert "<b>rope" not in page, "names are text"
    assert "location.reload" in page
    assert '"again":null' in page
    assert not re.search(r"(?:src|href)=.?https?:", page)
    TUNED.perform(replace(request, train=False))
    assert (folder / "report.html").read_text() == page, "from what is stored it is the same"


@pytest.mark.usefixtures("run_here")
def test_failures_stand_with_their_reasons(tmp_path: Path) -> None:
    stranger = tmp_path / "runs" / "flip_flop" / "rope" / "0"
    stranger.mkdir(parents=True)
    (stranger / "recipe.json").write_text("{}")
    outcome = of_flip_flop().perform(Request(tmp_path, "smoke"))
    said = text_of((tmp_path / "report.html").read_text())
    assert f"Failures flip_flop rope seed 0 {' '.join(outcome.failures['flip_flop rope seed 0'].split())}" in said
    assert "runs 1 of 2 finished" in said
    assert "flip_flop rope seed 0 failed" in said


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid_report, "SECONDS_BETWEEN_REPORTS", 0.01)


def wait_for(words: str, report: Path) -> str:
    deadline = time.monotonic() + 30
    while not (report.exists() and words in (page := report.read_text())):
        assert time.monotonic() < deadline, words
        time.sleep(0.01)
    return page


@pytest.mark.usefixtures("often")
def test_while_a_grid_runs_its_report_shows_what_is_done_and_loads_itself_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "report.html"

    def one_by_one(cells: Sequence[Cell], jobs: int) -> None:
        wait_for("running: 0 of 2 runs have ended", report)
        run_cell(cells[0])
        page = wait_for("running: 1 of 2 runs have ended", report)
        assert '"again":10' in page
        said = text_of(page)
        assert "Past the training length" in said or "exact match" in said
        assert "flip_flop rope seed 0 waiting" in said
        assert "flip_flop tra seed 0 finished" in said
        run_cell(cells[1])

    monkeypatch.setattr("tra.experiments.perform.run_all", one_by_one)
    of_flip_flop().perform(Request(tmp_path, "smoke"))
    assert "running:" not in report.read_text()
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.usefixtures("often")
def test_a_grid_that_is_stopped_leaves_a_report_that_waits_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(cells: Sequence[Cell], jobs: int) -> None:
        run_cell(cells[0])
        raise Interrupted("stopped")

    monkeypatch.setattr("tra.experiments.perform.run_all", stopped)
    with pytest.raises(Interrupted):
        of_flip_flop().perform(Request(tmp_path, "smoke"))
    page = (tmp_path / "report.html").read_text()
    assert "runs 1 of 2 finished" in text_of(page)
    assert '"again":null' in page


@pytest.mark.usefixtures("often", "run_here")
def test_what_goes_wrong_with_the_page_meanwhile_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(grid_report, "say", said.append)

    def broken(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(grid_report, "comparison_tables", broken)
    outcome = of_flip_flop().perform(Request(tmp_path, "smoke"))
    assert len(outcome.cells) == 2
    assert said == [f"{tmp_path / 'report.html'} cannot be written yet: no space"], "once"
    assert "runs 2 of 2 finished" in text_of((tmp_path / "report.html").read_text())

"""`report.html`: what it says of a grid that has ended, and of one that runs."""

import re
import shutil
import time
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import pytest

from tests.experiments.conftest import REPRODUCE
from tests.experiments.small import content_of, of_flip_flop
from tra.errors import Interrupted
from tra.experiments import Outcome, Request, Row, Tuning, grid_report
from tra.experiments.cells import Cell
from tra.experiments.local_jobs import run_cell
from tra.report.conclusions import conclusions
from tra.report.tables import comparison_tables

TUNED = of_flip_flop(
    rows=("tra", Row("rope", changes={"clip": 0.5}, name="<b>rope</b>")),
    tuning=Tuning({"learning_rate": (1e-3, 2e-3, 4e-3)}, rows=("tra",)),
)


COMMAND = "tra reproduce mine.py & more"


def text_of(page: str) -> str:
    """What a reader sees, without the tags."""
    body = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


class Ended(NamedTuple):
    """A grid that was tuned and run, and its report."""

    folder: Path
    outcome: Outcome
    page: str
    said: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run once for all tests, which leave the folder as it is."""
    folder = tmp_path_factory.mktemp("report") / "grid"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(REPRODUCE, "run_all", lambda cells, jobs: [run_cell(cell) for cell in cells])
        outcome = TUNED.perform(Request(folder, "smoke", seeds=2, command=COMMAND))
    page = (folder / "report.html").read_text()
    return Ended(folder, outcome, page, text_of(page))


def test_a_report_says_what_was_run_where_and_what_came_of_it(ended: Ended) -> None:
    assert "runs 4 of 4 finished seeds 0, 1" in ended.said
    assert f"command {COMMAND} 7 runs in" in ended.said, "tuning included"
    environment = content_of(ended.folder)["sessions"][0]["environment"]
    assert f"tra {environment['tra']}, torch {environment['torch']}, Python {environment['python']}" in ended.said
    (sentence,) = conclusions(ended.outcome.records).values()
    assert f"What came out flip_flop {sentence}" in ended.said


def test_a_report_has_every_table_with_what_is_best_in_bold(ended: Ended) -> None:
    tables = comparison_tables(ended.outcome.records)
    for table in tables:
        assert table.title in ended.said
        assert all(" ".join(cell for cell in row if cell) in ended.said for row in table.rows)
    assert ended.page.count("<strong>") == sum(len(table.best) for table in tables) + 1, "and one of tuning"


def test_a_report_links_every_run_and_draws_what_it_logged(ended: Ended) -> None:
    links = [ended.folder / unquote(link) for link in re.findall(r'<a href="([^"]+)">', ended.page)]
    runs, explorers = ([link for link in links if (link.suffix == ".html") == html] for html in (False, True))
    assert len(runs) == ended.page.count("<polyline") == 7
    assert all((run / "recipe.json").exists() for run in runs)
    assert len(explorers) == 2, "one for the first seed of each row"
    assert all("explorer" in page.read_text() for page in explorers)
    assert ended.page.count('<svg role="img"') == 2
    assert 'aria-label="training, flip_flop"' in ended.page


def test_a_report_says_how_settings_were_chosen_and_what_that_took(ended: Ended) -> None:
    said = ended.said
    assert "grid learning_rate = 0.001, 0.002, 0.004 seeds 1000 rows tra budget 3 runs of" in said
    chosen = content_of(ended.folder)["tuning"]["flip_flop tra"]["chosen"]["learning_rate"]
    edge = "" if chosen == 2e-3 else " (at the edge of what was tried: learning_rate)"
    assert f"chosen for flip_flop tra learning_rate = {chosen}{edge}" in said
    assert ("at the edge" in said) == bool(edge)


def test_a_report_takes_names_for_text_fetches_nothing_and_waits_for_nothing(ended: Ended) -> None:
    assert "<b>rope" not in ended.page
    assert not re.search(r"(?:src|href)=.?https?:", ended.page)
    assert "location.reload" in ended.page
    assert '"again":null' in ended.page


def test_a_report_of_what_is_stored_is_the_same(ended: Ended, tmp_path: Path) -> None:
    folder = tmp_path / "grid"
    shutil.copytree(ended.folder, folder)
    TUNED.perform(Request(folder, "smoke", seeds=2, command=COMMAND, train=False))
    assert (folder / "report.html").read_text() == ended.page


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

"""The documentation as a site: it is made without a warning, its links lead somewhere, its pages work in a browser."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from filelock import FileLock

from tests.browser import Tab, opened_browser, skip_without_browser
from tests.pages import DOCS, ROOT
from tra import threshold_relative_attention

pytest.importorskip("myst_nb", reason="needs the extra docs")

NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished site, which all processes of a test run share."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "docs" / "site"
    with FileLock(shared / "docs.lock"):
        if not folder.exists():
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
            surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            made = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
            (shared / "docs.log").write_text(f"{made.returncode}\n{made.stderr}")
    code, _, said = (shared / "docs.log").read_text().partition("\n")
    assert code == "0", said
    return folder


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", DOCS / "check_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_link_of_the_site_leads_somewhere(site: Path, checker: ModuleType) -> None:
    assert list(checker.broken(site)) == []
    assert len(checker.leaving(site)) > 10


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, checker: ModuleType) -> None:
    (tmp_path / "one.html").write_text(
        '<a href="two.html#there">a</a> <a href="two.html#here">b</a> <a href="three.html">c</a> <a href="#x">d</a>'
        '<a href="https://example.org/">e</a> <img src="https://example.org/a.png"> <a href="../one.html">f</a>'
    )
    (tmp_path / "two.html").write_text('<p id="here">')
    assert list(checker.broken(tmp_path)) == [
        "one.html: two.html#there leads to a page without that place",
        "one.html: three.html leads nowhere",
        "one.html: #x leads to a page without that place",
        "one.html: https://example.org/a.png is fetched from elsewhere",
        "one.html: ../one.html leads nowhere",
    ]
    assert checker.leaving(tmp_path) == ["https://example.org/", "https://example.org/a.png"]


def test_the_command_fails_where_a_link_leads_nowhere_and_only_there(tmp_path: Path) -> None:
    command = [sys.executable, str(DOCS / "check_links.py"), str(tmp_path)]
    (tmp_path / "one.html").write_text('<a href="two.html">a</a>')
    missing = subprocess.run(command, capture_output=True, text=True)
    assert (missing.returncode, missing.stderr) == (1, "one.html: two.html leads nowhere\n")
    (tmp_path / "two.html").write_text("")
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_everything_public_is_in_the_reference(site: Path) -> None:
    reference = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    for name in (
        "tra",
        "attention",
        "tasks",
        "text",
        "recipes",
        "runs",
        "experiments",
        "report",
        "bench",
        "hub",
        "distributed",
    ):
        module = importlib.import_module("tra" if name == "tra" else f"tra.{name}")
        for public in module.__all__:
            thing = getattr(module, public)
            if callable(thing):
                assert f'id="{module.__name__}.{public}"' in reference or f'.{thing.__name__}"' in reference, public


def test_the_notebook_is_the_tutorial() -> None:
    """`jupytext --to ipynb docs/tutorial.md --output examples/tutorial.ipynb` makes it."""
    jupytext = pytest.importorskip("jupytext")
    source, notebook = jupytext.read(DOCS / "tutorial.md"), jupytext.read(NOTEBOOK)
    assert [(cell.cell_type, cell.source) for cell in notebook.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ]
    assert all(not cell.get("outputs") for cell in notebook.cells), "what was computed is not stored"


def test_in_the_tutorial_a_model_reads_on_where_another_fails(site: Path) -> None:
    page = (site / "tutorial.html").read_text()
    for kind in ("iid", "sparse", "dense"):
        assert f"tra {kind}: 1.00 at 32 1.00 at 64 1.00 at 128 1.00 at 512 1.00 at 2,048" in page
    rope = re.search(r"rope iid: ([\d.]+) at 32 .*([\d.]{4}) at 2,048", page)
    assert rope is not None
    assert float(rope[1]) >= 0.9  # on one processor a sequence of 32 is read wrong
    assert float(rope[2]) <= 0.1


Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def pages() -> Iterator[Callable[[str], Any]]:
    skip_without_browser()
    with opened_browser() as of:
        yield of


@pytest.fixture
def visit(site: Path, pages: Callable[[str], Any]) -> Iterator[Open]:
    """Open a page of the site from disk; none may complain or ask for anything outside the site."""
    tabs: list[Tab] = []

    def opened(name: str, scheme: str = "light") -> Tab:
        tab = Tab(pages(scheme))
        tabs.append(tab)
        tab.listen()
        tab.page.goto((site / name).as_uri())
        return tab

    yield opened
    for tab in tabs:
        tab.check(site.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_first_page_shows_an_explorer_that_works(scheme: str, visit: Open) -> None:
    tab = visit("index.html", scheme)
    frame = tab.page.frame_locator("iframe.page")
    assert frame.locator("#large h2").all_inner_texts() == ["tra · layer 1, head 1", "rope · layer 1, head 1"]
    frame.locator(".token").nth(8).hover()
    assert frame.locator(".query").first.inner_text().startswith("Query 9 ")


def test_a_chosen_scheme_reaches_the_pages_inside(visit: Open) -> None:
    tab = visit("mechanism.html", "null")  # what the system prefers is not overridden
    ground = "getComputedStyle(document.body).backgroundColor"
    frame = tab.page.frames[1]
    found = []
    for theme in ("light", "dark"):
        tab.page.evaluate("(theme) => { document.body.dataset.theme = theme; }", theme)
        tab.page.wait_for_timeout(100)
        found.append(frame.evaluate(ground))
    assert found == ["rgb(255, 255, 255)", "rgb(19, 20, 22)"]


@pytest.mark.parametrize("name", ["index.html", "tutorial.html", "results.html", "api/tra.html", "commands.html"])
def test_pages_fit_a_narrow_screen(name: str, visit: Open) -> None:
    tab = visit(name)
    tab.page.set_viewport_size({"width": 380, "height": 800})
    narrow = tab.page.evaluate("document.documentElement.scrollWidth")
    tab.page.set_viewport_size({"width": 1280, "height": 1600})
    assert narrow <= 380


FIGURE = "_static/mechanism.html"


@pytest.mark.parametrize("threshold, gate", [(0.0, 0.6), (-1.0, 0.9), (1.5, 0.3), (0.4, 1.0), (2.6, 0.5)])
def test_the_figure_computes_what_the_operator_does(threshold: float, gate: float, visit: Open) -> None:
    tab = visit(FIGURE)
    keys, queries = (
        torch.tensor(tab.page.evaluate(f"figure.{name}"), dtype=torch.float64) for name in ("keys", "queries")
    )
    length = len(keys)
    log_gate = torch.full((1, 1, length), gate, dtype=torch.float64).log()
    identity = torch.eye(length, dtype=torch.float64)[None, None]
    expected = threshold_relative_attention(
        queries[None, None], keys[None, None], identity, log_gate, threshold=threshold, tolerance=0.0
    )[0, 0]
    for query in range(length):
        row = tab.page.evaluate(
            "([query, threshold, gate]) => figure.row(query, threshold, gate)", [query, threshold, gate]
        )
        weights = torch.tensor(row["weights"], dtype=torch.float64)
        torch.testing.assert_close(weights, expected[query, : query + 1], rtol=1e-12, atol=1e-12)
        assert torch.equal(weights == 0, expected[query, : query + 1] == 0)


def test_the_figure_follows_its_sliders_by_keyboard_and_says_so(visit: Open) -> None:
    tab = visit(FIGURE)
    assert "Query 12 keeps 3 of 12 keys" in tab.text("#said")
    assert "key 4 (1), 8 tokens back but at distance 2" in tab.text("#said")
    assert tab.page.locator(".link").count() == 3
    assert tab.page.locator(".token.dropped").count() == 9
    tab.page.locator("#threshold").focus()
    for _ in range(10):
        tab.page.keyboard.press("ArrowLeft")
    assert tab.text("#threshold-shown") == "-1.0"
    assert "keeps 7 of 12 keys" in tab.text("#said")
    tab.page.keyboard.press("End")
    assert tab.text("#said") == "Query 12 keeps no key: its output is exactly 0."
    assert tab.page.locator(".link").count() == 0
    tab.page.locator("#query").focus()
    tab.page.keyboard.press("Home")
    assert tab.text("#query-shown") == "1 (i)"
    tab.page.locator(".token").nth(4).click()
    assert tab.text("#query-shown") == "5 (i)"
    tab.page.locator("summary").click()
    cells = tab.page.locator("#rows tr").first.locator("td").all_inner_texts()
    row = tab.page.evaluate("figure.row(4, 2.6, 0.6)")
    assert cells[:3] == ["5 i", f"{row['scores'][4]:.3f}", "no"]
    assert cells[-1] == "exactly 0"

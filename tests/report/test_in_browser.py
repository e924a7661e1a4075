"""Pages as a browser shows them: numbers, hovering, sorting, links, and that nothing comes in or goes out."""

import html
import json
import re
import xml.etree.ElementTree
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import pytest
import torch
from torch import Tensor

from tests import browser
from tests.browser import opened_browser, skip_without_browser
from tra.attention import MECHANISMS, Context
from tra.attention.context import Terms
from tra.model import Decoder, DecoderConfig
from tra.ops.threshold_relative.reference import attention_terms
from tra.report import Explorer, Table, explore, packing, report_page
from tra.report.inspection import inspect_heads
from tra.report.report_page import Report, RunLine, report_html
from tra.report.tables import TEST_SEQUENCES

skip_without_browser()

LENGTH = 23
LAYERS, HEADS = 2, 4


class Tab(browser.Tab):
    """One that shows an explorer."""

    def rows(self, model: int = 0) -> list[list[list[dict[str, Any]]]]:
        """Of each layer and head, what the page says of every query."""
        return self.page.evaluate(
            """([model, layers, heads, length]) => [...Array(layers).keys()].map((at) =>
                [...Array(heads).keys()].map((head) => [...Array(length).keys()].map((query) => {
                  const row = explorer.row(model, at, head, query);
                  return Object.fromEntries(Object.entries(row).map(([name, x]) => [name, x && Array.from(x)]));
                })))""",
            [model, LAYERS, HEADS, LENGTH],
        )

    def weights(self, model: int = 0) -> Tensor:
        """``[layers, heads, L, L]``."""
        found = torch.zeros(LAYERS, HEADS, LENGTH, LENGTH)
        for at, layer in enumerate(self.rows(model)):
            for head, rows in enumerate(layer):
                for query, row in enumerate(rows):
                    found[at, head, query, : query + 1] = torch.tensor(row["weights"])
        return found


@pytest.fixture(scope="module")
def pages() -> Iterator[Callable[[str], Any]]:
    with opened_browser() as of:
        yield of


Show = Callable[..., Tab]


@pytest.fixture
def show(pages: Callable[[str], Any], tmp_path: Path) -> Iterator[Show]:
    """Open a page from disk. When the test ends, none may have complained, or asked for anything but its own file."""
    tabs: list[Tab] = []

    def opened(content: Explorer | str, link: str = "", scheme: str = "light") -> Tab:
        path = tmp_path / f"page-{len(tabs)}.html"
        path.write_text(content if isinstance(content, str) else content.html, encoding="utf-8")
        tab = Tab(pages(scheme))
        tabs.append(tab)
        tab.listen()
        tab.page.mouse.move(0, 0)
        tab.page.goto(path.as_uri() + link)
        return tab

    yield opened
    for tab in tabs:
        tab.check(tmp_path.as_uri())


def model_of(attention: str = "tra", **options: Any) -> Decoder:
    """Weights far from their start, so that every part of a rule shows."""
    torch.manual_seed(7)
    config = DecoderConfig(11, LAYERS, HEADS, 32, kv_heads=2, attention=attention, dropout=0.0, **options)
    model = Decoder(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def tokens_of(length: int = LENGTH) -> tuple[Tensor, list[str]]:
    tokens = torch.randint(11, (length,), generator=torch.Generator().manual_seed(3))
    return tokens, [f"t{token}" for token in tokens.tolist()]


def explored(*attentions: str, symbols: Sequence[str] | None = None) -> Explorer:
    tokens, usual = tokens_of()
    return explore({name: model_of(name) for name in attentions}, tokens, symbols or usual)


def data_of(page: Explorer) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize(
    "attention, options", [*((name, {}) for name in MECHANISMS), ("tra-learned", {"threshold": "query"})]
)
def test_every_weight_on_the_page_is_that_of_the_library(
    attention: str, options: dict[str, Any], show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a long text: weights are computed by the page where it can."""
    monkeypatch.setattr(packing, "MOST_WEIGHTS", 0)
    model, (tokens, symbols) = model_of(attention, attention_options=options), tokens_of()
    page = explore({attention: model}, tokens, symbols)
    shown = show(page).weights()
    _, weights = inspect_heads(model, tokens)
    library = torch.stack(weights)
    assert torch.equal(shown == 0, library == 0)
    assert float((shown - library).abs().max()) < 1e-6
    otherwise = ("cope", "stick-breaking", "differential", "selective", "path", "asentmax", "tra-ordinary-distance")
    by_rule = attention not in otherwise
    assert all((layer["weights"] is None) == by_rule for layer in data_of(page)["models"][0]["layers"])


@pytest.mark.parametrize("stored", [True, False])
def test_scores_keys_kept_distances_and_gates_are_those_of_the_library(
    stored: bool, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MOST_WEIGHTS", 1 << 20 if stored else 0)
    model, (tokens, symbols) = model_of(), tokens_of()
    rows = show(explore({"tra": model}, tokens, symbols)).rows()
    streams: list[Tensor] = []
    with torch.inference_mode():
        model.hidden_from(model.embedded(tokens[None]), streams=streams)
        for at, (block, stream) in enumerate(zip(model.blocks, streams, strict=True)):
            terms: list[Terms] = []
            block.attention.weights(block.attention_norm(stream), Context(terms=terms))
            query, key, scale, _, threshold, log_gate = terms[0]
            visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
            key = key.repeat_interleave(2, dim=1)
            score, kept, before, _ = attention_terms(query, key, log_gate, visible, scale, threshold)
            for head in range(HEADS):
                for i, row in enumerate(rows[at][head]):
                    assert row["scores"] == pytest.approx(score[0, head, i, : i + 1].tolist(), abs=1e-5)
                    assert row["kept"] == kept[0, head, i, : i + 1].int().tolist()
                    counted = (before[0, head, i, : i + 1] + 1).tolist()
                    assert [c for c, k in zip(row["distance"], row["kept"], strict=True) if k] == [
                        c for c, k in zip(counted, row["kept"], strict=True) if k
                    ]


def centre(tab: Tab, query: int, key: int, model: int = 0) -> tuple[float, float]:
    """Where the middle of a cell of the large map is on the screen."""
    tab.page.locator(".large-map").nth(model).scroll_into_view_if_needed()
    box = tab.page.locator(".large-map").nth(model).bounding_box()
    left, top, cell = tab.page.evaluate("(m) => explorer.place(m)", model)
    return box["x"] + left + (key + 0.5) * cell, box["y"] + top + (query + 0.5) * cell


def colours(tab: Tab) -> list[list[list[int]]]:
    """Of every query and key, the colour in the middle of its cell."""
    return tab.page.evaluate(
        """(length) => {
          const [left, top, cell] = explorer.place(0);
          const canvas = document.querySelector(".large-map canvas");
          const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const middle = (start, at) => Math.floor(start + (at + 0.5) * cell);
          const all = [...Array(length).keys()];
          return all.map((query) => all.map((key) => {
            const place = 4 * (middle(top, query) * width + middle(left, key));
            return Array.from(data.slice(place, place + 4));
          }));
        }""",
        LENGTH,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_only_null_has_the_pages_own_colour_and_strong_stands_out(scheme: str, show: Show) -> None:
    """White and dark on a light page; on a dark one the panel's dark and bright."""
    none = [255] * 4 if scheme == "light" else [0x1A, 0x1F, 0x29, 255]
    tab = show(explored("tra"), scheme=scheme)
    weights = tab.weights()[0, 0]
    seen: list[tuple[float, int]] = []
    for query, row in enumerate(colours(tab)):
        for key, colour in enumerate(row):
            null = key <= query and float(weights[query, key]) == 0
            assert (colour == none) == null, "neither a tiny weight nor a key that cannot be seen looks like it"
            if key <= query and not null:
                seen.append((float(weights[query, key]), sum(colour[:3])))
    assert len(seen) > 20
    brightness = [colour for _, colour in sorted(seen)]
    assert brightness == sorted(brightness, reverse=scheme == "light")
    panel = tab.page.locator(".panel").first.evaluate("x => getComputedStyle(x).backgroundColor")
    assert scheme == "light" or panel == "rgb(26, 31, 41)"


def test_hovering_a_query_shows_its_row_and_a_key_all_that_is_known_of_it(show: Show) -> None:
    tab = show(explored("tra"))
    row = tab.rows()[0][0][17]
    key = max(range(18), key=lambda at: row["weights"][at])
    tab.page.mouse.move(*centre(tab, 17, key))
    assert tab.text(".query").startswith("Query 18 ")
    number = sum(weight != 0 for weight in row["weights"])
    assert f"keeps {number} of 18 keys" in tab.text(".query")
    tip = tab.text("#tip")
    assert f"score {row['scores'][key]:.3f}" in tip
    assert f"contextual distance {row['distance'][key]}" in tip
    assert f"{17 - key} token" in tip
    assert f"weight {row['weights'][key]:.4f}" in tip
    assert "\nkept\n" in tip
    assert "gate 0." in tip
    tab.page.mouse.move(*centre(tab, 17, row["kept"].index(0)))
    assert "not kept" in tab.text("#tip")
    assert "weight exactly 0" in tab.text("#tip")
    links = tab.page.locator(".links path")
    linked = {int(links.nth(at).get_attribute("data-key") or -1) for at in range(links.count())}
    assert linked == {at for at in range(17) if row["weights"][at] != 0}
    white = tab.page.locator(".token.null")
    assert white.count() == 18 - number
    assert {white.nth(at).evaluate("x => getComputedStyle(x).backgroundColor") for at in range(white.count())} == {
        "rgb(255, 255, 255)"
    }
    tab.page.locator(".token").nth(9).hover()
    assert tab.text(".query").startswith("Query 10 ")


def test_a_query_that_is_pinned_stays_until_it_is_released(show: Show) -> None:
    tab = show(explored("tra"))
    tab.page.locator(".token").nth(12).click()
    tab.page.locator(".token").nth(5).hover()
    assert tab.text(".query").startswith("Query 13 ")
    tab.page.keyboard.press("Escape")
    tab.page.locator(".token").nth(6).hover()
    assert tab.text(".query").startswith("Query 7 ")


def test_a_key_table_sorts_and_has_only_what_the_mechanism_has(show: Show) -> None:
    tab = show(explored("tra"))
    row = tab.rows()[0][0][LENGTH - 1]
    keys = "[...document.querySelectorAll('.keys tbody tr')].map((row) => Number(row.dataset.key))"
    by_weight = tab.page.evaluate(keys)
    assert [row["weights"][key] for key in by_weight] == sorted(row["weights"], reverse=True)
    tab.page.locator(".keys th button[data-sort=score]").click()
    by_score = tab.page.evaluate(keys)
    assert [row["scores"][key] for key in by_score] == sorted(row["scores"], reverse=True)
    everything = ["key", "weight", "score", "kept", "distance", "tokens back", "gate"]
    assert tab.page.locator(".keys th").all_inner_texts() == everything
    for attention, lacking in (
        ("rope", {"kept", "distance", "gate"}),
        ("differential", {"score", "kept", "distance", "gate"}),
    ):
        found = show(explored(attention)).page.locator(".keys th").all_inner_texts()
        assert found == [name for name in everything if name not in lacking]


def test_heads_sort_by_their_summaries_both_ways(show: Show) -> None:
    page = explored("tra")
    tab = show(page)
    order = "[...document.querySelectorAll('#small-0 button b')].map((one) => one.textContent)"
    assert tab.page.evaluate(order) == [f"{at}·{head}" for at in (1, 2) for head in (1, 2, 3, 4)]
    heads = {f"{head.layer}·{head.head}": head for head in page.heads["tra"]}
    for name in ("kept", "reach", "mean_distance"):
        tab.page.select_option("#sort", name)
        values = [getattr(heads[one], name) for one in tab.page.evaluate(order)]
        assert values == sorted(values, reverse=True)
    tab.page.locator("#summaries button[data-sort=gate]").click()
    gates = [heads[one].gate[1] for one in tab.page.evaluate(order)]
    assert gates == sorted(gates, reverse=True)
    tab.page.locator("#summaries button[data-sort=gate]").click()
    gates = [heads[one].gate[1] for one in tab.page.evaluate(order)]
    assert gates == sorted(gates)
    listed = tab.page.locator("#summaries tbody tr td:first-child").all_inner_texts()
    assert listed == tab.page.evaluate(order)
    assert tab.page.locator("#summaries th[aria-sort=ascending]").count() == 1


def test_two_models_stand_beside_each_other_on_one_query(show: Show) -> None:
    tab = show(explored("tra", "fot"))
    assert tab.page.locator("#large article").count() == 2
    tab.page.locator("#small-1 button").nth(6).click()
    titles = tab.page.locator("#large h2").all_inner_texts()
    assert titles == ["tra · layer 1, head 1", "fot · layer 2, head 3"]
    tab.page.mouse.move(*centre(tab, 14, 3, model=1))
    said = tab.page.locator(".query").all_inner_texts()
    assert [text.startswith("Query 15 ") for text in said] == [True, True]
    assert "keeps" in said[0]
    assert "sees 15 keys" in said[1]
    library = torch.stack(inspect_heads(model_of("fot"), tokens_of()[0])[1])
    assert float((tab.weights(1) - library).abs().max()) < 1e-6
    boxes = [tab.page.locator("#large article").nth(at).bounding_box() for at in range(2)]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


def test_a_link_leads_to_the_same_view_and_one_of_another_page_does_no_harm(show: Show) -> None:
    page = explored("tra", "rope")
    tab = show(page)
    tab.page.select_option("#sort", "reach")
    tab.page.locator("#small-0 button").nth(5).click()
    tab.page.mouse.click(*centre(tab, 11, 4))
    tab.page.mouse.move(0, 0)
    link = tab.page.evaluate("location.hash")
    parts = ("#large h2", ".query", "#small-0", ".keys")
    seen = [tab.page.locator(part).all_inner_texts() for part in parts]
    assert any("Query 12 " in text for text in seen[1])
    again = show(page, link)
    assert [again.page.locator(part).all_inner_texts() for part in parts] == seen
    odd = show(page, "#heads=99.1,__proto__&query=1e9&key=-4&sort=constructor&from=NaN")
    assert odd.text("#large h2") == "tra · layer 1, head 1"
    assert odd.text(".query").startswith(f"Query {LENGTH} ")


def test_keys_of_the_keyboard_choose_query_and_key_and_are_answered_aloud(show: Show) -> None:
    tab = show(explored("tra"))
    tab.page.get_by_role("application").focus()
    tab.page.keyboard.press("Home")
    for _ in range(5):
        tab.page.keyboard.press("ArrowDown")
    tab.page.keyboard.press("ArrowLeft")
    tab.page.locator("#said", has_text="query 6, ").wait_for(state="attached")
    said = tab.page.get_by_role("status").text_content()
    assert "of 6 keys" in said
    assert re.search(r"Key .*: score .*, (not )?kept, .* 0 tokens back, gate 0\.\d+, weight ", said)
    tab.page.locator(".token[tabindex='0']").focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("document.activeElement.dataset.at") == "6"
    assert tab.page.locator(".text").get_by_role("option", selected=True).count() == 1
    nameless = "[...document.querySelectorAll('button')].filter((x) => !(x.ariaLabel || x.textContent.trim())).length"
    assert tab.page.evaluate(nameless) == 0


HOSTILE = [
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "\"'`>",
    "&lt;b&gt;",
    "<!--",
    "]]>",
    "\u202eright to left\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "\U0001f469\u200d\U0001f52c",
    "\u2028",
    "\x00",
    "\n",
    "\ud800",
    "__proto__",
    "javascript:alert(1)",
    " ",
    "",
    "url(https://example.org/)",
]


def test_hostile_tokens_are_text_and_nothing_else(show: Show, tmp_path: Path) -> None:
    symbols = (HOSTILE * 2)[:LENGTH]
    page = explored("tra", symbols=symbols)
    tab = show(page)
    for query in range(LENGTH):
        tab.page.locator(".token").nth(query).hover()
        tab.page.mouse.move(*centre(tab, query, query // 2))
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Save SVG").click()
    xml.etree.ElementTree.parse(download.value.path())
    assert tab.page.evaluate("window.broken") is None
    assert tab.page.evaluate("explorer.tokens.length") == LENGTH
    assert tab.page.evaluate("document.querySelectorAll('img, iframe, object, a').length") == 0
    assert tab.page.evaluate("document.querySelectorAll('script').length") == 3
    shown = tab.page.locator(".token").all_text_contents()
    assert shown[:2] == HOSTILE[:2]
    assert shown[6] == "\u2039202e\u203aright to left\u2039202c\u203a"
    assert (shown[7], shown[11]) == (HOSTILE[7], "↵")


def test_nothing_can_be_fetched_even_if_a_script_tried(show: Show) -> None:
    tab = show(explored("rope"))
    tried = "fetch('https://example.org/').then(() => 'came', () => 'refused')"
    assert tab.page.evaluate(tried) == "refused"
    assert any("Content Security Policy" in complaint for complaint in tab.complaints)
    tab.complaints.clear()


def test_the_map_is_saved_as_vectors_and_as_a_picture(show: Show) -> None:
    tab = show(explored("tra", "fot"))
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Save SVG").click()
    root = xml.etree.ElementTree.parse(download.value.path()).getroot()
    cells = [one for one in root.iter() if one.get("shape-rendering") == "crispEdges"]
    drawn = [len(list(group)) for group in cells]
    assert drawn == [int((tab.weights(model)[0, 0] != 0).sum()) for model in (0, 1)]
    assert sum(text.text == "exactly 0" for text in root.iter("{http://www.w3.org/2000/svg}text")) == 2
    with tab.page.expect_download() as download:
        tab.page.get_by_role("button", name="Save PNG").click()
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")


def test_a_long_text_is_a_small_page_with_a_slider(show: Show) -> None:
    tokens, symbols = tokens_of(600)
    model = model_of()
    page = explore({"tra": model}, tokens, symbols)
    assert len(page.html) < 600 * 1000, "1 kB for each token: 2 layers of 32 + 16 numbers of 4 bytes, in base64"
    tab = show(page)
    tab.page.locator("#first-query").fill("300")
    assert tab.text("#first-query-shown") == tab.text("#first-key-shown") == "301"
    tab.page.mouse.move(*centre(tab, 30, 12))
    assert tab.text(".query").startswith("Query 331 ")
    row = tab.page.evaluate("Array.from(explorer.row(0, 1, 2, 500).weights)")
    library = inspect_heads(model, tokens)[1][1][2, 500, :501]
    assert torch.equal(torch.tensor(row) == 0, library == 0)
    assert row == pytest.approx(library.tolist(), abs=1e-5)
    tab.page.locator("#first-key").fill("20")
    assert not tab.page.locator("#follow").is_checked()
    assert tab.text("#first-query-shown") == "301"


def test_in_a_notebook_it_is_a_frame_that_works(show: Show) -> None:
    frame = explored("tra")._repr_html_()
    assert html.unescape(frame).count("<!DOCTYPE html>") == 1
    tab = show(f"<!DOCTYPE html><meta charset='utf-8'><title>notebook</title>{frame}")
    inner = tab.page.frame_locator("iframe")
    inner.locator(".token").nth(8).hover()
    assert inner.locator(".query").inner_text().startswith("Query 9 ")


LOGGED = [{"step": 1, "loss": 2.0}, {"step": 600, "loss": 0.01}]
REPORT = Report(
    title="<i>grid</i>",
    facts={"command": "tra reproduce </script><script>window.broken = 1</script>"},
    tables=[
        Table(
            ["attention", "past the training length"],
            [
                ["tra", "0.95 ± 0.10 [0.40, 1.00]"],
                ["rope", "0.10"],
                ["nope", ""],
                ["alibi", "0.2"],
                [TEST_SEQUENCES, "64"],
            ],
            best=frozenset({(0, 1)}),
        )
    ],
    figures={"accuracy": '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20"><path d="M0 0h9"/></svg>'},
    runs=[
        RunLine("tra seed 0", "runs/tra/0", "finished", 600, LOGGED, "iid: 1 at 64"),
        RunLine("rope seed 0", "runs/a b/0", "running", 600, [{"step": 90, "loss": 2.0}]),
    ],
)


def test_a_table_of_a_report_sorts_by_its_numbers_and_keeps_what_it_rests_on_last(show: Show) -> None:
    tab = show(report_html(REPORT))
    assert tab.text("h1") == "<i>grid</i>"
    assert tab.page.evaluate("window.broken") is None
    names = "[...document.querySelectorAll('table')[0].rows].map((row) => row.cells[0].textContent)"
    tab.page.get_by_role("button", name="past the training length").click()
    assert tab.page.evaluate(names) == ["attention", "tra", "alibi", "rope", "nope", TEST_SEQUENCES]
    tab.page.get_by_role("button", name="past the training length").click()
    assert tab.page.evaluate(names) == ["attention", "rope", "alibi", "tra", "nope", TEST_SEQUENCES]
    assert tab.page.locator("strong").all_inner_texts() == ["0.95 ± 0.10 [0.40, 1.00]"]
    assert tab.page.get_by_role("link", name="rope seed 0").get_attribute("href") == "runs/a%20b/0/"
    assert tab.page.locator(".curve polyline").count() == 1
    box = tab.page.locator("figure svg").bounding_box()
    assert box["width"] > 500, "figures are large"
    tab.page.reload()
    assert tab.page.evaluate(names) == ["attention", "rope", "alibi", "tra", "nope", TEST_SEQUENCES], "as it was left"


def test_a_report_of_a_grid_that_runs_loads_itself_again(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "SECONDS_BETWEEN_LOADS", 0.2)
    tab = show(report_html(replace(REPORT, progress="running: 1 of 2")))
    assert tab.text("[role=status]") == "running: 1 of 2"
    later = report_html(replace(REPORT, title="later"))
    path = Path(unquote(urlparse(tab.page.url).path))
    path.write_text(later)
    tab.page.locator("h1", has_text="later").wait_for()

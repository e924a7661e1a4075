"""How smooth the explorer is with a long text: times between frames while its sliders are dragged and queries hovered.

    python benchmarks/explorer_smoothness.py --tokens 3000

A model with random weights reads random tokens; the page does the same work for any. In headless Chromium without a
GPU, which draws on the processor. A screen that shows 60 frames a second has 16.7 ms for each.
"""

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

from tra import Decoder, DecoderConfig
from tra.report import explore

RECORD = """() => {
  window.frames_seen = [];
  let before = performance.now();
  const frame = (now) => {
    window.frames_seen.push(now - before);
    before = now;
    window.frame = requestAnimationFrame(frame);
  };
  window.frame = requestAnimationFrame(frame);
}"""
STOP = "() => { cancelAnimationFrame(window.frame); return window.frames_seen.slice(2); }"
STEPS = 120


def write_page(folder: Path, tokens: int) -> Path:
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(vocabulary=300, layers=3, heads=4, width=96, dropout=0.0)).eval()
    text = torch.randint(300, (tokens,))
    return explore({"tra": model}, text, [f"t{token}" for token in text.tolist()]).save(folder / "explorer.html")


def measured(page: Any, what: str, act: Any) -> str:
    page.evaluate(RECORD)
    act()
    times = sorted(page.evaluate(STOP))
    most = times[int(0.95 * len(times))]
    return f"| {what} | {len(times)} | {statistics.median(times):.0f} | {most:.0f} | {times[-1]:.0f} |"


def drag(page: Any, slider: str) -> None:
    """From one end to the other with the mouse."""
    box = page.locator(slider).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 8, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 8, y, steps=STEPS)
    page.mouse.up()


def hover(page: Any, element: str) -> None:
    """From the upper left to the lower right."""
    page.locator(element).first.scroll_into_view_if_needed()
    box = page.locator(element).first.bounding_box()
    page.mouse.move(box["x"] + 4, box["y"] + 4)
    page.mouse.move(box["x"] + box["width"] - 4, box["y"] + box["height"] - 4, steps=STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3000)
    tokens = parser.parse_args().tokens
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = write_page(Path(folder), tokens)
        flags = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 1600})
        page.goto(path.as_uri())
        page.locator(".large-map canvas").first.wait_for()
        print(f"{tokens:,} tokens, {path.stat().st_size / 1e6:.1f} MB, Chromium {browser.version}")
        page.wait_for_timeout(3000)  # until all heads are drawn
        print("| | frames | median, ms | 95% within, ms | longest, ms |\n|---|---:|---:|---:|---:|")
        print(measured(page, "nothing", lambda: page.wait_for_timeout(1000)))
        print(measured(page, "dragging the slider of queries", lambda: drag(page, "#first-query")))
        print(measured(page, "dragging the slider of keys", lambda: drag(page, "#first-key")))
        print(measured(page, "hovering over the large map", lambda: hover(page, ".large-map")))
        print(measured(page, "hovering over the text", lambda: hover(page, ".text")))
        browser.close()


if __name__ == "__main__":
    main()

"""Headless Chromium, as Debian packages it, and what pages complain of or ask for in it."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")


def skip_without_browser() -> None:
    """For the top of a module of tests, or a fixture."""
    if CHROMIUM is None:
        pytest.skip("needs the chromium of Debian's packages", allow_module_level=True)
    pytest.importorskip("playwright.sync_api", reason="needs playwright")


@contextmanager
def opened_browser() -> Iterator[Callable[[str], Any]]:
    """A page of one browser for each colour scheme, or for "null", the system's own."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])

        def of(scheme: str) -> Any:
            if scheme not in found:
                size = {"width": 1280, "height": 1600}
                found[scheme] = browser.new_context(color_scheme=scheme, viewport=size).new_page()
            return found[scheme]

        yield of
        browser.close()


@dataclass
class Tab:
    """A page of the browser, and what it complained of or asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    listening: list[tuple[str, Any]] = field(default_factory=list)

    def listen(self) -> None:
        for event, heard in (
            ("console", lambda message: self.complaints.append(message.text)),
            ("pageerror", lambda error: self.complaints.append(str(error))),
            ("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss())),
            ("request", lambda request: self.requests.append(request.url)),
        ):
            self.page.on(event, heard)
            self.listening.append((event, heard))

    def check(self, own: str) -> None:
        """Nothing was complained of, and nothing asked for but what lies below that address. Listens no longer."""
        for event, heard in self.listening:
            self.page.remove_listener(event, heard)
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith((own, "blob:", "about:"))] == []

    def text(self, selector: str) -> str:
        return self.page.locator(selector).first.inner_text()

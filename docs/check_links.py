"""Follow every link of the finished site: `python docs/check_links.py SITE`.

Whatever a page needs, and every link to a page or to a place in one, must be there, and a page may fetch nothing from
elsewhere. Links that leave the site are listed and not followed; where there is a network, Sphinx does that:
`python -m sphinx -b linkcheck docs FOLDER`.
"""

import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlparse

FETCHED = {
    ("img", "src"),
    ("script", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("object", "data"),
    ("link", "href"),
}


class Link(NamedTuple):
    page: Path
    address: str
    is_fetched: bool
    """By the browser itself, when the page is opened."""


class Reader(HTMLParser):
    """The links and the places of one page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.page = page
        self.links: list[Link] = []
        self.places: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name == "id" or (tag, name) == ("a", "name"):
                self.places.add(value or "")
            elif value is not None and ((tag, name) in FETCHED or (tag, name) == ("a", "href")):
                self.links.append(Link(self.page, value, (tag, name) in FETCHED))


@cache
def read(page: Path) -> Reader:
    return Reader(page)


def broken(site: Path) -> Iterator[str]:
    """What is wrong, a line for each."""
    for link in _links(site):
        parts = urlparse(link.address)
        if parts.scheme == "data":
            continue
        where = f"{link.page.relative_to(site)}: {link.address}"
        if parts.scheme or parts.netloc:
            if link.is_fetched:
                yield f"{where} is fetched from elsewhere"
            continue
        target = (link.page.parent / unquote(parts.path)).resolve() if parts.path else link.page
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(site) or not target.exists():
            yield f"{where} leads nowhere"
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read(target).places:
            yield f"{where} leads to a page without that place"


def leaving(site: Path) -> list[str]:
    """Addresses outside the site."""
    return sorted({link.address for link in _links(site) if urlparse(link.address).scheme in ("http", "https")})


def _links(site: Path) -> Iterator[Link]:
    for page in sorted(site.rglob("*.html")):
        yield from read(page).links


if __name__ == "__main__":
    site = Path(sys.argv[1]).resolve()
    outside, problems = leaving(site), list(broken(site))
    print(*outside, sep="\n")
    pages = len(list(site.rglob("*.html")))
    print(f"{pages} pages, {len(outside)} addresses outside (listed above, not followed), {len(problems)} broken links")
    sys.exit("\n".join(problems) or 0)

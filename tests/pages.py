"""The pages of the documentation, and the code in them."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


class Fence(NamedTuple):
    """A block of code. What stands behind its language says what is done with it, see `test_documentation.py`."""

    language: str
    rest: str
    code: str


def fences(page: Path) -> list[Fence]:
    found = re.findall(r"^```(\w+)[ ]?(.*?)\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [Fence(*parts) for parts in found]


def blocks(page: Path, language: str) -> list[str]:
    """The code in one language that stands for itself."""
    return [fence.code for fence in fences(page) if fence.language == language and not fence.rest]

"""Pages that are one file each: styles, scripts and data inside, and a policy under which nothing can be fetched.

The parts lie in `assets` as they are read and edited, and are joined when a page is written.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parent / "assets"


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def page(
    title: str,
    body: str,
    *,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: Any = None,
    arrays: bytes = b"",
    inline_styles: bool = False,
) -> str:
    """A whole page.

    Args:
        title: as text.
        body: as HTML.
        styles: files of `assets`.
        scripts: files of `assets`; they share one scope, in this order.
        data: what a script finds as JSON in the element ``data``.
        arrays: what it finds as base64 in the element ``arrays``.
        inline_styles: whether elements of the body have styles of their own, as matplotlib's figures do.
    """
    style = "\n".join(map(asset, styles))
    script = '"use strict";\n(() => {\n' + "\n".join(map(asset, scripts)) + "\n})();"
    allowed = "'unsafe-inline'" if inline_styles else _hash(style)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {allowed}; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    held = ""
    if data is not None:
        held += f'<script type="application/json" id="data">{inert_json(data)}</script>\n'
    if arrays:
        held += f'<script type="text/plain" id="arrays">{base64.b64encode(arrays).decode()}</script>\n'
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"{body}\n{held}<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    """How a policy names an element by its content."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def inert_json(data: Any) -> str:
    """JSON in which nothing ends the element around it, whatever the text says.

    Example:
        >>> inert_json(["</script>"])
        '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

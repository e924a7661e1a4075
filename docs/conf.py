"""How Sphinx makes the site of these pages; `make docs` calls it."""

import contextlib
import html
import importlib
import io
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from tra.cli import COMMANDS
from tra.version import __version__

HERE = Path(__file__).parent
os.environ |= {"COLUMNS": "88", "NO_COLOR": "1"}  # as wide as a page is, for what commands say

project = "tra"
author = "The tra developers"
copyright = "the tra developers, MIT licence"
version = release = __version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]

# A heading can be linked to, as on a forge: other pages and the README count on that.
myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

# The tutorial is run whenever the site is made: what it shows depends on all of the package.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_execution_in_temp = True
nb_merge_streams = True
nb_output_stderr = "remove"  # that a progress bar would look better in a browser, say

autodoc_member_order = "bysource"
autodoc_typehints = "description"  # beside what each argument is; a signature stays readable
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # those of PyTorch and transformers are theirs
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"  # the usual one underlines every class
html_title = f"tra {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}
# Prompts and output of a console are not copied.
copybutton_exclude = ".linenos, .gp, .go"

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")


def fit_to_the_site(app: Sphinx, page: str, source: list[str]) -> None:
    """Sources and folders lie beside these pages in the project, but not on the site: there they are named, not linked.

    Tables of results are pages that only others lead to.
    """

    def fitting(link: re.Match[str]) -> str:
        text, target = link[1], ((HERE / page).parent / link[2]).resolve()
        if target.is_relative_to(HERE) and not target.is_dir():
            return link[0]
        return text if target.name in text else f"{text} (`{target.relative_to(HERE.parent)}`)"

    source[0] = LINK.sub(fitting, source[0])
    if page.startswith("results/") and page.count("/") > 1:
        source[0] = f"---\norphan: true\n---\n\n# {Path(page).parent.name}\n\n{source[0]}"


ABOUT_FIELDS: dict[str, list[str]] = {}


def put_aside(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """What is said of a field is a sentence, colons included; napoleon would take what stands before one for a type."""
    if what in ("attribute", "data", "property"):
        ABOUT_FIELDS[name] = list(lines)


def put_back(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = ABOUT_FIELDS.pop(name, lines)


class Help(SphinxDirective):
    """What every command says with `--help`."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        for command in COMMANDS:
            section = nodes.section(ids=[command], names=[command])
            section += nodes.title(text=f"tra {command}")
            section += nodes.literal_block(text=help_of(command), language="text")
            self.state.document.note_implicit_target(section)
            sections.append(section)
        return sections


def help_of(command: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(f"tra.cli.{command}").run(["--help"])
    return printed.getvalue().strip()


def save_the_tutorials_explorer(app: Sphinx, error: Exception | None) -> None:
    """The page that a cell of the tutorial showed is the one on the first page, too."""
    if error is None and app.builder.name == "html":
        tutorial = (Path(app.outdir) / "tutorial.html").read_text(encoding="utf-8")
        page = re.search(r'<iframe srcdoc="([^"]*)"', tutorial)
        assert page is not None, "the tutorial must show an explorer"
        (Path(app.outdir) / "attention.html").write_text(html.unescape(page[1]), encoding="utf-8")


def setup(app: Sphinx) -> None:
    app.connect("source-read", fit_to_the_site)
    app.add_directive("help", Help)
    app.connect("autodoc-process-docstring", put_aside, priority=400)
    app.connect("autodoc-process-docstring", put_back, priority=600)  # napoleon's is 500
    app.connect("build-finished", save_the_tutorials_explorer)

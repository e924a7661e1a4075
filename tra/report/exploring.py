"""The explorer: a model's attention on one sequence as a page to look around in, opened in a browser or a notebook."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tra.files import write_text
from tra.model import Block, Decoder
from tra.report.colours import DARK_NULL, DARK_STEPS, NULL, SMALLEST_SHOWN, STEPS
from tra.report.inspection import Head, read_layers
from tra.report.packing import Arrays, check_length, pack_layer
from tra.report.pages import asset, page
from tra.runs import Run, load_run
from tra.tasks import ReadsText
from tra.version import __version__

STYLES = ("base.css", "explorer.css")
SCRIPTS = ("dom.js", "rows.js", "maps.js", "explorer.js")
MOST_MODELS = 2
LONGEST_EXAMPLE = 1 << 20
"""Far beyond what a page can hold; more might not fit into memory."""


@dataclass(frozen=True)
class Explorer:
    """A page. In a notebook it is shown as the value of a cell."""

    html: str
    heads: Mapping[str, Sequence[Head]]
    """Of each model, every head's summary."""

    def save(self, path: Path | str) -> Path:
        """Write the page, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, self.html)
        return path

    def _repr_html_(self) -> str:
        """A frame of its own, so that the page and the notebook leave each other alone."""
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" '
            'style="width: 100%; height: 52rem; border: 1px solid #8884; border-radius: 8px"></iframe>'
        )


def explorer(*runs: Run | Path | str, text: str | None = None, length: int = 32) -> Explorer:
    """The attention of a run, or of two beside each other, on one sequence.

    Args:
        runs: one or two runs, or their folders.
        text: what runs on text are to read; without it, and for other runs, it is a sequence of their task.
        length: of a task's sequence, in its unit.

    Example::

        page = tra.report.explorer("runs/demo/runs/flip_flop/tra/0", "runs/demo/runs/flip_flop/rope/0")
        page.save("explorer.html")
    """
    found = [run if isinstance(run, Run) else load_run(run) for run in runs]
    if not 1 <= len(found) <= MOST_MODELS:
        raise ValueError(f"runs must be one or two, got {len(found)}")
    readings = [read_with(run, text, length) for run in found]
    if any(not torch.equal(readings[0][0], tokens) for tokens, _ in readings[1:]):
        raise ValueError(f"runs must read the same tokens to be compared: {found[0]} and {found[1]} do not")
    labels = [run.recipe.model.label for run in found]
    if len(set(labels)) < len(labels):  # two seeds, say
        labels = [f"{label} ({run.folder.name})" for label, run in zip(labels, found, strict=True)]
    if len(set(labels)) < len(labels):
        labels = [f"{label} {number}" for number, label in enumerate(labels, 1)]
    return explore(dict(zip(labels, (run.model for run in found), strict=True)), *readings[0])


def read_with(run: Run, text: str | None, length: int) -> tuple[Tensor, list[str]]:
    """A sequence ``[L]`` for a run, and each of its tokens written out: a text, or an example of its task."""
    task = run.task
    if text is None:
        if not 1 <= length <= LONGEST_EXAMPLE:
            raise ValueError(f"length must be between 1 and {LONGEST_EXAMPLE:,}, got {length}")
        return task.example(length)
    if not isinstance(task, ReadsText):
        raise ValueError(f"text must be left out: {run.folder} was trained on {run.recipe.task}")
    return task.read(text)


def explore(models: Mapping[str, Decoder], tokens: Tensor, symbols: Sequence[str]) -> Explorer:
    """The attention of models, by name, on one sequence ``[L]`` whose tokens are written as ``symbols``."""
    if not 1 <= len(models) <= MOST_MODELS:
        raise ValueError(f"models must be one or two, got {len(models)}")
    if len(tokens) < 1 or len(tokens) != len(symbols):
        raise ValueError(f"symbols must be one for each of at least one token, got {len(symbols)} for {len(tokens)}")
    arrays = Arrays()
    attentions = [block.attention for model in models.values() for block in model.blocks if isinstance(block, Block)]
    check_length(attentions, len(tokens))
    heads = sum(attention.heads for attention in attentions)
    found: dict[str, list[Head]] = {label: [] for label in models}
    packed = []
    for label, model in models.items():
        layers = []
        for layer in read_layers(model, tokens):
            found[label] += layer.heads
            layers.append(asdict(pack_layer(layer, heads, arrays)))
        packed.append({"label": label, "layers": layers})
    data = {
        "tra": __version__,
        "tokens": list(symbols),
        "colours": {
            "smallest": SMALLEST_SHOWN,
            "light": {"null": NULL, "steps": STEPS},
            "dark": {"null": DARK_NULL, "steps": DARK_STEPS},
        },
        "models": packed,
    }
    title = f"Attention of {' beside '.join(models)}"
    text = page(title, asset("explorer.html"), styles=STYLES, scripts=SCRIPTS, data=data, arrays=arrays.content)
    return Explorer(text, found)

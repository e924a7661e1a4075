"""What a trained model attends to: each head's weights on one sequence, and what they come to."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tra.attention import Attention, Context
from tra.attention.context import Terms
from tra.files import write_json, write_text
from tra.lookup import lookup
from tra.model import Block, Decoder
from tra.report.figures import FORMATS, attention_heatmap, save_figure
from tra.report.tables import Table

SHARE = 0.9
"""Of a query's weight, in the definition of reach."""
QUANTILES = (0.1, 0.5, 0.9)
MOST_TOKENS = 256
"""A heatmap of more could not be read, and takes minutes to draw."""


@dataclass(frozen=True)
class Head:
    """One head on one sequence."""

    layer: int
    head: int
    kept: float
    """Share of all keys that a query may see whose weight is not exactly 0."""
    null: float
    """Share of queries that attend to nothing."""
    mean_distance: float
    """How many tokens back a query looks, by weight, over the queries that attend to something."""
    reach: int
    """Within so many tokens lies 90% of the weight of half the queries; 1 is the query's own token."""
    gate: tuple[float, ...] | None
    """The 10%, 50% and 90% quantiles of the gate, 1 for no decay with distance; None without a gate."""


@dataclass(frozen=True)
class Inspection:
    """What `heads.json` holds."""

    attention: str
    tokens: list[str]
    heads: list[Head]


class LayerOnSequence(NamedTuple):
    """What a layer's heads do with one sequence."""

    heads: list[Head]
    weights: Tensor
    """``[heads, L, L]``."""
    gates: Tensor | None
    """``[heads, L]``, 1 for no decay with distance."""
    terms: list[Terms]
    """What the weights were computed from."""


@torch.inference_mode()
def read_layer(number: int, attention: Attention, x: Tensor) -> LayerOnSequence:
    """The layer of this number, from 0, when it reads ``x [1, L, width]``."""
    terms: list[Terms] = []
    weights = attention.weights(x, Context(terms=terms))[0].float().cpu()
    found = attention.gates(x)
    gates = None if found is None else found[0].float().cpu()
    of_head = [None] * len(weights) if gates is None else list(gates)
    heads = [summarise(number, head, matrix, of_head[head]) for head, matrix in enumerate(weights)]
    return LayerOnSequence(heads, weights, gates, terms)


@torch.inference_mode()
def read_layers(model: Decoder, tokens: Tensor) -> Iterator[LayerOnSequence]:
    """Every layer of a model on one sequence ``[L]``."""
    streams: list[Tensor] = []
    model.hidden_from(model.embedded(tokens[None].to(model.head.weight.device)), streams=streams)
    for number, (block, stream) in enumerate(zip(model.blocks, streams, strict=True)):
        assert isinstance(block, Block)
        yield read_layer(number, block.attention, block.attention_norm(stream))


def inspect_heads(model: Decoder, tokens: Tensor) -> tuple[list[Head], list[Tensor]]:
    """Each head of each layer on one sequence ``[L]``, and per layer the weights ``[heads, L, L]``."""
    layers = list(read_layers(model, tokens))
    return [head for layer in layers for head in layer.heads], [layer.weights for layer in layers]


def summarise(layer: int, head: int, weights: Tensor, gates: Tensor | None) -> Head:
    """The numbers of one head from its weights ``[L, L]`` and its gates ``[L]``. Weights may be negative, as those
    of differential attention are: then it is their size that counts."""
    length = weights.shape[0]
    size = weights.abs()
    mass = size.sum(dim=1)
    some = mass > 0
    back = torch.arange(length)[:, None] - torch.arange(length)
    share = size[some] / mass[some, None]
    # Column d holds the weight of the key d tokens back.
    by_distance = torch.zeros_like(share).scatter_add_(1, back[some].clamp(min=0), share)
    near = by_distance.cumsum(dim=1) >= SHARE - 1e-6
    reaches = near.float().argmax(dim=1) + 1
    return Head(
        layer=layer + 1,
        head=head + 1,
        kept=(weights != 0).sum().item() / (length * (length + 1) // 2),
        null=1.0 - some.float().mean().item(),
        mean_distance=(share * back[some]).sum(dim=1).mean().item() if some.any() else 0.0,
        reach=int(reaches.median()) if some.any() else 0,
        gate=None if gates is None else tuple(gates.float().cpu().quantile(torch.tensor(QUANTILES)).tolist()),
    )


def heads_table(heads: Sequence[Head]) -> Table:
    """A row per head."""
    headings = ("layer", "head", "keys kept", "null queries", "mean distance", "reach", "gate 10% / 50% / 90%")
    rows = [
        [
            str(entry.layer),
            str(entry.head),
            f"{entry.kept:.0%}",
            f"{entry.null:.0%}",
            f"{entry.mean_distance:.1f}",
            f"{entry.reach:,}",
            "" if entry.gate is None else " / ".join(f"{value:.2f}" for value in entry.gate),
        ]
        for entry in heads
    ]
    return Table(headings, rows, words=0)


def write_inspection(
    model: Decoder, tokens: Tensor, symbols: Sequence[str], folder: Path, formats: Sequence[str] = ("png",)
) -> Inspection:
    """`attention` in each format, `heads.md` and `heads.json` of a model on one sequence."""
    if len(tokens) > MOST_TOKENS:
        raise ValueError(
            f"text must have at most {MOST_TOKENS} tokens to be drawn, got {len(tokens)}; --html shows longer ones"
        )
    for kind in formats:
        lookup(dict.fromkeys(FORMATS), kind, "figures")
    heads, weights = inspect_heads(model, tokens)
    label = model.config.label
    folder.mkdir(parents=True, exist_ok=True)
    figure = attention_heatmap({label: weights}, symbols)
    for kind in formats:
        save_figure(figure, folder / f"attention.{kind}")
    return write_heads(label, heads, symbols, folder)


def write_heads(label: str, heads: Sequence[Head], symbols: Sequence[str], folder: Path) -> Inspection:
    """`heads.md` and `heads.json`."""
    found = Inspection(label, list(symbols), list(heads))
    write_text(folder / "heads.md", heads_table(heads).markdown())
    write_json(folder / "heads.json", asdict(found))
    return found

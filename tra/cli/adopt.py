"""`tra adopt`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tra.cli.parsing import Common, parse


@dataclass(frozen=True)
class Adopt(Common):
    """Put TRA into a pretrained model of Hugging Face: its attention becomes TRA, its weights stay."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder or name of a Llama, Qwen, Mistral, Gemma, SmolLM3, Phi, GPT-2, GPT-NeoX, OLMo or Cohere."""
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """Folder to write, which must not exist yet."""
    layers: tuple[int, ...] = ()
    """Layers that become TRA, from 0; all by default."""
    drop_positions: bool = False
    """Drop the rotary embedding of every layer."""
    gate_bias: float = 3.0
    """What gates start from, before the sigmoid: 3 is a decay of 0.95 for each kept key, 100 is none."""
    threshold: Literal["query", "head", "none"] | float = "query"
    """What a score must exceed: a number, learned for each head, set by each query, or none."""
    threshold_start: float = -4.0
    """Where a learned threshold starts."""


def run(arguments: list[str]) -> int:
    options = parse(Adopt, arguments, "adopt")
    from tra.hub.adoption import adopt_folder

    adopt_folder(
        options.model,
        options.folder,
        layers=options.layers or None,
        drop_positions=options.drop_positions,
        gate_bias=options.gate_bias,
        threshold=None if options.threshold == "none" else options.threshold,
        threshold_start=options.threshold_start,
    )
    print(options.folder)
    return 0

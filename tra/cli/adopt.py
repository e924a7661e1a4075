"""`tra adopt`."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from tra.cli.parsing import Common, on_console, parse


@dataclass(frozen=True)
class Adopt(Common):
    """Put TRA into a pretrained model of Hugging Face: its attention becomes TRA, its weights stay. With --heal it is
    then trained on text."""

    model: str = field(metadata={"positional": "MODEL"})
    """Folder or name of a Llama, Qwen, Mistral, Gemma, SmolLM3, Phi, GPT-2, GPT-NeoX, OLMo or Cohere; with --heal it
    may be adopted already."""
    folder: Path = field(metadata={"positional": "FOLDER"})
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
    heal: str | None = None
    """Text to train the adopted model on: a folder of text files, or wikitext-2 or wikitext-103 from the hub."""
    steps: int = 200
    """With --heal: steps of training."""
    length: int = 512
    """With --heal: tokens of a window; what the original was trained at, or less."""
    batch: int = 8
    """With --heal: windows in a step."""
    learning_rate: float = 3e-4
    """With --heal: the greatest learning rate, after a warm-up and before a linear decay."""
    seed: int = 0
    """With --heal: seed of the windows that are drawn from the text."""


HEALING = ("steps", "length", "batch", "learning_rate", "seed")


def run(arguments: list[str]) -> int:
    options = parse(Adopt, arguments, "adopt")
    given = {
        entry.name: getattr(options, entry.name)
        for entry in fields(Adopt)
        if getattr(options, entry.name) != entry.default
    }
    how = {name: given.pop(name) for name in HEALING if name in given}
    if how and options.heal is None:
        raise ValueError(f"heal must be given with {next(iter(how))}: the text to train on")
    from tra.hub.adoption import adopt_folder

    healing = None
    if options.heal is not None:
        from tra.hub.healing import Healing

        healing = Healing(options.heal, **how)
    if given.get("threshold") == "none":
        given["threshold"] = None
    names = ("layers", "drop_positions", "gate_bias", "threshold", "threshold_start")
    with on_console():
        adopt_folder(options.model, options.folder, healing, **{name: given[name] for name in names if name in given})
    print(options.folder)
    return 0

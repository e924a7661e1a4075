"""`tra export`."""

from dataclasses import dataclass, field
from pathlib import Path

from tra.cli.parsing import Common, parse


@dataclass(frozen=True)
class Export(Common):
    """Write a run as a folder that transformers loads: safetensors, config, tokenizer, model card."""

    run: Path = field(metadata={"positional": "RUN"})
    """Run: its folder, FOLDER@best, FOLDER@STEP or pretrained:NAME."""
    folder: Path = field(metadata={"positional": "FOLDER"})
    """Folder to write, which must not exist yet."""
    auto_map: bool = True
    """Let tools find this package by `trust_remote_code=True`: adds a file that imports it."""


def run(arguments: list[str]) -> int:
    options = parse(Export, arguments, "export")
    from tra.hub.export import export

    export(options.run, options.folder, options.auto_map)
    print(options.folder)
    return 0

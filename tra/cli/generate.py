"""`tra generate`."""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from tra.cli.options import Common, parse
from tra.cli.texts import or_file

MOST_TOKENS = 1 << 30
MOST_BEAMS = 1024
COLDEST = 1e-6
"""What scores are divided by must leave them finite."""
COLD = f"0 or at least {COLDEST:g}"


@dataclass(frozen=True)
class Generate(Common):
    """Continue a prompt, printing text as it comes and then the speed."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run folder of a run on text, or a folder that tra export wrote."""
    prompt: str
    """The text to continue, or @FILE to read it from a file (a text that begins with @ has @@); it may be longer than
    the training window."""
    tokens: int = 100
    """New tokens at most."""
    temperature: float = 1.0
    """Of sampling; 0 takes the most probable token every time."""
    top_k: int = 0
    """Sample among so many of the most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability."""
    beams: int = 1
    """Beams of beam search, which neither samples nor streams."""
    seed: int = 0
    """Of sampling: the same seed gives the same text."""
    json: bool = False
    """Print JSON at the end instead of streaming."""


def run(arguments: list[str]) -> int:
    options = parse(Generate, arguments, "generate")
    _check(options)
    prompt = or_file(options.prompt, "prompt")
    from tra.hub.generation import generate, load

    model, tokenizer = load(options.run)
    how: dict[str, Any] = {"max_new_tokens": options.tokens, "num_beams": options.beams}
    if options.beams == 1 and options.temperature > 0:
        how |= {"do_sample": True, "temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    streams = options.beams == 1 and not options.json
    if streams:
        print(prompt, end="", flush=True)
    result = generate(model, tokenizer, prompt, options.seed, streams, **how)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0
    if not streams:
        print(prompt + result["text"])
    read = f"{result['prompt_tokens']} tokens read"
    if result["prompt_seconds"] is not None:
        read += f" in {result['prompt_seconds']:.2f} s"
    speed = "" if result["tokens_per_second"] is None else f" at {result['tokens_per_second']:.1f} tokens/s"
    print(f"{read}, {result['new_tokens']} new{speed}", file=sys.stderr)
    return 0


def _check(options: Generate) -> None:
    for name, wrong, expected in (
        ("tokens", not 1 <= options.tokens <= MOST_TOKENS, f"between 1 and {MOST_TOKENS:,}"),
        ("temperature", not (options.temperature == 0 or COLDEST <= options.temperature < math.inf), COLD),
        ("top_k", options.top_k < 0, "at least 0"),
        ("top_p", not 0 < options.top_p <= 1, "in (0, 1]"),
        ("beams", not 1 <= options.beams <= MOST_BEAMS, f"between 1 and {MOST_BEAMS:,}"),
    ):
        if wrong:
            raise ValueError(f"{name} must be {expected}, got {getattr(options, name)!r}")
    if options.beams > 1 and (options.temperature, options.top_k, options.top_p) != (1.0, 0, 1.0):
        raise ValueError(f"beams must be 1 for temperature, top_k and top_p to matter, got {options.beams}")

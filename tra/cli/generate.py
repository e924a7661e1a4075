"""`tra generate`."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tra.cli.parsing import Common, parse
from tra.cli.texts import or_file
from tra.generation import GREEDY, Sampling

MOST_TOKENS = 1 << 30
MOST_BEAMS = 1024


@dataclass(frozen=True)
class Generate(Common):
    """Continue a prompt: print the text as it is generated, then the speed."""

    run: Path = field(metadata={"positional": "RUN"})
    """Run on text (its folder, FOLDER@best or pretrained:NAME), or a folder that tra export wrote."""
    prompt: str
    """The text to continue, or @FILE to read it from a file (a text that begins with @ has @@); it may be longer than
    the training window."""
    tokens: int = 100
    """New tokens at most."""
    temperature: float = 1.0
    """Sampling temperature; 0 always takes the most probable token."""
    top_k: int = 0
    """Sample among this many of the most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability."""
    beams: int = 1
    """Number of beams; beam search does not sample or stream."""
    seed: int = 0
    """Seed of sampling: the same seed gives the same text."""
    echo: bool = False
    """Also print a prompt that was read from a file. A prompt given as text is always printed."""
    cache: Path | None = None
    """Continue from a file that --save-cache wrote."""
    save_cache: Path | None = None
    """Save the cache of what was read, so that --cache continues without reading it again."""
    context_parallel: int = 1
    """Number of processes, started by torchrun, that read the prompt together. All of them must."""
    json: bool = False
    """Print a line of JSON for each new piece of text, and a last one with the whole text and the speed."""


def run(arguments: list[str]) -> int:
    options = parse(Generate, arguments, "generate")
    sampling = _checked(options)
    prompt = or_file(options.prompt, "prompt")
    from tra.hub.generation import generate, load
    from tra.runs.distributed import shared_prompt

    model, tokenizer = load(options.run)

    def show(piece: str) -> None:
        if not first:
            return
        if not options.json:
            print(piece, end="", flush=True)
        elif piece:
            print(json.dumps({"piece": piece}), flush=True)

    from_file = options.prompt.startswith("@") and not options.prompt.startswith("@@")
    with shared_prompt(model.model.decoder, options.context_parallel) as first:
        if not options.json and (options.echo or not from_file):
            show(prompt)
        result = generate(
            model,
            tokenizer,
            prompt,
            options.tokens,
            sampling,
            beams=options.beams,
            seed=options.seed,
            show=show,
            cache=options.cache,
            save_cache=options.save_cache if first else None,
        )
    if not first:
        return 0
    if options.json:
        print(json.dumps(result))
        return 0
    show("\n")
    read = f"{result['prompt_tokens']} tokens read"
    if result["prompt_seconds"] is not None:
        read += f" in {result['prompt_seconds']:.2f} s"
    speed = "" if result["tokens_per_second"] is None else f" at {result['tokens_per_second']:.1f} tokens/s"
    print(f"{read}, {result['new_tokens']} new{speed}", file=sys.stderr)
    return 0


def _checked(options: Generate) -> Sampling:
    for name, wrong, expected in (
        ("tokens", not 1 <= options.tokens <= MOST_TOKENS, f"between 1 and {MOST_TOKENS:,}"),
        ("beams", not 1 <= options.beams <= MOST_BEAMS, f"between 1 and {MOST_BEAMS:,}"),
    ):
        if wrong:
            raise ValueError(f"{name} must be {expected}, got {getattr(options, name)!r}")
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    if options.beams == 1:
        return sampling
    if sampling != Sampling(1.0):
        raise ValueError(f"beams must be 1 for temperature, top_k and top_p to matter, got {options.beams}")
    return GREEDY

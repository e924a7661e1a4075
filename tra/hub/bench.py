"""`Decoder.generate` against transformers' `generate` of the same weights."""

from collections.abc import Iterator

import torch
from transformers.utils import logging

from tra.bench.cases import Case, language_model
from tra.bench.timing import Work
from tra.hub.modeling import from_decoder
from tra.model import Decoder

PROMPT, NEW = 8, 64
"""Tokens: so few are read that what is timed is nearly all writing."""


def generation_cases() -> Iterator[Case]:
    """The small language model, untrained, at batch 1."""
    for mechanism, goal in (("tra", 0.4), ("rope", None)):
        yield Case(
            f"{NEW} new tokens of a small model, {mechanism}",
            f"1x{PROMPT}+{NEW}",
            lambda mechanism=mechanism: ours(mechanism),  # type: ignore[misc]
            {"transformers": lambda mechanism=mechanism: theirs(mechanism)},  # type: ignore[misc]
            goal,
        )


def ours(mechanism: str) -> Work:
    decoder, tokens = _prepared(mechanism)
    return lambda: decoder.generate(tokens, NEW)


def theirs(mechanism: str) -> Work:
    logging.set_verbosity_error()
    decoder, tokens = _prepared(mechanism)
    model, mask = from_decoder(decoder), torch.ones_like(tokens)
    return lambda: model.generate(tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False)  # type: ignore[misc]


def _prepared(mechanism: str) -> tuple[Decoder, torch.Tensor]:
    torch.manual_seed(0)
    decoder = Decoder(language_model("small", mechanism)).eval()
    return decoder, torch.randint(decoder.config.vocabulary, (1, PROMPT))

"""What is measured against what, and how fast it is meant to be."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F

from tra.bench.timing import Work
from tra.bench.workloads import Rule, attention, native, new_token, papers_listing, training_step
from tra.model import DecoderConfig, sized
from tra.recipes import build_recipe

Prepare = Callable[[], Work]

CACHED = {"small": (128, 1024, 4096, 16384, 65536), "medium": (4096, 65536)}
"""Tokens in the cache of language models of these sizes."""
STRAIGHT_THROUGH = 0.5
"""The temperature that is recommended for training."""


@dataclass(frozen=True)
class Case:
    """Something of TRA's, and what it is compared with. Nothing is prepared before it is wanted."""

    what: str
    shape: str
    ours: Prepare
    others: Mapping[str, Prepare]
    goal: float | None = None
    """Largest ratio wanted, where one is set; to the first of the others."""
    repeats: int = 1
    """How many times ours does what the others do once; what is told is the time of one."""


@dataclass(frozen=True)
class Comparison:
    """One comparison. A ratio below 1 means that TRA is faster."""

    what: str
    shape: str
    against: str
    milliseconds: float
    against_milliseconds: float
    goal: float | None
    """Largest ratio wanted, where one is set."""

    @property
    def ratio(self) -> float:
        return self.milliseconds / self.against_milliseconds

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "ratio": self.ratio}

    def __str__(self) -> str:
        goal = "" if self.goal is None else f"  (goal {self.goal:g})"
        return (
            f"{self.what:<44} {self.shape:<14} {self.milliseconds:>10.3f} ms   {self.against:<16}"
            f"{self.against_milliseconds:>10.3f} ms   {self.ratio:.4g}x{goal}"
        )


def cases() -> Iterator[Case]:
    """Attention by itself, its growth with the length, decoding, and whole models."""
    listings = {"paper, eager": lambda: papers_listing, "paper, compiled": lambda: torch.compile(papers_listing)}
    for backward, limit in ((False, 1.0), (True, 1.1)):
        for shape in ((8, 4, 512), (2, 8, 1024), (1, 8, 4096)):
            more = listings if shape[2] <= 1024 else {}
            yield attention_case("every key", shape, native(0.0), backward, limit, more)
    for backward, speedups in (
        (False, {(8, 4, 512): 3, (1, 8, 4096): 10, (1, 8, 16384): 40, (1, 4, 65536): 130}),
        (True, {(8, 4, 512): 4, (1, 8, 4096): 12, (1, 8, 16384): 35, (1, 1, 16384): 35}),
    ):
        for shape, speedup in speedups.items():
            yield attention_case("default tolerance", shape, native(), backward, 1 / speedup)
    for shape, goal in {(8, 4, 512): 1 / 2.5, (1, 8, 4096): 1 / 8, (1, 8, 16384): 1 / 20}.items():
        yield attention_case("straight-through", shape, native(straight_through=STRAIGHT_THROUGH), True, goal)
    for length in (32768, 65536):
        yield _growth(length, length // 2)
    for batch in (1, 8):
        for cached, goal in ((4096, 0.15), (65536, 0.015)):
            yield decoding_case(batch, 8, cached, native(), goal)
    for size, lengths in CACHED.items():
        for cached in lengths:
            yield _generation(size, cached)
    yield _training("mini", 16, 512, 0.9)
    yield _training("medium", 8, 128, 1.0)
    yield _training("medium", 8, 1024, 0.85)
    for size, batch, length, goal in (("mini", 16, 512, 0.85), ("medium", 8, 128, 1.05), ("medium", 8, 1024, 0.95)):
        yield _training(size, batch, length, goal, straight_through=STRAIGHT_THROUGH)


def attention_case(
    how: str,
    shape: tuple[int, int, int],
    ours: Rule,
    backward: bool,
    goal: float | None = None,
    more: Mapping[str, Callable[[], Rule]] = MappingProxyType({}),
    **where: Any,
) -> Case:
    """Attention by itself against SDPA, and against others, of which only those called after the paper have a gate."""
    batch, heads, length = shape

    def prepare(rule: Rule, gated: bool = True) -> Work:
        return attention(rule, batch, heads, length, length, backward=backward, gated=gated, **where)

    others: dict[str, Prepare] = {
        "SDPA": lambda: prepare(partial(F.scaled_dot_product_attention, is_causal=True), gated=False),
        **{name: lambda name=name: prepare(more[name](), gated=name.startswith("paper")) for name in more},  # type: ignore[misc]
    }
    what = f"{'forward + backward' if backward else 'forward'}, {how}"
    return Case(what, "x".join(map(str, shape)), lambda: prepare(ours), others, goal)


def decoding_case(batch: int, heads: int, cached: int, ours: Rule, goal: float | None = None, **where: Any) -> Case:
    sdpa = F.scaled_dot_product_attention
    return Case(
        "decode one token",
        f"{batch}x{heads}x{cached}",
        lambda: attention(ours, batch, heads, 1, cached, **where),
        {"SDPA": lambda: attention(sdpa, batch, heads, 1, cached, gated=False, **where)},
        goal,
    )


def _growth(length: int, half: int) -> Case:
    def prepare(length: int) -> Work:
        return attention(native(), 1, 4, length, length)

    return Case(
        "growth per doubling, default tolerance",
        f"1x4x{length}",
        lambda: prepare(length),
        {f"itself at {half}": lambda: prepare(half)},
    )


def language_model(size: str, mechanism: str) -> DecoderConfig:
    """Of the recipe that is called so; its tokens are text."""
    return build_recipe({"small": "wikitext103-small", "medium": "wikitext103"}[size], mechanism).model


def _generation(size: str, cached: int) -> Case:
    return Case(
        f"new token of a {size} model",
        f"1x{cached}",
        lambda: new_token(language_model(size, "tra"), cached),
        {"RoPE on SDPA": lambda: new_token(language_model(size, "rope"), cached)},
        goal=1.0 if size == "small" else None,
    )


def _training(size: str, batch: int, length: int, goal: float, straight_through: float = 0.0) -> Case:
    def prepare(mechanism: str, **options: float) -> Work:
        config = sized(size, attention=mechanism, attention_options=options, dropout=0.0)
        return training_step(config, batch, length)

    options = {"straight_through": straight_through} if straight_through else {}
    return Case(
        f"training step, {size} model" + (", straight-through" if options else ""),
        f"{batch}x{length}",
        lambda: prepare("tra", **options),
        {"RoPE on SDPA": lambda: prepare("rope")},
        goal,
    )

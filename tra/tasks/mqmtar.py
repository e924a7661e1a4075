"""MQMTAR (Vasylenko et al. 2025, arXiv 2506.16640): which value came with this key of two tokens?

    <bos> k4 k2 v9 v3 k2 k4 v1 v1 <sep> k2 k4 -> v1 v1 k4 k2 -> v9 v3 <eos>

Multi-query multi-token associative recall: keys and values have two tokens each. Four keys are asked for, or all if
there are fewer, and their values count. Keys share tokens, so one token alone does not find a value. No key comes
twice. The layout and the alphabet are ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tra.tasks.base import Batch
from tra.tasks.strings import BOS, EOS, SEP, SPECIAL, StringTask, every, join, sample_unique

TOKENS_PER_PAIR = 4


@dataclass(frozen=True)
class MultiTokenRecall(StringTask):
    """Recall by keys of two tokens."""

    name = "mqmtar"
    version = 1
    unit = "tokens"

    alphabet: int = 16
    """Number of different tokens in keys, and in values; there are as many keys as its square."""
    queries: int = 4
    """How many keys are asked for, if there are as many."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries < 1:
            raise ValueError(f"queries must be at least 1, got {self.queries}")

    @property
    def symbols(self) -> Sequence[str]:
        return (*SPECIAL, *(f"{kind}{index}" for kind in "kv" for index in range(self.alphabet)))

    def evaluation_sets(self) -> Mapping[str, "MultiTokenRecall"]:
        return {"mqmtar": replace(self, mixed=False)}

    def sample(self, rng: torch.Generator, batch: int, length: int) -> Batch:
        """A length counts the tokens of keys and values between ``<bos>`` and ``<sep>``."""
        if length < TOKENS_PER_PAIR or length % TOKENS_PER_PAIR:
            raise ValueError(f"length must be a multiple of {TOKENS_PER_PAIR} tokens, at least one, got {length}")
        pairs = length // TOKENS_PER_PAIR
        numbers = self.sample_lengths(rng, batch, pairs)
        there = torch.arange(pairs) < numbers[:, None]
        key = sample_unique(rng, batch, pairs, self.alphabet**2, first=0)
        value = torch.randint(self.alphabet**2, (batch, pairs), generator=rng)
        first = len(SPECIAL)
        words = torch.stack([key // self.alphabet, key % self.alphabet, value // self.alphabet, value % self.alphabet])
        words = (
            words + torch.tensor([first, first, first + self.alphabet, first + self.alphabet])[:, None, None]
        ).movedim(0, 2)

        # The pairs in random order, those that are not there last.
        order = torch.rand(batch, pairs, generator=rng).masked_fill(~there, 2.0).argsort(dim=1)[:, : self.queries]
        asked = words.gather(1, order[..., None].expand(-1, -1, TOKENS_PER_PAIR))
        present = there.gather(1, order)
        parts = [
            (part[:, number], present[:, number, None].expand(-1, 2), counted)
            for number in range(order.shape[1])
            for part, counted in ((asked[..., :2], False), (asked[..., 2:], True))
        ]
        return join(
            every(BOS, batch),
            (words.flatten(1), there.repeat_interleave(TOKENS_PER_PAIR, dim=1), False),
            every(SEP, batch),
            *parts,
            every(EOS, batch),
        )

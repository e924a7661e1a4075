"""Generation token by token: how the next one is chosen, and the loop around it.

What transformers' `generate` chooses with the same options and the same state of the random generator, without what it
does besides for each token.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tra.errors import RunError
from tra.ops.visibility import check_masks
from tra.signatures import mismatch

COLDEST = 1e-6
"""The lowest temperature but 0, which is another rule."""

Reader = Callable[[Tensor, Tensor | None], Tensor]
"""Reads new tokens ``[B, L]`` behind those it has read before, with their mask ``[B, L]``, False for padding, or None,
and returns the scores ``[B, vocabulary]`` of the token after the last. It remembers both."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.9)
        Sampling(temperature=0.8, top_k=0, top_p=0.9)
    """

    temperature: float = 0.0
    """0 takes the most probable token."""
    top_k: int = 0
    """Sample among so many of the most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the most probable tokens that together have this probability."""

    def __post_init__(self) -> None:
        if mismatch(self.temperature, float) or not (self.temperature == 0 or self.temperature >= COLDEST):
            raise ValueError(f"temperature must be 0 or at least {COLDEST:g}, got {self.temperature!r}")
        if mismatch(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number of at least 0, got {self.top_k!r}")
        if mismatch(self.top_p, float) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p!r}")

    def choose(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A token ``[B]`` for each row of the scores ``[B, vocabulary]``, which are float32."""
        if self.temperature == 0:
            return scores.argmax(dim=-1)
        if self.temperature < 1.0:
            largest = scores.amax(dim=-1, keepdim=True)
            if not (largest / self.temperature).isfinite().all():
                scores = scores - largest  # which softmax does not notice, but for rounding
        if self.temperature != 1.0:
            scores = scores / self.temperature
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        if self.top_p < 1.0:
            # From the least probable on, as transformers adds them up: another order would round otherwise.
            ranked, order = scores.sort(descending=False)
            left_out = ranked.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
            left_out[:, -1] = False
            scores = scores.masked_fill(left_out.scatter(1, order, left_out), -math.inf)
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1, generator=generator).squeeze(1)


GREEDY = Sampling()


@torch.inference_mode()
def stream_tokens(
    read: Reader,
    tokens: Tensor,
    new: int,
    sampling: Sampling = GREEDY,
    *,
    key_mask: Tensor | None = None,
    end: Collection[int] = (),
    pad: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """The tokens ``[B]`` that follow ``tokens [B, L]``, one step after another.

    Args:
        read: what gives the scores; it remembers what it has read, so a second turn continues the first. It has not
            read the last token given, with which the second begins, and has read what fills rows that ended early.
        tokens: what is continued.
        new: how many steps at most.
        sampling: how tokens are chosen.
        key_mask: ``[B, L]`` boolean, False for padding, which belongs on the left.
        end: tokens that end their row. When all rows have ended, so does the iterator.
        pad: what follows in a row that has ended while others go on; the first of `end` by default.
        generator: where randomness comes from; PyTorch's own by default.
    """
    _check(tokens, new, sampling, key_mask, end, pad)
    batch, length = tokens.shape
    if key_mask is not None and bool(key_mask.all()):
        key_mask = None  # which is faster
    running = torch.ones(batch, dtype=torch.bool, device=tokens.device)
    last = torch.tensor(list(end), device=tokens.device)
    fill = next(iter(end), None) if pad is None else pad
    for step in range(new):
        scores = read(tokens, key_mask).float()
        check_finite(scores, length + step + 1)
        if step == 0:
            _check_ends(end, pad, scores.shape[1])
        chosen = sampling.choose(scores, generator).to(tokens.dtype)
        if fill is not None:
            chosen = chosen.where(running, fill)
            running = running & ~torch.isin(chosen, last)
        yield chosen
        if len(last) and not running.any():
            return
        tokens, key_mask = chosen[:, None], None


def check_finite(scores: Tensor, number: int) -> None:
    """Raise a RunError for scores of the token of that number among which nothing can be chosen."""
    if not scores.max().item() < math.inf:  # the largest of all is NaN if one is
        raise RunError(f"the model's scores for token {number} are not finite: its weights are damaged")


def check_tokens(tokens: Tensor) -> None:
    """Raise a ValueError unless these are tokens ``[B, L]``."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        kind = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be an int32 or int64 tensor [B, L], got {kind}")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have the shape [B, L], got {list(tokens.shape)}")


def _check_ends(end: Collection[int], pad: int | None, vocabulary: int) -> None:
    for token in end:
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"end must hold tokens of at least 0 and less than the vocabulary of {vocabulary}, got {token}"
            )
    if pad is not None and pad >= vocabulary:
        raise ValueError(f"pad must be less than the vocabulary of {vocabulary}, got {pad}")


def _check(
    tokens: Tensor, new: int, sampling: Sampling, key_mask: Tensor | None, end: Collection[int], pad: int | None
) -> None:
    check_tokens(tokens)
    if 0 in tokens.shape:
        raise ValueError(f"tokens must have the shape [B, L], with at least one token, got {list(tokens.shape)}")
    if mismatch(new, int) or new < 1:
        raise ValueError(f"new must be a whole number of at least 1, got {new!r}")
    if not isinstance(sampling, Sampling):
        raise ValueError(f"sampling must be a Sampling, got {sampling!r}")
    if not isinstance(end, Collection) or any(mismatch(token, int) for token in end):
        raise ValueError(f"end must be a collection of whole numbers, as [2], got {end!r}")
    if pad is not None and (mismatch(pad, int) or pad < 0):
        raise ValueError(f"pad must be a token, a whole number of at least 0, got {pad!r}")
    check_masks(key_mask, None, tokens.shape[0], tokens.shape[1], tokens.device)
    if key_mask is not None and not bool(key_mask[:, -1].all()):
        raise ValueError("key_mask must be True for the last token of each row: padding belongs on the left")

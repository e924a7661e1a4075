"""One call of the operator as an implementation is handed it, checked and complete, and what an implementation is."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Inputs(NamedTuple):
    query: Tensor
    """[B, Hq, Lq, D]"""
    key: Tensor
    """[B, Hkv, Lk, D]"""
    value: Tensor
    """[B, Hkv, Lk, Dv]"""
    log_gate: Tensor
    """[B, Hq, Lq], in any floating dtype"""
    key_mask: Tensor | None
    """[B, Lk], boolean"""
    segment_ids: Tensor | None
    """[B, Lk], int32 or int64"""
    dropout_seed: Tensor | None
    """[1], int64; None without dropout"""


class Options(NamedTuple):
    scale: float
    threshold: float
    dropout: float
    tolerance: float
    """Error that may be traded for an early stop, relative to the largest value; 0 visits every key."""
    score_bound: float | None
    """A bound on the absolute kept scores, or None if the caller knows none."""


def broken_bound(options: Options) -> ValueError:
    """What an implementation raises when it finds that the caller's bound does not hold."""
    return ValueError(
        f"score_bound must bound the absolute scores of all kept keys, got {options.score_bound!r} and a larger score"
    )


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of query, key, value and log_gate, in their dtypes."""


class Implementation(Protocol):
    """What each module listed in `implementations` defines.

    It may also define ``passed_over(reason)``, which is asked when "auto" goes on to the next one because of that
    refusal: what to tell the user, once, that they lose and could install, as the rest of a sentence, or None.
    """

    def about(self) -> str:
        """What it is on this machine and what it refuses, in one line."""

    def refusal(self, inputs: Inputs, options: Options) -> str | None:
        """Why it cannot take this call, as the rest of a sentence that begins with its name; None if it can."""

    def forward(self, inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
        """The output [B, Hq, Lq, Dv] in the dtype of query, and whatever its own backward needs of each row,
        [B, Hq, Lq, 2] in float32, or in float64 where query is."""

    def backward(
        self, grad_out: Tensor, inputs: Inputs, out: Tensor, row_state: Tensor, options: Options
    ) -> Gradients: ...

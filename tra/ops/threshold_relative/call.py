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
    row_threshold: Tensor | None
    """[B, Hq, Lq], in any floating dtype; None: `Options.threshold` is that of every row"""
    row_bound: Tensor | None
    """[B, Hq, Lq], in any floating dtype: a bound on the absolute kept scores of each row, none where it is not finite;
    None: `Options.score_bound` is that of every row"""
    key_lengths: Tensor | None = None
    """[B], int32 or int64: the last query is aligned with the last of so many keys, and the others are not there;
    None: with the last of all"""


class Options(NamedTuple):
    scale: float
    threshold: float
    """A key is kept when its score is greater."""
    straight_through: float
    """Temperature of the sigmoid through which gradients pass the threshold; 0 stops them there."""
    dropout: float
    tolerance: float
    """Error that may be traded for an early stop, relative to the largest value; 0 visits every key."""
    score_bound: float | None
    """A bound on the absolute kept scores, or None if the caller knows none."""


def refuse_positive_gates(log_gate: Tensor) -> None:
    """The native kernel does this itself. Not for `api`: tracing and transforms have no data to read there."""
    if bool((log_gate > 0).any()):
        largest = log_gate.nan_to_num(-1.0).max().item()
        raise ValueError(f"log_gate must never be positive, got a maximum of {largest:g}")


def broken_bound(inputs: Inputs, options: Options) -> ValueError:
    """What an implementation raises when it finds that the caller's bound does not hold."""
    bound = repr(options.score_bound) if inputs.row_bound is None else "a tensor"
    return ValueError(f"score_bound must bound the absolute scores of all kept keys, got {bound} and a larger score")


class Result(NamedTuple):
    """What forward returns."""

    out: Tensor
    """[B, Hq, Lq, Dv] in the dtype of query"""
    row_state: Tensor
    """Whatever its own backward needs of each row, [B, Hq, Lq, 2] in float32, or in float64 where query is"""
    residual: Tensor | None
    """What rounding took from `out`, [B, Hq, Lq, Dv] in bfloat16; None where backward does not need it"""


class Gradients(NamedTuple):
    """What backward returns, each in the dtype of its input."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor
    row_threshold: Tensor | None
    """None where there is none, or no gradient passes the threshold"""


class Implementation(Protocol):
    """What each module listed in `implementations` defines.

    It may also define ``passed_over(reason)``, which is asked when "auto" goes on to the next one because of that
    refusal: what to tell the user, once, that they lose and could install, as the rest of a sentence, or None.
    ``only_by_name(inputs)``: whether "auto" shall not take it although it could. ``RESIDUAL``: the dtypes of query for
    which its forward returns a residual in training. And ``backward_of_rows``, like ``backward``, which is called where
    nobody wants the gradients of keys and values: it may return None for these.
    """

    def about(self) -> str:
        """What it is on this machine and what it refuses, in one line."""

    def refusal(self, inputs: Inputs, options: Options) -> str | None:
        """Why it cannot take this call, as the rest of a sentence that begins with its name; None if it can."""

    def forward(self, inputs: Inputs, options: Options, training: bool) -> Result:
        """With `training`, backward may follow."""

    def backward(self, grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients: ...

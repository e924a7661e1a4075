"""The public function: every check on its arguments, made once and for every implementation."""

import math
from numbers import Real

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Inputs, Options
from tra.ops.threshold_relative.implementations import choose
from tra.ops.threshold_relative.op import attend
from tra.ops.visibility import check_masks

ROUNDING = torch.finfo(torch.float32).eps
"""The tolerance that None stands for."""
LARGEST = torch.finfo(torch.float32).max
"""Half precision is computed in float32."""

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COLDEST = 1e-15
"""The least temperature: gradients are divided by it."""
NUMBERS = (Real, torch.SymFloat, torch.SymInt)
"""Under torch.compile a number may be symbolic."""
WITH_AUTOCAST = [name for name in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(name)]
"""A constant, because Dynamo of torch 2.10 does not trace the question."""


def threshold_relative_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    *,
    key_mask: Tensor | None = None,
    segment_ids: Tensor | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    threshold: float | Tensor = 0.0,
    straight_through: float = 0.0,
    dropout: float = 0.0,
    tolerance: float | None = None,
    score_bound: float | Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention over the keys whose score passes a threshold, with distance counted among those keys.

    For query i and key j of one head::

        s_ij    = scale * query_i . key_j
        keep_ij = key j is visible to query i, and s_ij > threshold
        c_ij    = number of kept keys from j up to i, j itself included
        out_i   = sum_j softmax over kept j (s_ij + log_gate_i * c_ij) value_j

    A query that keeps no key gets exactly 0. Gradients flow through s, log_gate and value; keep and c are piecewise
    constant, and pass gradients only with ``straight_through``. The last query is aligned with the last key:
    ``Lq < Lk`` is decoding with a cache.

    Args:
        query: ``[B, Hq, Lq, D]``.
        key: ``[B, Hkv, Lk, D]``, Hq a multiple of Hkv: query head h reads key head ``h // (Hq / Hkv)``.
        value: ``[B, Hkv, Lk, Dv]``.
        log_gate: ``[B, Hq, Lq]``, never positive, and finite in the precision of the computation.
        key_mask: ``[B, Lk]`` boolean, False for padding, which is never attended and never counted.
        segment_ids: ``[B, Lk]`` integers; a query sees only keys of its own segment (packed documents).
        key_lengths: ``[B]`` integers, for decoding with a cache of fixed size: the last query of a sequence is aligned
            with the last of so many keys, and what lies behind these is not read. They stay on the device, so that a
            step of generation can be captured in a CUDA graph. From Lq to Lk; not with dropout.
        scale: factor on the scores, ``1 / sqrt(D)`` by default.
        threshold: a key is kept when its score is greater. A number, or a tensor that broadcasts to ``[B, Hq, Lq]``.
        straight_through: temperature of the sigmoid that takes the place of the threshold in backward (a
            straight-through estimator): keys that are left out learn too, and a threshold tensor gets a gradient. The
            output does not change. 0 is the published rule: no gradient passes the threshold.
        dropout: probability of dropping a weight, in [0, 1). The mask comes from PyTorch's generator.
        tolerance: largest error allowed in exchange for stopping early, relative to the largest value.
            None means rounding of float32, 0.0 visits every key, more than 1.0 is 1.0. The reference always
            visits every key.
        score_bound: a bound on the absolute scores of kept keys that the caller vouches for: a number, or a tensor that
            broadcasts to ``[B, Hq, Lq]``, where a row that is not finite has no bound and never stops early. None
            computes one where an implementation needs it. On a CPU a kept score beyond it is an error, if it lies
            within the row's reach: beyond the early stop nobody looks.
        impl: "auto" or the name of an implementation, which is then used or refused, never replaced.

    Returns:
        ``[B, Hq, Lq, Dv]`` in the dtype of query, differentiable once. A NaN or infinity in a query, gate or threshold
        tensor makes that row NaN, one in a value makes the rows NaN that keep its key before they stop, and a key that
        holds one is treated as padding. A row that is NaN has gradients of NaN and no part in those of keys and values.

    Example:
        >>> q, k, v = torch.randn(3, 2, 4, 16, 8).unbind(0)
        >>> log_gate = torch.nn.functional.logsigmoid(torch.randn(2, 4, 16))
        >>> threshold_relative_attention(q, k, v, log_gate).shape
        torch.Size([2, 4, 16, 8])
    """
    query, key, value = apply_autocast(query, key, value)
    _check_tensors(query, key, value, log_gate)
    if key_mask is not None or segment_ids is not None:
        check_masks(key_mask, segment_ids, key.shape[0], key.shape[2], key.device)
    if key_lengths is not None:
        _check_lengths(key_lengths, key, dropout)
    if scale is None:
        scale = 1.0 / math.sqrt(query.shape[3])
    if threshold is None:
        raise ValueError("threshold must be a number or a tensor, got None")
    row_threshold, one_threshold = _per_row("threshold", threshold, query)
    row_bound, one_bound = _per_row("score_bound", score_bound, query)
    _check_options(query.dtype, scale, one_threshold, straight_through, dropout, tolerance, one_bound)
    seed = torch.randint(2**62, (1,), device=query.device) if dropout > 0.0 else None
    inputs = Inputs(query, key, value, log_gate, key_mask, segment_ids, seed, row_threshold, row_bound, key_lengths)
    options = Options(
        float(scale),
        0.0 if one_threshold is None else float(one_threshold),
        float(straight_through),
        float(dropout),
        ROUNDING if tolerance is None else 1.0 if tolerance > 1.0 else float(tolerance),
        None if one_bound is None else float(one_bound),
    )
    return attend(inputs, options, choose(impl, inputs, options))


def _per_row(name: str, given: float | Tensor | None, query: Tensor) -> tuple[Tensor | None, float | None]:
    """A number for each row, or one for all."""
    if not isinstance(given, Tensor):
        return None, given
    rows = query.shape[:3]
    if given.dtype not in TYPES:
        raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {given.dtype}")
    if given.device != query.device:
        raise ValueError(f"{name} must be on the device of query, {query.device}, got {given.device}")
    if given.dim() > 3 or any(
        size not in (1, whole) for size, whole in zip(reversed(given.shape), reversed(rows), strict=False)
    ):
        raise ValueError(f"{name} must broadcast to [B, Hq, Lq] = {list(rows)}, got shape {_shape(given)}")
    # A bound is read in double precision: converted before it is expanded, it is one number.
    return (given.double() if name == "score_bound" else given).expand(rows), None


def apply_autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under autocast take its dtype, as PyTorch's own attention does; the gate keeps its precision."""
    device = query.device.type if isinstance(query, Tensor) else "none"
    if device not in WITH_AUTOCAST or not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in (torch.float32, torch.float16, torch.bfloat16) else x
        for x in (query, key, value)
    )
    return query, key, value


def _fit(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> bool:
    """Whether `_check_tensors` has nothing to say, in few steps: a new token takes no longer than its checks."""
    try:
        batch, heads, queries, width = query.shape
        key_batch, key_heads, keys, key_width = key.shape
        value_batch, value_heads, values, _ = value.shape
        gate_batch, gate_heads, gates = log_gate.shape
    except (AttributeError, ValueError):
        return False
    dtype, device = query.dtype, query.device
    return (
        batch == key_batch == value_batch == gate_batch
        and heads == gate_heads
        and queries == gates
        and key_heads == value_heads
        and keys == values
        and width == key_width
        and width >= 1
        and key_heads >= 1
        and heads >= 1
        and heads % key_heads == 0
        and queries <= keys
        and dtype == key.dtype == value.dtype
        and device == key.device == value.device == log_gate.device
        and dtype in TYPES
        and log_gate.dtype in TYPES
        and isinstance(query, Tensor)
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> None:
    if _fit(query, key, value, log_gate):
        return
    for name, tensor, dims in (
        ("query", query, "[B, Hq, Lq, D]"),
        ("key", key, "[B, Hkv, Lk, D]"),
        ("value", value, "[B, Hkv, Lk, Dv]"),
        ("log_gate", log_gate, "[B, Hq, Lq]"),
    ):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor {dims}, got {type(tensor).__name__}")
        if tensor.dim() != dims.count(",") + 1:
            raise ValueError(f"{name} must have the dimensions {dims}, got shape {_shape(tensor)}")
        if tensor.dtype not in TYPES:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the device of query, {query.device}, got {tensor.device}")
        if tensor.dtype != query.dtype and name != "log_gate":
            raise ValueError(f"{name} must have the dtype of query, {query.dtype}, got {tensor.dtype}")

    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    if width < 1:
        raise ValueError(f"query must have a width D of at least 1, got shape {_shape(query)}")
    if key.shape[0] != batch or key.shape[3] != width:
        raise ValueError(f"key must have the batch size {batch} and width {width} of query, got shape {_shape(key)}")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must match key in [B, Hkv, Lk] = {_shape(key)[:3]}, got shape {_shape(value)}")
    if key_heads < 1 or heads < 1 or heads % key_heads:
        raise ValueError(f"query must have a multiple of the {key_heads} heads of key, got {heads} heads")
    if queries > keys:
        raise ValueError(f"query must not be longer than key ({keys}), got {queries} queries")
    if log_gate.shape != query.shape[:3]:
        raise ValueError(f"log_gate must have the shape {_shape(query)[:3]} of query, got {_shape(log_gate)}")


def _check_lengths(key_lengths: Tensor, key: Tensor, dropout: float) -> None:
    """Their values are looked at where that is free, on a CPU."""
    if not isinstance(key_lengths, Tensor):
        raise ValueError(f"key_lengths must be a tensor [B], got {type(key_lengths).__name__}")
    if key_lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"key_lengths must be int32 or int64, got {key_lengths.dtype}")
    if key_lengths.shape != key.shape[:1]:
        raise ValueError(f"key_lengths must have the shape [B] = {_shape(key)[:1]}, got {_shape(key_lengths)}")
    if key_lengths.device != key.device:
        raise ValueError(f"key_lengths must be on the device of query, {key.device}, got {key_lengths.device}")
    if dropout:
        raise ValueError(f"dropout must be 0 with key_lengths, which are for decoding, got {dropout!r}")


def _check_options(
    dtype: torch.dtype,
    scale: float,
    threshold: float | None,
    straight_through: float,
    dropout: float,
    tolerance: float | None,
    score_bound: float | None,
) -> None:
    """`threshold` and `score_bound` are None where they are tensors."""
    numbers = (("scale", scale), ("straight_through", straight_through), ("dropout", dropout))
    optional = (("threshold", threshold), ("tolerance", tolerance), ("score_bound", score_bound))
    for name, number in (*numbers, *((name, number) for name, number in optional if number is not None)):
        if not isinstance(number, NUMBERS):
            raise ValueError(f"{name} must be a number, got {type(number).__name__}")
    # Comparisons, not math.isfinite: under torch.compile a number may be symbolic.
    if not 0.0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    if threshold is not None and not -math.inf < threshold < math.inf:
        raise ValueError(f"threshold must be a finite number, got {threshold!r}")
    if not (straight_through == 0.0 or COLDEST <= straight_through < math.inf):
        raise ValueError(f"straight_through must be 0 or a temperature of at least {COLDEST}, got {straight_through!r}")
    if dtype != torch.float64:
        held = (("scale", scale), ("threshold", threshold or 0.0), ("straight_through", straight_through))
        for name, number in held:
            if not -LARGEST <= number <= LARGEST:
                raise ValueError(f"{name} must be a number that torch.float32 can hold, got {number!r}")
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be a probability in [0, 1), got {dropout!r}")
    if tolerance is not None and not 0.0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be None or a number of at least 0, got {tolerance!r}")
    if score_bound is not None and not 0.0 < score_bound < math.inf:
        raise ValueError(f"score_bound must be None or a positive number, got {score_bound!r}")


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)

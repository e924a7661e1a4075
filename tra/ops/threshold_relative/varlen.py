"""Sequences of different lengths behind one another, as FlashAttention takes them."""

from typing import Any

import torch
from torch import Tensor

from tra.ops.threshold_relative.api import threshold_relative_attention


def threshold_relative_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    threshold: float | Tensor = 0.0,
    **options: Any,
) -> Tensor:
    """:func:`threshold_relative_attention` of sequences packed without padding, in FlashAttention's conventions.

    Sequence n has the queries ``cu_seqlens_q[n]`` to ``cu_seqlens_q[n + 1]`` and the keys between the same places of
    ``cu_seqlens_k``. Within each sequence the last query is aligned with the last key: fewer queries than keys is
    decoding. Where queries and keys have the same lengths it is one call, and no tensor is copied; otherwise it is one
    call for each sequence.

    Args:
        query: ``[total queries, Hq, D]``.
        key: ``[total keys, Hkv, D]``.
        value: ``[total keys, Hkv, Dv]``.
        log_gate: ``[total queries, Hq]``, never positive.
        cu_seqlens_q: ``[sequences + 1]`` int32 or int64, from 0 to the total, never falling.
        cu_seqlens_k: the same for keys.
        max_seqlen_q: the longest sequence of queries, which FlashAttention needs; here it is only checked.
        max_seqlen_k: the same for keys.
        threshold: a number, or a tensor that broadcasts to ``[total queries, Hq]``.
        options: the other keyword arguments of :func:`threshold_relative_attention`, but for ``key_mask`` and
            ``segment_ids``. A ``score_bound`` is a number here.

    Returns:
        ``[total queries, Hq, Dv]``.

    Example:
        >>> query, key, value = torch.randn(3, 16, 4, 8).unbind(0)  # two sequences, of 10 and 6 tokens
        >>> log_gate = torch.nn.functional.logsigmoid(torch.randn(16, 4))
        >>> lengths = torch.tensor([0, 10, 16], dtype=torch.int32)
        >>> threshold_relative_attention_varlen(query, key, value, log_gate, lengths, lengths).shape
        torch.Size([16, 4, 8])
    """
    for name in ("key_mask", "segment_ids"):
        if name in options:
            raise ValueError(f"{name} must not be given: cu_seqlens_q and cu_seqlens_k say what belongs together")
    if isinstance(options.get("score_bound"), Tensor):
        raise ValueError("score_bound must be a number or None, got a tensor")
    for name, tensor, shape in (
        ("query", query, "[total queries, Hq, D]"),
        ("key", key, "[total keys, Hkv, D]"),
        ("value", value, "[total keys, Hkv, Dv]"),
        ("log_gate", log_gate, "[total queries, Hq]"),
    ):
        if not isinstance(tensor, Tensor) or tensor.dim() != shape.count(",") + 1:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{name} must be a tensor {shape}, got {got}")
    segments = segments_of_lengths(cu_seqlens_q, query.shape[0], "cu_seqlens_q")
    segments_of_lengths(cu_seqlens_k, key.shape[0], "cu_seqlens_k")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_k must hold as many sequences as cu_seqlens_q, {len(cu_seqlens_q) - 1}, "
            f"got {len(cu_seqlens_k) - 1}"
        )
    for name, longest, lengths in (
        ("max_seqlen_q", max_seqlen_q, cu_seqlens_q),
        ("max_seqlen_k", max_seqlen_k, cu_seqlens_k),
    ):
        if longest is not None and longest < (found := int(lengths.diff().max())):
            raise ValueError(f"{name} must be at least the longest sequence, {found}, got {longest}")
    if isinstance(threshold, Tensor):
        threshold = threshold.expand(query.shape[:2])
    if cu_seqlens_q is cu_seqlens_k or torch.equal(cu_seqlens_q, cu_seqlens_k):
        whole = (slice(None), slice(None))
        return _called(query, key, value, log_gate, threshold, whole, {**options, "segment_ids": segments[None]})
    begins, begins_of_keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    parts = []
    for index in range(len(begins) - 1):
        places = (slice(*begins[index : index + 2]), slice(*begins_of_keys[index : index + 2]))
        parts.append(_called(query, key, value, log_gate, threshold, places, options))
    return torch.cat(parts)


def segments_of_lengths(begins: Tensor, tokens: int, argument: str) -> Tensor:
    """The sequence of each token ``[tokens]``, from where each begins and the last one ends ``[sequences + 1]``."""
    if not isinstance(begins, Tensor) or begins.dim() != 1 or begins.dtype not in (torch.int32, torch.int64):
        got = f"{begins.dtype} {list(begins.shape)}" if isinstance(begins, Tensor) else type(begins).__name__
        raise ValueError(f"{argument} must be an int32 or int64 tensor [sequences + 1], got {got}")
    # While compiling, the data cannot decide.
    if not torch.compiler.is_compiling() and not _rises(begins, tokens):
        raise ValueError(f"{argument} must rise from 0 to the {tokens} tokens, got {begins.tolist()}")
    places = torch.arange(tokens, device=begins.device, dtype=begins.dtype)
    return torch.searchsorted(begins[1:].contiguous(), places, right=True)


def _rises(begins: Tensor, tokens: int) -> bool:
    return bool(len(begins) > 1 and begins[0] == 0 and begins[-1] == tokens and (begins.diff() >= 0).all())


def _called(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    threshold: float | Tensor,
    places: tuple[slice, slice],
    options: dict[str, Any],
) -> Tensor:
    """The operator on some of the tokens, as views with a batch of 1."""
    queries, keys = places
    out = threshold_relative_attention(
        query[queries].transpose(0, 1)[None],
        key[keys].transpose(0, 1)[None],
        value[keys].transpose(0, 1)[None],
        log_gate[queries].T[None],
        threshold=threshold[queries].T[None] if isinstance(threshold, Tensor) else threshold,
        **options,
    )
    return out[0].transpose(0, 1)

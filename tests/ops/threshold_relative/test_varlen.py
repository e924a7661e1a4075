"""Sequences behind one another give what each of them gives alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tra import threshold_relative_attention, threshold_relative_attention_varlen

LENGTHS = [5, 0, 17, 1, 40]


def inputs(queries: list[int], keys: list[int]) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(3)
    shapes = ((sum(queries), 4, 8), (sum(keys), 2, 8), (sum(keys), 2, 6), (sum(queries), 4))
    query, key, value, gate = (torch.randn(shape) for shape in shapes)
    tensors = [query, key, value, F.logsigmoid(gate)]
    lengths = (torch.tensor([0, *torch.tensor(each).cumsum(0).tolist()], dtype=torch.int32) for each in (queries, keys))
    return [x.requires_grad_() for x in tensors], dict(zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True))


def alone(tensors: list[Tensor], queries: list[int], keys: list[int], threshold: Any, **options: Any) -> Tensor:
    """Each sequence in a call of its own."""
    parts = zip(*(x.split(queries if place in (0, 3) else keys) for place, x in enumerate(tensors)), strict=True)
    limits = threshold.split(queries) if isinstance(threshold, Tensor) else [threshold] * len(queries)
    found = []
    for part, limit in zip(parts, limits, strict=True):
        limit = limit.T[None] if isinstance(limit, Tensor) else limit
        part = [x.movedim(0, 1)[None] for x in part]
        found.append(threshold_relative_attention(*part, threshold=limit, **options)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("queries", [LENGTHS, [1, 0, 3, 1, 40]], ids=["same", "fewer"])
@pytest.mark.parametrize("learned", [False, True])
def test_each_sequence_is_as_it_is_alone(impl: str, queries: list[int], learned: bool) -> None:
    tensors, lengths = inputs(queries, LENGTHS)
    threshold = torch.randn(sum(queries), 4, requires_grad=True) if learned else 0.1
    options = {"impl": impl, "straight_through": 0.5 if learned else 0.0, "scale": 0.4}
    found = threshold_relative_attention_varlen(*tensors, **lengths, threshold=threshold, **options)
    expected = alone(tensors, queries, LENGTHS, threshold, **options)
    assert found.shape == (sum(queries), 4, 6)
    torch.testing.assert_close(found, expected)
    learn = [*tensors, threshold] if isinstance(threshold, Tensor) else tensors
    weight = torch.randn_like(found)
    gradients = [torch.autograd.grad((out * weight).sum(), learn) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_same_lengths_are_one_call_on_views() -> None:
    """Nothing is copied on the way to the operator."""
    tensors, lengths = inputs(LENGTHS, LENGTHS)
    with torch.no_grad(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        threshold_relative_attention_varlen(*tensors, **lengths, max_seqlen_q=40, max_seqlen_k=40)
    names = [event.name for event in profile.events()]
    assert sum(name.startswith("tra::threshold_relative_attention") for name in names) == 1
    assert not {"aten::clone", "aten::cat"} & set(names)


def test_wrong_arguments_are_named() -> None:
    tensors, lengths = inputs(LENGTHS, LENGTHS)
    good: dict[str, Any] = {**dict(zip(("query", "key", "value", "log_gate"), tensors, strict=True)), **lengths}
    for wrong, message in (
        ({"query": tensors[0][None]}, r"query must be a tensor \[total queries, Hq, D\], got \[1, 63, 4, 8\]"),
        ({"log_gate": None}, r"log_gate must be a tensor \[total queries, Hq\], got NoneType"),
        ({"cu_seqlens_q": torch.tensor([0, 5, 62])}, "cu_seqlens_q must rise from 0 to the 63 tokens"),
        ({"cu_seqlens_k": torch.tensor([0, 70, 63])}, "cu_seqlens_k must rise from 0 to the 63 tokens"),
        ({"cu_seqlens_k": torch.tensor([0.0, 63.0])}, "cu_seqlens_k must be an int32 or int64 tensor"),
        ({"cu_seqlens_k": torch.tensor([0, 63])}, "cu_seqlens_k must hold as many sequences as cu_seqlens_q, 5, got 1"),
        ({"max_seqlen_q": 39}, "max_seqlen_q must be at least the longest sequence, 40, got 39"),
        ({"segment_ids": torch.zeros(1, 63)}, "segment_ids must not be given"),
        ({"score_bound": torch.ones(63, 4)}, "score_bound must be a number or None"),
    ):
        with pytest.raises(ValueError, match=message):
            threshold_relative_attention_varlen(**{**good, **wrong})
    with pytest.raises(ValueError, match="query must not be longer than key"):
        threshold_relative_attention_varlen(**{**good, "cu_seqlens_k": torch.tensor([0, 4, 4, 22, 23, 63])})

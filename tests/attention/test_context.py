"""What comes with the tokens of a call, and what is said when it does not belong to them."""

from typing import Any

import pytest
import torch

from tra.attention import Cache, Context, ThresholdRelativeAttention


def build() -> ThresholdRelativeAttention:
    return ThresholdRelativeAttention(16, 2).eval()


@pytest.mark.parametrize(
    "x, message",
    [
        (torch.zeros(2, 5, 15), r"x must have the shape \[B, L, 16\], got \[2, 5, 15\]"),
        (torch.zeros(5, 16), r"x must have the shape \[B, L, 16\], got \[5, 16\]"),
        (torch.zeros(2, 5, 16).long(), "x must be floating point, got torch.int64"),
        ([[1.0] * 16], r"x must be a tensor \[B, L, 16\], got list"),
    ],
)
def test_a_wrong_input_is_named(x: Any, message: str) -> None:
    for call in (build(), build().weights):
        with pytest.raises(ValueError, match=message):
            call(x)


def test_something_else_than_a_context_is_named() -> None:
    x = torch.zeros(2, 5, 16)
    for wrong, kind in ((torch.ones(2, 5).bool(), "Tensor"), (Cache(), "Cache"), ((None, None), "tuple")):
        with pytest.raises(ValueError, match=f"context must be a Context, got {kind}"):
            build()(x, wrong)


def test_the_caches_of_a_whole_decoder_are_not_those_of_a_layer() -> None:
    with pytest.raises(ValueError, match="cache must be the Cache of one layer, got a list"):
        build()(torch.zeros(2, 5, 16), Context(cache=[Cache(), Cache()]))


def test_a_call_leaves_the_context_as_it_was() -> None:
    """It may be used again with other tokens, and is checked again then."""
    attention, context = build(), Context(key_mask=torch.ones(2, 5, dtype=torch.bool))
    with torch.no_grad():
        attention(torch.zeros(2, 5, 16), context)
    with pytest.raises(ValueError, match=r"key_mask must have the shape \[B, Lk\] = \[2, 6\], got \[2, 5\]"):
        attention(torch.zeros(2, 6, 16), context)

"""1.5-entmax (Peters et al. 2019, arXiv 1905.05702): a softmax whose small weights are exactly 0."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

STEPS = 10
"""Of Newton's method. Eight reach the rounding of float64 on every distribution of 65,536 scores that was tried."""


def dense_entmax(logits: Tensor, visible: Tensor) -> Tensor:
    """Weights over the visible keys; exactly 0 elsewhere and where a query sees no key."""
    weights = _Entmax.apply(logits.masked_fill(~visible, torch.finfo(logits.dtype).min))
    return weights.masked_fill(~visible, 0.0)


class _Entmax(torch.autograd.Function):
    """p = max(z / 2 - t, 0)^2 over the last dimension, with t such that p sums to 1."""

    @staticmethod
    def forward(logits: Tensor) -> Tensor:
        # With the largest at 0, t is at least -1, where that alone sums to 1: what lies lower has no weight.
        half = ((logits - logits.amax(dim=-1, keepdim=True)) / 2.0).clamp(min=-1.0)
        threshold = torch.full_like(half[..., :1], -1.0)
        # The norm of max(z / 2 - t, 0) is convex and falls with t, so Newton's steps to where it is 1 never pass t.
        for _ in range(STEPS):
            root = (half - threshold).relu()
            norm = root.norm(dim=-1, keepdim=True)
            threshold = threshold + (norm - 1.0) * norm / root.sum(dim=-1, keepdim=True)
        return (half - threshold).relu().square()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        root = weights.sqrt()
        mean = (grad * root).sum(dim=-1, keepdim=True) / root.sum(dim=-1, keepdim=True)
        return root * (grad - mean)

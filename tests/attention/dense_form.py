"""TRA with gradients that pass the threshold, as matrices and autograd: quadratic in memory, no formulas of its own."""

import torch
from torch import Tensor


def straight_through_attention(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor, threshold: Tensor, temperature: float
) -> Tensor:
    """``[B, Hq, L, D]``, differentiable in all tensors; ``threshold [B, Hq, L]``.

    Which keys are kept is a step of the score, which passes no gradient (Bengio et al. 2013, arXiv 1308.3432). In
    backward alone it is ``sigmoid((score - threshold) / temperature)``, in the weights and in the counts alike.
    """
    group, limit = query.shape[1] // key.shape[1], threshold[..., None]
    scores = query @ key.repeat_interleave(group, dim=1).mT / query.shape[3] ** 0.5
    visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    kept = (scores > limit) & visible
    soft = torch.sigmoid((scores - limit) / temperature).masked_fill(~visible, 0.0)
    member = kept + (soft - soft.detach())  # 0 or 1
    # The distance less one, which softmax does not notice; of a key that is left out, as if it were kept.
    logits = scores + log_gate[..., None] * (member.flip(-1).cumsum(-1).flip(-1) - kept.to(scores.dtype))
    # No key that is left out has a larger logit than the nearest kept one, so that no exponential exceeds 1.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    weights = member * (logits - logits.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0.0, 1.0) @ value.repeat_interleave(group, dim=1)

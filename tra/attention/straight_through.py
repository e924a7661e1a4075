"""An aid to the training of TRA, ours: the gradient that the threshold stops passes as if it were a sigmoid."""

import torch
from torch import Tensor

from tra.attention.dense import sum_from_right


def straight_through_weights(
    scores: Tensor, log_gate: Tensor, visible: Tensor, threshold: float, temperature: float
) -> Tensor:
    """The weights of TRA ``[B, H, Lq, Lk]``, with a gradient through which keys are kept and how many.

    Which keys are kept is a step of the score, which passes no gradient (Bengio et al. 2013, arXiv 1308.3432). In
    backward alone it is ``sigmoid((score - threshold) / temperature)``, in the weights and in the counts alike, so that
    a key that is left out learns what it would bring, and one that is kept what it costs those behind it.

    Args:
        scores: ``[B, H, Lq, Lk]``.
        log_gate: ``[B, H, Lq]``, never positive.
        visible: which keys each query may see, broadcast to the scores.
        threshold: a key is kept when its score is greater.
        temperature: how far from the threshold keys still learn.
    """
    kept = (scores > threshold) & visible
    soft = torch.sigmoid((scores - threshold) / temperature).masked_fill(~visible, 0.0)
    member = kept + (soft - soft.detach())  # 0 or 1
    # The distance less one, which softmax does not notice; of a key that is left out, as if it were kept.
    logits = scores + log_gate.to(scores.dtype)[..., None] * (sum_from_right(member) - kept.to(scores.dtype))
    # No key that is left out has a larger logit than the nearest kept one, so that no exponential exceeds 1.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    weights = member * (logits - logits.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0.0, 1.0)

"""TRA with gradients that pass the threshold, as matrices and autograd: quadratic in memory, no formulas of its own.

Which keys are kept is a step of the score. In backward alone it is a sigmoid (Bengio et al. 2013, arXiv 1308.3432), in
the weights and in the counts alike.
"""

import math

import torch
from torch import Tensor


def straight_through_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    threshold: Tensor,
    temperature: float,
    visible: Tensor | None = None,
    scale: float | None = None,
    dropout_factor: Tensor | None = None,
) -> Tensor:
    """The output in the dtype of its inputs, differentiable in all of them.

    Args:
        threshold: one number for each row, ``[B, Hq, Lq]``.
        visible: ``[B, 1, Lq, Lk]`` or alike; by default all keys up to the query, the last query at the last key.
        dropout_factor: ``[B, Hq, Lq, Lk]``, what each weight is multiplied by after it is normalised.
    """
    queries, keys, group = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    visible = causal if visible is None else visible & causal
    scores = query @ key.mT * (1.0 / math.sqrt(query.shape[3]) if scale is None else scale)
    kept = (scores > threshold[..., None]) & visible
    soft = torch.sigmoid((scores - threshold[..., None]) / temperature).masked_fill(~visible, 0.0)
    member = kept + (soft - soft.detach())  # 0 or 1
    count = member.flip(-1).cumsum(-1).flip(-1)
    # The distance less one, which softmax does not notice; of a key that is left out, as if it were kept.
    logits = scores + log_gate[..., None] * (count - kept.to(scores.dtype))
    # No key that is left out has a larger logit than the nearest kept one, so that no exponential exceeds 1.
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    weights = member * (logits - logits.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.where(total > 0.0, 1.0)
    return (weights if dropout_factor is None else weights * dropout_factor) @ value

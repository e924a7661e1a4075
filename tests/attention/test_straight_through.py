"""The operator's gradient through the threshold: against differences, with membership as a number that can be moved.

Keys of an identity matrix make a query the row of its scores, and such values make the output the row of its weights.
"""

import torch
from torch import Tensor
from torch.testing import assert_close

from tra.ops import threshold_relative_attention

LENGTH, TEMPERATURE, THRESHOLD = 11, 0.7, 0.2


def straight_through_weights(scores: Tensor, log_gate: Tensor, threshold: float | Tensor) -> Tensor:
    """The weights of one head: ``[1, 1, Lq, L]`` of as many scores and gates ``[1, 1, Lq]``."""
    identity = torch.eye(scores.shape[3], dtype=torch.float64)[None, None]
    return threshold_relative_attention(
        scores, identity, identity, log_gate, scale=1.0, threshold=threshold, straight_through=TEMPERATURE
    )


def relaxed(scores: Tensor, log_gate: Tensor, member: Tensor, kept: Tensor) -> Tensor:
    """The paper's weights of one head, row by row, where membership need not be 0 or 1."""
    rows = []
    for i in range(LENGTH):
        weights = []
        for j in range(i + 1):
            count = member[i, j : i + 1].sum() + (0 if kept[i, j] else 1)
            weights.append(member[i, j] * torch.exp(scores[i, j] + log_gate[i] * count))
        total = torch.stack(weights).sum()
        rows.append(torch.stack([*weights, *[torch.zeros_like(total)] * (LENGTH - i - 1)]) / total)
    return torch.stack(rows)


def test_the_gradient_is_that_of_membership_moved_by_a_sigmoid() -> None:
    scores = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    scores.diagonal().abs_().add_(THRESHOLD)  # every query keeps a key
    log_gate = -torch.rand(LENGTH, dtype=torch.float64)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    upstream = torch.randn(LENGTH, LENGTH, dtype=torch.float64)
    kept = (scores > THRESHOLD) & visible
    assert 20 < kept.sum() < visible.sum() - 20

    def loss(scores: Tensor, log_gate: Tensor, member: Tensor) -> float:
        return float((relaxed(scores, log_gate, member, kept) * upstream).sum())

    def differences(inputs: list[Tensor], place: int, step: float = 1e-6) -> Tensor:
        found = torch.zeros_like(inputs[place])
        for index in range(found.numel()):
            ends = []
            for sign in (1, -1):
                moved = [x.clone() for x in inputs]
                moved[place].view(-1)[index] += sign * step
                ends.append(loss(*moved))
            found.view(-1)[index] = (ends[0] - ends[1]) / (2 * step)
        return found

    inputs = [scores, log_gate, kept.double()]
    by_score, by_gate, by_member = (differences(inputs, place) for place in range(3))
    sigmoid = torch.sigmoid((scores - THRESHOLD) / TEMPERATURE)
    expected = by_score + by_member * sigmoid * (1 - sigmoid) / TEMPERATURE

    leaves = [x.clone()[None, None].requires_grad_() for x in (scores, log_gate)]
    threshold = torch.full((1, 1, LENGTH), THRESHOLD, dtype=torch.float64, requires_grad=True)
    weights = straight_through_weights(*leaves, threshold)
    assert_close(weights[0, 0].detach(), relaxed(*inputs, kept))
    (weights * upstream).sum().backward()
    grads = [leaf.grad[0, 0] for leaf in leaves if leaf.grad is not None]
    assert_close(grads[0], expected.masked_fill(~visible, 0.0), rtol=1e-5, atol=1e-7)
    assert_close(grads[1], by_gate, rtol=1e-5, atol=1e-7)
    assert grads[0][visible & ~kept].abs().min() > 0  # where the published rule has no gradient at all
    # A threshold moves membership as all scores of its row together do, and nothing else.
    by_threshold = -(expected - by_score).masked_fill(~visible, 0.0).sum(-1)
    assert_close(threshold.grad, by_threshold[None, None], rtol=1e-5, atol=1e-7)


def test_a_query_that_keeps_nothing_learns_what_each_key_would_bring() -> None:
    """Its weights are 0; the first key to be kept would have all the weight, less what lies behind nearer ones."""
    scores = -torch.rand(1, 1, 1, 5, dtype=torch.float64) - 0.1
    scores[0, 0, 0, 2] = -0.05  # the largest
    log_gate = torch.full((1, 1, 1), -0.3, dtype=torch.float64)
    leaf = scores.clone().requires_grad_()
    weights = straight_through_weights(leaf, log_gate, 0.0)
    assert (weights == 0).all()
    upstream = torch.randn(5, dtype=torch.float64)
    (weights * upstream).sum().backward()
    sigmoid = torch.sigmoid(scores / TEMPERATURE)
    expected = upstream * (scores + 0.05).exp() * sigmoid * (1 - sigmoid) / TEMPERATURE
    assert_close(leaf.grad, expected)
    assert (expected != 0).all()

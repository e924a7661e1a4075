"""1.5-entmax against the `entmax` package, by Peters et al. 2019 (arXiv 1905.05702)."""

import pytest
import torch
from entmax import entmax15
from torch import Tensor
from torch.testing import assert_close

from tra.attention.entmax import dense_entmax


def everything(logits: Tensor) -> Tensor:
    return torch.ones_like(logits, dtype=torch.bool)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("keys", [1, 2, 63, 5000])
def test_weights_and_gradients_are_those_of_the_package(keys: int, scale: float) -> None:
    logits = (torch.randn(7, keys, dtype=torch.float64) * scale).requires_grad_()
    ours, theirs = dense_entmax(logits, everything(logits)), entmax15(logits, dim=-1)
    assert_close(ours, theirs, rtol=1e-9, atol=1e-13)
    assert torch.equal(ours == 0, theirs == 0)
    grad = torch.randn_like(ours)
    found, expected = (torch.autograd.grad(weights, logits, grad)[0] for weights in (ours, theirs))
    assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_gradients_are_those_of_finite_differences() -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: dense_entmax(x, everything(x)), logits)


@pytest.mark.parametrize("kind", ["powers", "counts", "one far above", "equal"])
def test_newton_has_arrived_after_its_steps(kind: str) -> None:
    """On scores that lie on many scales. Many weights far below the largest round alike: their sum is off by 2e-4."""
    keys, rank = 65_536, torch.arange(1, 65_537)
    logits = {
        "powers": -2.0 * torch.rand(keys) ** 0.1,
        "counts": 2.0 * rank ** (-1 / 3),
        "one far above": torch.where(rank == 1, 1.9, 0.0),
        "equal": torch.zeros(keys),
    }[kind][None]
    found = dense_entmax(logits, everything(logits))
    assert found.dtype == torch.float32
    assert_close(found.double(), entmax15(logits.double(), dim=-1), rtol=1e-3, atol=1e-7)
    assert found.double().sum().item() == pytest.approx(1.0, abs=5e-4)


def test_hidden_keys_weigh_nothing_and_pass_no_gradient() -> None:
    logits = torch.randn(4, 11, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(4, 11) < 0.5
    visible[0], visible[1] = False, True
    weights = dense_entmax(logits, visible)
    for row in range(1, 4):
        assert_close(weights[row, visible[row]], entmax15(logits[row, visible[row]], dim=-1))
    weights.square().sum().backward()
    assert logits.grad is not None
    for x in (weights, logits.grad):
        assert (x[~visible] == 0).all()
    assert (weights[0] == 0).all()


def test_a_second_derivative_is_refused() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(dense_entmax(logits, everything(logits)).square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()

"""The ablations of TRA against the equations of Opper et al. 2025 (arXiv 2503.23174) less one part each, as loops."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tra.attention.ablations import DistanceOnlyAttention, OrdinaryDistanceAttention, ThresholdOnlyAttention
from tra.attention.threshold_relative import ThresholdRelativeAttention

WIDTH, HEADS, LENGTH = 24, 4, 14
HEAD = WIDTH // HEADS
ABLATIONS = [ThresholdOnlyAttention, DistanceOnlyAttention, OrdinaryDistanceAttention]


def heads(x: Tensor, projection: nn.Linear, normalise: bool) -> Tensor:
    projected = (x @ projection.weight.T).reshape(len(x), -1, HEAD)
    return projected / projected.square().mean(-1, keepdim=True).sqrt() if normalise else projected


def logits_of_kept(ablation: type, score: list[float], gate: float) -> dict[int, float]:
    """For the last query of so many scores: each kept key and its logit."""
    i = len(score) - 1
    if ablation is ThresholdOnlyAttention:
        return {j: s for j, s in enumerate(score) if s > 0}
    if ablation is DistanceOnlyAttention:
        return {j: s + gate * (i - j + 1) for j, s in enumerate(score)}
    return {j: s + gate * (i - j + 1) for j, s in enumerate(score) if s > 0}


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("ablation", ABLATIONS)
@torch.no_grad()
def test_equals_the_loop_from_projections_to_output(ablation: type, kv_heads: int) -> None:
    module = ablation(WIDTH, HEADS, kv_heads).double().eval()
    x = torch.randn(LENGTH, WIDTH, dtype=torch.float64)
    query, key, value = heads(x, module.query, True), heads(x, module.key, True), heads(x, module.value, False)
    gate = torch.zeros(LENGTH, HEADS)
    if ablation is not ThresholdOnlyAttention:
        gate = torch.sigmoid(x @ module.gate.weight.T + module.gate.bias).log()
    weights, mixed, empty = torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.float64), torch.zeros_like(x), 0
    for h in range(HEADS):
        group = h // (HEADS // kv_heads)
        for i in range(LENGTH):
            score = [float(query[i, h] @ key[j, group]) / math.sqrt(HEAD) for j in range(i + 1)]
            logits = logits_of_kept(ablation, score, gate[i, h].item())
            empty += not logits
            total = sum(math.exp(logit) for logit in logits.values())
            for j, logit in logits.items():
                weights[h, i, j] = math.exp(logit) / total
                mixed[i, h * HEAD : (h + 1) * HEAD] += weights[h, i, j] * value[j, group]
    assert (empty > 0) == (ablation is not DistanceOnlyAttention)
    assert_close(module.weights(x[None])[0], weights)
    assert_close(module(x[None])[0], mixed @ module.output.weight.T + module.output.bias)


@pytest.mark.parametrize("ablation", ABLATIONS)
@torch.no_grad()
def test_differs_from_tra_with_the_same_parameters(ablation: type) -> None:
    tra, module = ThresholdRelativeAttention(WIDTH, HEADS).double(), ablation(WIDTH, HEADS).double()
    own = module.state_dict()
    module.load_state_dict({name: tensor for name, tensor in tra.state_dict().items() if name in own})
    assert set(tra.state_dict()) - set(own) == ({"gate.weight", "gate.bias"} if "gate.bias" not in own else set())
    assert ("gate.bias" in own) == (ablation is not ThresholdOnlyAttention)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    assert (module(x) - tra(x)).abs().max() > 0.01


def assert_native_is_right(module: DistanceOnlyAttention, x: Tensor) -> None:
    """Output and gradient of the float32 kernel against the float64 module, relative to the largest number."""
    results = []
    for dtype in (torch.float32, torch.float64):
        module.to(dtype).impl = "cpu" if dtype == torch.float32 else "reference"
        leaf = x.to(dtype).requires_grad_()
        out = module(leaf)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaf)))
    for single, double in zip(*results, strict=True):
        assert (single - double).abs().max() < 1e-4 * double.abs().max()


@pytest.mark.parametrize("bias", [0.0, 5.0, 12.0])
def test_native_kernel_is_right_without_a_threshold(bias: float) -> None:
    module = DistanceOnlyAttention(16, 1)
    nn.init.constant_(module.gate.bias, bias)
    assert_native_is_right(module, torch.randn(1, 3000, 16))


@pytest.mark.parametrize("tolerance", [None, 1e-3])
@pytest.mark.parametrize("bias", [3.0, 5.0])
def test_early_stopping_does_not_miss_a_far_key_behind_many_with_negative_scores(
    bias: float, tolerance: float | None
) -> None:
    """Keys are the negated queries: those of the same kind, near, score as low as can be, and the others as high."""
    module = DistanceOnlyAttention(16, 1, tolerance=tolerance)
    for projection, factor in ((module.query, 1), (module.key, -1), (module.value, 1), (module.output, 1)):
        projection.weight.data = factor * torch.eye(16)
    nn.init.zeros_(module.output.bias)
    nn.init.zeros_(module.gate.weight)
    nn.init.constant_(module.gate.bias, bias)
    kind = torch.arange(3000)[:, None] // 200 % 2 * 2 - 1
    x = kind * (1.0 + 0.1 * torch.randn(1, 3000, 16))
    if tolerance is None:
        assert_native_is_right(module, x)
    else:
        with torch.no_grad():
            stopped = module(x)
            module.tolerance = 0.0
            every_key = module(x)
            expected = module.double()(x.double())
        assert not torch.equal(stopped, every_key), "it does stop"
        assert (stopped - expected).abs().max() <= tolerance * x.abs().max()

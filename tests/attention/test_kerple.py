"""KERPLE against Chi et al. 2022 (arXiv 2205.09921, equation of the logarithmic kernel) written out in loops."""

import math

import torch
from torch.testing import assert_close

from tra.attention.kerple import LEAST, KernelBiasAttention


@torch.no_grad()
def test_output_equals_the_loops() -> None:
    attention = KernelBiasAttention(8, 2).double().eval()
    attention.slope.copy_(torch.tensor([1.5, -3.0]))  # the second is held at the least
    attention.rate.copy_(torch.tensor([0.001, 0.7]))
    x = torch.randn(30, 8, dtype=torch.float64)
    mixed = torch.zeros_like(x)
    for own, r1, r2 in ((slice(0, 4), 1.5, 0.01), (slice(4, 8), 0.01, 0.7)):
        query, key = (x @ attention.query.weight.T)[:, own], (x @ attention.key.weight.T)[:, own]
        query, key = (y / y.square().mean(-1, keepdim=True).sqrt() for y in (query, key))
        value = (x @ attention.value.weight.T)[:, own]
        for i in range(30):
            raw = [math.exp(query[i] @ key[j] / math.sqrt(4)) * (1 + r2 * (i - j)) ** -r1 for j in range(i + 1)]
            for j in range(i + 1):
                mixed[i, own] += raw[j] / sum(raw) * value[j]
    assert_close(attention(x[None])[0], mixed @ attention.output.weight.T + attention.output.bias)


def test_parameters_start_as_in_the_authors_code_and_can_leave_the_limit() -> None:
    attention = KernelBiasAttention(512, 256)
    for parameter, most in ((attention.slope, 2.0), (attention.rate, 1.0)):
        assert 0.0 <= parameter.min() < 0.1 * most
        assert 0.9 * most < parameter.max() <= most
    with torch.no_grad():
        attention.slope.fill_(-1.0)
    attention(torch.randn(1, 9, 512)).square().sum().backward()
    assert attention.slope.grad is not None
    assert (attention.slope.grad != 0).any(), f"what is held at {LEAST} has a gradient"

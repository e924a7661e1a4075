"""Measuring cases side by side, after a check that the kernel's results are right."""

from collections.abc import Iterable

import torch

from tra.bench.cases import Case, Comparison
from tra.bench.timing import interleaved
from tra.errors import RunError
from tra.ops import threshold_relative_attention
from tra.progress import say


def check_kernel(impl: str = "auto", device: str = "cpu") -> None:
    """Compare an implementation with the reference, forward and backward, on scores that are exact."""
    rng = torch.Generator().manual_seed(0)
    shape = (1, 2, 150, 16)
    query, key = (torch.randint(-1, 2, shape, generator=rng).float() for _ in range(2))
    value, gate = torch.randn(shape, generator=rng), -torch.rand(shape[:3], generator=rng)
    results = []
    for which in (impl, "reference"):
        leaves = [x.clone().to(device).requires_grad_() for x in (query, key, value, gate)]
        out = threshold_relative_attention(*leaves, impl=which)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for ours, right in zip(*results, strict=True):
        if not torch.allclose(ours, right, rtol=1e-4, atol=1e-4):
            raise RunError("no figures: the kernel's results differ from the reference's")


def measured_rows(chosen: Iterable[Case], seconds: float) -> list[Comparison]:
    """A row for everything that a case is compared with."""
    rows = []
    for case in chosen:
        for place, (against, prepare) in enumerate(case.others.items()):
            mine, other = interleaved(case.ours(), prepare(), seconds)
            goal = case.goal if place == 0 else None
            rows.append(Comparison(case.what, case.shape, against, mine / case.repeats * 1e3, other * 1e3, goal))
            say(str(rows[-1]))
    return rows

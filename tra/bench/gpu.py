"""`tra bench --device cuda`: attention on a GPU against FlashAttention, FlexAttention and the paper's listing."""

import shlex
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tra.bench.cases import Case, Prepare
from tra.bench.compare import check_kernel, measured_rows
from tra.bench.timing import Work
from tra.bench.workloads import BOUND, Rule, attention, papers_listing
from tra.environment import environment
from tra.files import write_json
from tra.ops import threshold_relative_attention

SHAPES = ((8, 16, 1024), (2, 16, 4096), (1, 16, 16384), (1, 8, 65536))
"""Batch, heads and tokens."""
LISTED = 4096
"""Tokens up to which the paper's listing, which holds matrices, is measured."""
BATCHES, HEADS, CACHED = (1, 16), 16, (4096, 65536)
"""Of decoding."""


def gpu_cases(device: str, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Forward and backward with and without the early stop, and decoding."""
    for backward in (False, True):
        for shape in SHAPES:
            for how, tolerance in (("every key", 0.0), ("default tolerance", None)):
                if tolerance is None or shape[2] <= 16384:
                    yield _attention(device, dtype, how, shape, tolerance, backward)
    for batch in BATCHES:
        for cached in CACHED:
            yield _decoding(device, dtype, batch, cached)


def ours(tolerance: float | None) -> Rule:
    return partial(threshold_relative_attention, tolerance=tolerance, score_bound=BOUND, impl="triton")


def flex(compiled: Callable[[Rule], Rule], device: str, length: int) -> Rule:
    """Causal FlexAttention, which is meant to be compiled."""

    def causal(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    return partial(compiled(flex_attention), block_mask=create_block_mask(causal, None, None, length, length, device))


def listing(query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor) -> Tensor:
    """The paper's, with products in the dtype of the queries."""
    with torch.autocast(query.device.type, query.dtype):
        return papers_listing(query, key, value, log_gate)


def _attention(
    device: str, dtype: torch.dtype, how: str, shape: tuple[int, int, int], tolerance: float | None, backward: bool
) -> Case:
    batch, heads, length = shape

    def prepare(rule: Rule, gated: bool = True) -> Work:
        return attention(rule, batch, heads, length, length, backward=backward, gated=gated, device=device, dtype=dtype)

    # A device without a compiler of its own is a stand-in for one.
    compiled: Callable[[Rule], Rule] = (lambda rule: rule) if device == "cpu" else torch.compile
    others: dict[str, Prepare] = {
        "SDPA": lambda: prepare(partial(F.scaled_dot_product_attention, is_causal=True), gated=False),
        "FlexAttention": lambda: prepare(flex(compiled, device, length), gated=False),
    }
    if length <= LISTED:
        others["paper, eager"] = lambda: prepare(listing)
        others["paper, compiled"] = lambda: prepare(compiled(listing))
    what = f"{'forward + backward' if backward else 'forward'}, {how}"
    return Case(what, "x".join(map(str, shape)), lambda: prepare(ours(tolerance)), others)


def _decoding(device: str, dtype: torch.dtype, batch: int, cached: int) -> Case:
    prepare = partial(attention, batch=batch, heads=HEADS, queries=1, keys=cached, device=device, dtype=dtype)
    return Case(
        "decode one token",
        f"{batch}x{HEADS}x{cached}",
        lambda: prepare(ours(None)),
        {"SDPA": lambda: prepare(F.scaled_dot_product_attention, gated=False)},
    )


def run_gpu_benchmarks(folder: Path, seconds: float, only: str, device: str) -> dict[str, Any]:
    """Measure every case whose name contains ``only`` and write ``bench.json``; return what it holds."""
    check_kernel("triton", device)
    rows = measured_rows((case for case in gpu_cases(device) if only in case.what), seconds)
    words = ["tra", "bench", "--device", device, "--seconds", f"{seconds:g}"]
    content = {
        "command": shlex.join(words + (["--only", only] if only else [])),
        "environment": environment(),
        "rows": [row.to_dict() for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "bench.json", content)
    return content

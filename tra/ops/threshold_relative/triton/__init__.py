"""The GPU kernels, in Triton: `kernels` computes, `launch` calls them, `tiles` and `tuning` say in which pieces."""

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
LONGEST = 2**24
"""Keys are counted in float32."""
MOST_HEADS = 65_535
"""What the second dimension of a grid of programs can hold."""
INSTALLED = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
"""Whether Triton runs kernels in Python, on any device. Constants, because torch.compile traces `refusal`."""
NOT_INSTALLED = "needs Triton: pip install 'threshold-relative-attention[gpu]'"


def about() -> str:
    refused = f"other devices, float64, widths over {WIDEST}, more than {LONGEST:,} keys or {MOST_HEADS:,} key heads"
    what = f"Triton kernels for CUDA and ROCm; refuses {refused}"
    return what if INSTALLED else f"{what}; not usable here: it {NOT_INSTALLED}"


def refusal(inputs: Inputs, options: Options) -> str | None:
    query, value = inputs.query, inputs.value
    device = query.device.type  # ROCm calls itself cuda
    if device not in ("cuda", "meta", "cpu"):
        return f"needs tensors on a GPU, got {query.device}"
    if options.straight_through > 0.0 or inputs.row_threshold is not None or inputs.row_bound is not None:
        return "takes no straight_through and no tensors for threshold and score_bound"
    if query.dtype not in TYPES:
        return f"computes in float32, bfloat16 and float16, got {query.dtype}"
    if query.shape[3] > WIDEST or value.shape[3] > WIDEST:
        return f"takes widths up to {WIDEST}, got {query.shape[3]} and {value.shape[3]}"
    if value.shape[2] > LONGEST:
        return f"takes up to {LONGEST} keys, got {value.shape[2]}"
    if inputs.key.shape[0] * inputs.key.shape[1] > MOST_HEADS:
        return f"takes batches of up to {MOST_HEADS} key heads, got {inputs.key.shape[0] * inputs.key.shape[1]}"
    if device == "cpu" and not (INSTALLED and INTERPRETED):
        return f"needs tensors on a GPU, got {query.device}"
    return None if INSTALLED else NOT_INSTALLED


def passed_over(reason: str) -> str | None:
    return f"holds matrices of queries x keys without its GPU kernels: it {reason}" if reason == NOT_INSTALLED else None


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    from tra.ops.threshold_relative.triton import launch

    return launch.forward(inputs, options, training)


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    from tra.ops.threshold_relative.triton import launch

    return launch.backward(grad_out, inputs, result, options)

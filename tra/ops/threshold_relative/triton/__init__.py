"""The GPU kernels, in Triton: `kernels` computes, `launch` calls them, `tiles` and `tuning` say in which pieces."""

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tra.errors import how_to_install
from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result

if TYPE_CHECKING:
    from tra.ops.threshold_relative.pieces import Rows
    from tra.ops.threshold_relative.triton.pieces import BackwardRows, ForwardRows

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 256
LONGEST = 2**24
"""Keys are counted in float32."""
RESIDUAL = (torch.bfloat16, torch.float16)
CHECKED = ("cuda",)
"""Kinds of devices on which kernels prove themselves before they are used."""
MOST_HEADS = 65_535
"""What the second dimension of a grid of programs can hold."""
OLDEST = (3, 7)


def _version() -> tuple[int, ...]:
    """Of the Triton that is installed, () for none, without importing it: `import tra` shall take no time."""
    found = find_spec("triton")
    if found is None or found.origin is None:
        return ()
    number = re.search(r"__version__ = ['\"](\d+)\.(\d+)", Path(found.origin).read_text())
    return OLDEST if number is None else (int(number[1]), int(number[2]))


VERSION = _version()
INSTALLED = VERSION != ()
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")
"""Whether Triton runs kernels in Python, on any device. Constants, because torch.compile traces `refusal`."""
NO_GPU = "needs tensors on a GPU"
OTHER_TYPE = "computes in float32, bfloat16 and float16"
NOT_INSTALLED = f"needs Triton: {how_to_install('gpu')}"


def about() -> str:
    refused = f"other devices, float64, widths over {WIDEST}, more than {LONGEST:,} keys or {MOST_HEADS:,} key heads"
    what = f"Triton kernels for CUDA and ROCm; refuses {refused}"
    reason = missing()
    return what if reason is None else f"{what}; not usable here: it {reason}"


def missing() -> str | None:
    """What is to be installed."""
    if not INSTALLED:
        return NOT_INSTALLED
    if VERSION < OLDEST:
        wanted, found = (".".join(map(str, numbers)) for numbers in (OLDEST, VERSION))
        return f"needs Triton {wanted} or newer, got {found}: pip install --upgrade triton"
    return None


def refusal(inputs: Inputs, options: Options) -> str | None:
    query, value = inputs.query, inputs.value
    device = query.device.type  # ROCm calls itself cuda
    if device not in ("cuda", "meta", "cpu") or (device == "cpu" and not (INSTALLED and INTERPRETED)):
        return f"{NO_GPU}, got {query.device}"
    if query.dtype not in TYPES:
        return f"{OTHER_TYPE}, got {query.dtype}"
    if query.shape[3] > WIDEST or value.shape[3] > WIDEST:
        return f"takes widths up to {WIDEST}, got {query.shape[3]} and {value.shape[3]}"
    if value.shape[2] > LONGEST:
        return f"takes up to {LONGEST} keys, got {value.shape[2]}"
    if inputs.key.shape[0] * inputs.key.shape[1] > MOST_HEADS:
        return f"takes batches of up to {MOST_HEADS} key heads, got {inputs.key.shape[0] * inputs.key.shape[1]}"
    reason = missing()
    if reason is None and device in CHECKED and not torch.compiler.is_compiling():
        tensors = (x for x in inputs if x is not None)
        reason = _distrust(inputs, options, torch.is_grad_enabled() and any(x.requires_grad for x in tensors))
    return reason


def _distrust(inputs: Inputs, options: Options, training: bool) -> str | None:
    """What the kernels' own check says against them."""
    device, dtype = inputs.query.device, inputs.query.dtype
    if device.type not in CHECKED:
        return None
    from tra.ops.threshold_relative.triton import launch, trust

    kinds = ["decode" if launch.decodes(inputs) else "forward"]
    if launch.packs(inputs, options):
        kinds.append("packed")
    if training:
        kinds.append("straight_through" if options.straight_through > 0.0 else "backward")
    return trust.distrust(device, dtype, tuple(kinds))


def only_by_name(inputs: Inputs) -> bool:
    """Interpreted kernels are for tests."""
    return inputs.query.device.type == "cpu"


def passed_over(reason: str) -> str | None:
    """On a GPU what the reference costs is worth a word, but not where double precision was asked for."""
    if reason.startswith((NO_GPU, OTHER_TYPE)):
        return None
    return f"holds matrices of queries x keys without its GPU kernels: impl 'triton' {reason}"


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    from tra.ops.threshold_relative.triton import launch

    reason = _distrust(inputs, options, training)  # a compiled call comes here unasked
    if reason is not None:
        raise RuntimeError(f"impl 'triton' {reason}")
    return launch.forward(inputs, options, training)


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    from tra.ops.threshold_relative.triton import launch

    return launch.backward(grad_out, inputs, result, options)


def backward_of_rows(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    from tra.ops.threshold_relative.triton import launch

    return launch.backward(grad_out, inputs, result, options, wants_keys=False)


def refusal_of_pieces(inputs: Inputs, options: Options) -> str | None:
    """Why the kernels cannot take a sequence in pieces whose call they take; None if they can."""
    if options.dropout > 0.0:
        return "computes no dropout in pieces"
    if inputs.query.device.type not in CHECKED:
        return None
    from tra.ops.threshold_relative.triton import trust

    return trust.distrust(inputs.query.device, inputs.query.dtype, ("pieces",))


def span(inputs: Inputs) -> int:
    """Keys of a block, at whose multiples pieces are walked."""
    from tra.ops.threshold_relative.triton import tiles

    query = inputs.query
    return tiles.keys_per_block(tiles.family(query.device), query.dtype, query.shape[3], inputs.value.shape[3])


def forward_rows(rows: "Rows", training: bool) -> "ForwardRows":
    from tra.ops.threshold_relative.triton.pieces import ForwardRows

    return ForwardRows(rows, training)


def backward_rows(rows: "Rows", result: Result, grad_out: Tensor) -> "BackwardRows":
    from tra.ops.threshold_relative.triton.pieces import BackwardRows

    return BackwardRows(rows, result, grad_out)

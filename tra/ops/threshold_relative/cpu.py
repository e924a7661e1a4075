"""The native CPU kernel: loading `cpu.cpp`, as built with the package, and calling it through ctypes."""

import ctypes
import os
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tra.lookup import lookup
from tra.ops.threshold_relative.call import Gradients, Inputs, Options, Result, broken_bound

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LONGEST = 2**24
"""Keys are counted in float32."""
VARIANTS = ("generic", "avx2", "avx512")
"""From the plainest instruction set to the richest."""

# TraProblem of plan.h: ten tensors (address and four strides each), row_state, key_mask and segment_ids (address and
# two strides each), seven sizes; dropout, tolerance, score_bound; seed; scale, threshold; type, threads; parallel.
PROBLEM = struct.Struct("=50q q 3q 3q 7q 3d Q 2f 2i q")
ABSENT = (0, 0, 0, 0, 0)
NO_MASK = ABSENT[:3]
BOUND_BROKEN = 2
"""What forward returns instead of 0 when a kept score lies beyond `score_bound`; anything else is lack of memory."""

NOT_BUILT = "is not built: install a C++ compiler (gcc or clang) and reinstall threshold-relative-attention"
OTHER_SOURCES = "was built from other sources than this package's: reinstall threshold-relative-attention"


def about() -> str:
    if unusable is not None:
        return f"native kernel; not usable here: it {unusable}"
    return (
        f"native kernel, {variant}; refuses other devices than the CPU, float64, "
        f"widths over {widest}, more than {LONGEST:,} keys"
    )


def refusal(inputs: Inputs, options: Options) -> str | None:
    query, value = inputs.query, inputs.value
    if query.device.type not in ("cpu", "meta"):
        return f"needs tensors on the CPU, got {query.device}"
    if query.dtype not in TYPES:
        return f"computes in float32, bfloat16 and float16, got {query.dtype}"
    if unusable is not None:
        return unusable
    if options.straight_through > 0.0 or inputs.row_threshold is not None or inputs.row_bound is not None:
        return "takes no straight_through and no tensors for threshold and score_bound"
    if query.shape[3] > widest or value.shape[3] > widest:
        return f"takes widths up to {widest}, got {query.shape[3]} and {value.shape[3]}"
    if value.shape[2] > LONGEST:
        return f"takes up to {LONGEST} keys, got {value.shape[2]}"
    return None


def passed_over(reason: str) -> str | None:
    return f"runs many times slower without its native CPU kernel, which {reason}" if reason == unusable else None


@contextmanager
def using(name: str) -> Iterator[None]:
    """Compute with that variant meanwhile, of those that are built and run here: to compare them."""
    global variant
    if unusable is not None:
        raise ValueError(f"variant must be left out where the native kernel {unusable}; got {name!r}")
    lookup(LIBRARIES, name, "variant")
    before, variant = variant, name
    try:
        yield
    finally:
        variant = before


def forward(inputs: Inputs, options: Options, training: bool) -> Result:
    query, key, value, log_gate = inputs[:4]
    gate = log_gate.float()
    out = query.new_empty(*query.shape[:3], value.shape[3])
    row_state = query.new_empty(*query.shape[:3], 2, dtype=torch.float32)
    views = (*_view(query), *_view(key), *_view(value), *_view(out), *ABSENT * 4, *_view(gate), *ABSENT)
    _call("forward", views, row_state, inputs, options)
    return Result(out, row_state, None)


def backward(grad_out: Tensor, inputs: Inputs, result: Result, options: Options) -> Gradients:
    out, row_state, _ = result
    query, key, value, log_gate = inputs[:4]
    gate = log_gate.float()
    grad_query, grad_key, grad_value, grad_gate = (x.new_empty(x.shape) for x in (query, key, value, gate))
    tensors = (query, key, value, out, grad_out, grad_query, grad_key, grad_value, gate, grad_gate)
    _call("backward", [number for tensor in tensors for number in _view(tensor)], row_state, inputs, options)
    return Gradients(grad_query, grad_key, grad_value, grad_gate.to(log_gate.dtype), None)


def _call(name: str, views: Sequence[int], row_state: Tensor, inputs: Inputs, options: Options) -> None:
    """Run an entry point on views of the ten tensors of TraProblem, in its order."""
    assert variant is not None
    query, key, value, _, key_mask, segment_ids, dropout_seed, *_ = inputs
    if segment_ids is not None and segment_ids.dtype != torch.int32:
        # Renumbered, not truncated: two ids must not become one.
        segment_ids = segment_ids.unique(return_inverse=True)[1].to(torch.int32)
    batch, heads, queries, width = query.shape
    problem = PROBLEM.pack(
        *views,
        row_state.data_ptr(),
        *(NO_MASK if key_mask is None else _view(key_mask)[:3]),
        *(NO_MASK if segment_ids is None else _view(segment_ids)[:3]),
        *(batch, heads, key.shape[1], queries, key.shape[2], width, value.shape[3]),
        *(options.dropout, options.tolerance, -1.0 if options.score_bound is None else options.score_bound),
        0 if dropout_seed is None else int(dropout_seed),
        *(options.scale, options.threshold),
        *(TYPES[query.dtype], torch.get_num_threads()),
        _parallel or 0,
    )
    status = getattr(LIBRARIES[variant], f"tra_{name}_{variant}")(problem)
    if status == BOUND_BROKEN:
        raise broken_bound(inputs, options)
    if status:
        raise MemoryError(f"threshold_relative_attention: the CPU kernel ran out of memory in {name}")


def _view(tensor: Tensor) -> tuple[int, ...]:
    """Address and four strides."""
    return (tensor.data_ptr(), *tensor.stride(), 0, 0, 0)[:5]


def _load() -> tuple[dict[str, ctypes.CDLL], int, str | None]:
    """The variants that were built and that this processor runs, and the widest head they take; or none, and why."""
    files = {name: Path(__file__).with_name(f"_cpu_{name}.so") for name in VARIANTS}
    if not files["generic"].exists():
        return {}, 0, NOT_BUILT
    try:
        generic = ctypes.CDLL(str(files["generic"]))
        generic.tra_variant.restype = ctypes.c_char_p
        runnable = VARIANTS[: VARIANTS.index(generic.tra_variant().decode()) + 1]
        libraries = {name: ctypes.CDLL(str(files[name])) for name in runnable if files[name].exists()}
        # A library left over from another version would read the problem's fields at the wrong places.
        sizes = {getattr(library, f"tra_problem_size_{name}")() for name, library in libraries.items()}
        widest = generic.tra_widest_generic()
    except OSError as error:
        return {}, 0, f"cannot be loaded ({error}): reinstall threshold-relative-attention"
    except AttributeError:  # an entry point that it does not have
        return {}, 0, OTHER_SOURCES
    return (libraries, widest, None) if sizes == {PROBLEM.size} else ({}, 0, OTHER_SOURCES)


def _find_parallel() -> int | None:
    """GOMP_parallel of the OpenMP runtime that PyTorch brought: a second pool would fight it for the cores."""
    if sys.platform != "linux":
        return None
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        try:
            runtime = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
            return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _forget_pool() -> None:
    """libgomp's threads do not survive a fork; the child starts plain ones."""
    global _parallel
    _parallel = None


LIBRARIES, widest, unusable = _load()
"""The built variants that this processor runs, the widest head they take, and if there are none, why."""
variant = list(LIBRARIES)[-1] if LIBRARIES else None
"""The variant in use: the richest that was built and runs here."""
_parallel = _find_parallel()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forget_pool)

"""The native CPU kernel: loading `cpu.cpp`, as built with the package, and calling it through ctypes."""

import ctypes
import os
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor

from tra.ops.threshold_relative.options import Options

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIDEST = 256
LONGEST = 2**24
"""Keys are counted in float32."""
VARIANTS = ("generic", "avx2", "avx512")
"""From the plainest instruction set to the richest."""


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 4))


class _Problem(ctypes.Structure):
    """TraProblem of cpu.cpp."""

    _fields_ = (
        *((name, _Tensor) for name in ("query", "key", "value", "output")),
        *((name, _Tensor) for name in ("grad_output", "grad_query", "grad_key", "grad_value")),
        *((name, _Tensor) for name in ("log_gate", "grad_log_gate")),
        ("row_state", ctypes.c_void_p),
        ("key_mask", ctypes.c_void_p),
        ("key_mask_stride", ctypes.c_int64 * 2),
        ("segment_ids", ctypes.c_void_p),
        ("segment_stride", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("batch", "query_heads", "key_heads", "query_length", "key_length")),
        *((name, ctypes.c_int64) for name in ("width", "value_width")),
        *((name, ctypes.c_double) for name in ("dropout", "tolerance", "score_bound")),
        ("seed", ctypes.c_uint64),
        ("scale", ctypes.c_float),
        ("threshold", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("parallel", ctypes.c_void_p),
    )


def refusal(query: Tensor, value: Tensor) -> str | None:
    """Why the kernel cannot take these tensors, or None if it can."""
    if query.device.type not in ("cpu", "meta"):
        return f"needs tensors on the CPU, got {query.device}"
    if query.dtype not in TYPES:
        return f"computes in float32, bfloat16 and float16, got {query.dtype}"
    if query.shape[3] > WIDEST or value.shape[3] > WIDEST:
        return f"takes widths up to {WIDEST}, got {query.shape[3]} and {value.shape[3]}"
    if value.shape[2] > LONGEST:
        return f"takes up to {LONGEST} keys, got {value.shape[2]}"
    if not LIBRARIES:
        return "is not built: install a C++ compiler and reinstall the package"
    return None


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """As in `reference`."""
    inputs = _Inputs(query, key, value, log_gate, key_mask, segment_ids, dropout_seed, options)
    out = query.new_empty(*query.shape[:3], value.shape[3])
    row_state = query.new_empty(*query.shape[:3], 2, dtype=torch.float32)
    inputs.problem.output = _view(out)
    inputs.problem.row_state = row_state.data_ptr()
    inputs.call("forward")
    return out, row_state


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    out: Tensor,
    row_state: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As in `reference`."""
    inputs = _Inputs(query, key, value, log_gate, key_mask, segment_ids, dropout_seed, options)
    gradients = [x.new_empty(x.shape) for x in (query, key, value, inputs.log_gate)]
    problem = inputs.problem
    problem.output, problem.grad_output, problem.row_state = _view(out), _view(grad_out), row_state.data_ptr()
    problem.grad_query, problem.grad_key, problem.grad_value, problem.grad_log_gate = map(_view, gradients)
    inputs.call("backward")
    return gradients[0], gradients[1], gradients[2], gradients[3].to(log_gate.dtype)


class _Inputs:
    """The problem as the kernel reads it, and the tensors it points into."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_gate: Tensor,
        key_mask: Tensor | None,
        segment_ids: Tensor | None,
        dropout_seed: Tensor | None,
        options: Options,
    ) -> None:
        if segment_ids is not None and segment_ids.dtype != torch.int32:
            # Renumbered, not truncated: two ids must not become one.
            segment_ids = segment_ids.unique(return_inverse=True)[1].to(torch.int32)
        self.log_gate = log_gate.float()
        self.held = (query, key, value, key_mask, segment_ids)
        self.problem = problem = _Problem()
        problem.query, problem.key, problem.value = _view(query), _view(key), _view(value)
        problem.log_gate = _view(self.log_gate)
        if key_mask is not None:
            problem.key_mask = key_mask.data_ptr()
            problem.key_mask_stride[:] = key_mask.stride()
        if segment_ids is not None:
            problem.segment_ids = segment_ids.data_ptr()
            problem.segment_stride[:] = segment_ids.stride()
        problem.batch, problem.query_heads, problem.query_length, problem.width = query.shape
        _, problem.key_heads, problem.key_length, problem.value_width = value.shape
        problem.scale, problem.threshold = options.scale, options.threshold
        problem.dropout = options.dropout
        problem.seed = 0 if dropout_seed is None else int(dropout_seed)
        problem.tolerance = options.tolerance
        problem.score_bound = -1.0 if options.score_bound is None else options.score_bound
        problem.type = TYPES[query.dtype]
        problem.threads, problem.parallel = torch.get_num_threads(), _parallel

    def call(self, name: str) -> None:
        assert variant is not None
        if getattr(LIBRARIES[variant], f"tra_{name}_{variant}")(ctypes.byref(self.problem)):
            raise MemoryError(f"threshold_relative_attention: the CPU kernel ran out of memory in {name}")


def _view(tensor: Tensor) -> _Tensor:
    strides = (*tensor.stride(), 0, 0, 0, 0)[:4]
    return _Tensor(tensor.data_ptr(), (ctypes.c_int64 * 4)(*strides))


def _load() -> dict[str, ctypes.CDLL]:
    """The variants that were built and that this processor runs."""
    folder = Path(__file__).parent
    files = {name: next(iter(sorted(folder.glob(f"_cpu_{name}.*so"))), None) for name in VARIANTS}
    if files["generic"] is None:
        return {}
    generic = ctypes.CDLL(str(files["generic"]))
    generic.tra_variant.restype = ctypes.c_char_p
    runnable = VARIANTS[: VARIANTS.index(generic.tra_variant().decode()) + 1]
    return {name: ctypes.CDLL(str(files[name])) for name in runnable if files[name] is not None}


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


def warn_if_missing() -> None:
    """Say once that the kernel could be had."""
    global _warned
    if not LIBRARIES and not _warned:
        _warned = True
        warnings.warn(
            "threshold_relative_attention runs without its native CPU kernel, many times slower: "
            "install a C++ compiler (gcc or clang) and reinstall threshold-relative-attention",
            stacklevel=3,
        )


LIBRARIES = _load()
variant = list(LIBRARIES)[-1] if LIBRARIES else None
"""The variant in use: the richest that was built and runs here."""
_parallel = _find_parallel()
_warned = False
os.register_at_fork(after_in_child=_forget_pool)

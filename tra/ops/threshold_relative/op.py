"""The operator as PyTorch knows it: flat schemas, fake kernels and autograd, one pair of ops for all implementations.

`impl` is already resolved here; user errors are raised in `api`, but for the one check that reads data. A call that
nobody else has a part in leaves PyTorch out, whose dispatcher takes longer than the kernel takes for a new token.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import (
    DispatchKey,
    DispatchKeySet,
    _dispatch_keys,
    _dispatch_tls_local_exclude_set,
    _dispatch_tls_local_include_set,
    _len_torch_function_stack,
)
from torch._functorch.utils import enable_single_level_autograd_function
from torch._ops import OpOverload
from torch.autograd import _profiler_enabled, forward_ad
from torch.autograd.forward_ad import _set_fwd_grad_enabled, unpack_dual
from torch.autograd.function import _SingleLevelFunction
from torch.compiler import is_compiling
from torch.onnx import is_in_onnx_export

from tra.ops.threshold_relative import reference
from tra.ops.threshold_relative.call import Inputs, Options, Result
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS

TENSORS = len(Inputs._fields)
CALL = (
    "Tensor query, Tensor key, Tensor value, Tensor log_gate, "
    "Tensor? key_mask, Tensor? segment_ids, Tensor? dropout_seed, Tensor? row_threshold, Tensor? row_bound, "
    "float scale, float threshold, float straight_through, float dropout, float tolerance, float? score_bound, "
    "bool training, str impl"
)
"""Inputs, Options, whether backward may follow, and the name of the implementation: a schema knows no structures."""


PLAIN = (Tensor, torch.nn.Parameter)
CPU = DispatchKeySet(DispatchKey.CPU)
IDLE = DispatchKeySet(DispatchKey.AutogradCPU).add(DispatchKey.ADInplaceOrView).add(DispatchKey.BackendSelect)
"""What the dispatcher passes on its way to the kernel that does nothing here while no gradient is recorded."""


def attend(inputs: Inputs, options: Options, impl: str) -> Tensor:
    """The output of the implementation of that name, differentiable once."""
    if _unobserved(inputs):
        return _compute(inputs, options, False, impl)[0]
    if is_in_onnx_export():  # no other library has this operator
        return reference.equations(inputs, options)
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return forward_op(*inputs, *options, training, impl)[0]


def _unobserved(inputs: Inputs) -> bool:
    """Whether the dispatcher would do nothing but call the implementation, by its own rule: the keys of the tensors and
    of this thread. Autocast, modes, functorch's transforms, tracing, fake and other special tensors each have a key.
    """
    if is_compiling() or _len_torch_function_stack() or _profiler_enabled() or forward_ad._current_level >= 0:
        return False
    recording = torch.is_grad_enabled()
    keys = _dispatch_tls_local_include_set()
    for tensor in inputs:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN or (recording and tensor.requires_grad):
            return False
        keys = keys | _dispatch_keys(tensor)
    return keys - _dispatch_tls_local_exclude_set() - IDLE == CPU


def _compute(inputs: Inputs, options: Options, training: bool, impl: str) -> tuple[Tensor, Tensor, Tensor]:
    log_gate = inputs.log_gate
    # Here, not in `api`, because tracing and transforms have no data to read before this. Free on a CPU only.
    # A largest gate of NaN hides the others.
    if log_gate.is_cpu and log_gate.numel() and not log_gate.max().item() <= 0.0 and bool((log_gate > 0).any()):
        raise ValueError(f"log_gate must never be positive, got a maximum of {log_gate.max().item():g}")
    out, row_state, residual = IMPLEMENTATIONS[impl].forward(inputs, options, training)
    # Contiguous, as the fake kernel promises. A schema knows no absent results: an empty one takes their place.
    return out.contiguous(), row_state, out.new_empty(0, dtype=torch.bfloat16) if residual is None else residual


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, options, training, impl = _unflatten(arguments)
    # Autocast would otherwise lower the products inside the implementation.
    with torch.autocast(inputs.query.device.type, enabled=False):
        return _compute(inputs, options, training, impl)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    inputs, _, training, impl = _unflatten(arguments)
    query, value = inputs.query, inputs.value
    rows = query.shape[:3]
    state_dtype = torch.promote_types(query.dtype, torch.float32)
    kept = training and getattr(IMPLEMENTATIONS[impl], "RESIDUAL", False)
    return (
        query.new_empty(*rows, value.shape[3]),
        query.new_empty(*rows, 2, dtype=state_dtype),
        query.new_empty(*((*rows, value.shape[3]) if kept else (0,)), dtype=torch.bfloat16),
    )


def _backward(
    grad_out: Tensor, out: Tensor, row_state: Tensor, residual: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs, options, _, impl = _unflatten(arguments)
    with torch.autocast(grad_out.device.type, enabled=False):
        result = Result(out, row_state, residual if residual.dim() == 4 else None)
        gradients = IMPLEMENTATIONS[impl].backward(grad_out, inputs, result, options)
    return tuple(grad_out.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients)


def _fake_backward(
    grad_out: Tensor, out: Tensor, row_state: Tensor, residual: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    inputs, options, _, _ = _unflatten(arguments)
    through = inputs.row_threshold if options.straight_through > 0.0 else None
    grad_threshold = grad_out.new_empty(0) if through is None else through.new_empty(through.shape)
    return (*(x.new_empty(x.shape) for x in inputs[:4]), grad_threshold)


def _unflatten(arguments: tuple[Any, ...]) -> tuple[Inputs, Options, bool, str]:
    return Inputs(*arguments[:TENSORS]), Options(*arguments[TENSORS:-2]), *arguments[-2:]


def _unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(f"threshold_relative_attention does not support {what}")


def _refuse_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    raise _unsupported("torch.vmap: its tensors have a batch dimension of their own")


class _Attention(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        out, row_state, residual = _below_autograd(forward_op, arguments)
        ctx.save_for_backward(out, row_state, residual, *arguments[:TENSORS])
        ctx.rest = arguments[TENSORS:]
        # By-products for backward, not results: no gradient may enter through them.
        ctx.mark_non_differentiable(row_state, residual)
        return out, row_state, residual

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, grad_threshold = backward_op(grad_out, *ctx.saved_tensors, *ctx.rest)
        absent: list[None] = [None] * (len(ctx.needs_input_grad) - TENSORS + 1)
        return (*gradients, None, None, None, grad_threshold if grad_threshold.dim() == 3 else None, *absent)


class _Backward(_SingleLevelFunction):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        return _below_autograd(backward_op, arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise _unsupported("double backward: it is differentiable once")


def _below_autograd(op: OpOverload, arguments: tuple[Any, ...]) -> Any:
    # An autograd function switches gradients and tangents off; an outer transform of torch.func must still see them.
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), _set_fwd_grad_enabled(True):
        return op(*arguments)


def _differentiable(op: OpOverload, function: Any) -> Callable[..., Any]:
    """The op's kernel above all others, which records it for backward.

    `torch.library.register_autograd` serves plain autograd, but drops the tangents of forward mode without a word and
    fails under torch.func.
    """

    def kernel(keyset: DispatchKeySet, *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if any(unpack_dual(x).tangent is not None for x in tensors):
            raise _unsupported("forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)")
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            # Transforms of torch.func come here one level at a time.
            with enable_single_level_autograd_function():
                return function.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    return kernel


def _register(schema: str, compute: Callable[..., Any], fake: Callable[..., Any], function: Any) -> OpOverload:
    name = LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    op = getattr(torch.ops.tra, name).default
    LIBRARY.impl(name, compute, "CompositeExplicitAutograd")
    LIBRARY.impl(name, _differentiable(op, function), "Autograd", with_keyset=True)
    torch.library.register_fake(f"tra::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"tra::{name}", _refuse_vmap, lib=LIBRARY)
    return op


LIBRARY = torch.library.Library("tra", "FRAGMENT")
forward_op = _register(
    f"threshold_relative_attention({CALL}) -> (Tensor, Tensor, Tensor)", _forward, _fake_forward, _Attention
)
backward_op = _register(
    f"threshold_relative_attention_backward(Tensor grad_out, Tensor out, Tensor row_state, Tensor residual, {CALL})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _fake_backward,
    _Backward,
)

"""The operator as PyTorch's autograd knows it: one function for all implementations, differentiable once.

`impl` is already resolved here, and user errors are raised in `api`, but for those that depend on data.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.forward_ad import unpack_dual
from torch.compiler import is_compiling

from tra.ops.threshold_relative import cpu, reference
from tra.ops.threshold_relative.call import Inputs, Options, Result, refuse_positive_gates
from tra.ops.threshold_relative.implementations import IMPLEMENTATIONS
from tra.ops.threshold_relative.registration import (
    DOUBLE_BACKWARD,
    LIBRARY,
    Operators,
    define,
    gradients,
    refuse_vmap,
    save_for_backward,
    unflatten,
    unsupported,
)

FORWARD_MODE = "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad)"


def attend(inputs: Inputs, options: Options, impl: str) -> Tensor:
    """The output of the implementation of that name, differentiable once."""
    if is_compiling() or torch.jit.is_tracing():
        from torch.onnx import is_in_onnx_export  # takes longer to import than the rest of this package

        if is_in_onnx_export():  # no other library has this operator
            return reference.equations(inputs, options)
        _refuse_tangents(inputs)
        # Within torch.func's transforms Dynamo does not say which tensors want gradients. A trace is checked by another
        # one, without gradients, that must be the same.
        training = torch.jit.is_tracing() or torch.is_grad_enabled()
        options = options if training else _without_backward(options)
        return python_operators(impl).forward(*inputs, *options, training)[0]
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs if x is not None):
        return _Attention.apply(impl, *inputs, *options, True)[0]
    if not torch.is_inference_mode_enabled():  # which has no tangents
        _refuse_tangents(inputs)
    return _forward(impl, *inputs, *_without_backward(options), False)[0]


def _without_backward(options: Options) -> Options:
    """What only backward needs is not prepared where none follows."""
    return options._replace(straight_through=0.0) if options.straight_through else options


def _refuse_tangents(inputs: Inputs) -> None:
    for x in inputs:
        if x is not None and unpack_dual(x).tangent is not None:
            raise unsupported(FORWARD_MODE)


def operators(impl: str) -> Operators:
    """The operators of an implementation: those of the native kernel, or the ones that call its Python functions."""
    return cpu.operators() if impl == "cpu" else python_operators(impl)


def python_operators(impl: str) -> Operators:
    """Operators whose names do not depend on the machine, as graphs hold them: a graph may be stored and run on a
    processor with other instructions, or where the kernel is not built."""
    if impl not in _operators:
        _operators[impl] = _register(impl)
    return _operators[impl]


def _forward(impl: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    try:
        return operators(impl).forward(*arguments)
    except RuntimeError as error:
        raise cpu.as_python_error(error) from None


class _Attention(Function):
    """`torch.library.register_autograd` serves compiled code and plain autograd, but drops the tangents of forward mode
    without a word and fails under torch.func."""

    vmap = staticmethod(refuse_vmap)

    @staticmethod
    def forward(impl: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return _forward(impl, *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.impl = inputs[0]
        save_for_backward(ctx, inputs[1:-1], output)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return (None, *gradients(ctx, partial(_Backward.apply, ctx.impl), grad_out), None)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise unsupported(FORWARD_MODE)


class _Backward(Function):
    """A function of its own, so that nobody differentiates it without a word."""

    vmap = staticmethod(refuse_vmap)

    @staticmethod
    def forward(impl: str, *arguments: Any) -> tuple[Tensor, ...]:
        try:
            return operators(impl).backward(*arguments)
        except RuntimeError as error:
            raise cpu.as_python_error(error) from None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise unsupported(DOUBLE_BACKWARD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise unsupported(FORWARD_MODE)


def _check_lengths(inputs: Inputs) -> None:
    queries, keys, lengths = inputs.query.shape[2], inputs.key.shape[2], inputs.key_lengths
    assert lengths is not None
    wrong = lengths[(lengths < queries) | (lengths > keys)]
    if len(wrong):
        given = f"the {queries} queries and the {keys} keys, got {wrong[0].item()}"
        raise ValueError(f"key_lengths must lie between {given}")


def _register(impl: str) -> Operators:
    """Operators that call the implementation of that name, or the reference where the kernel is not built."""

    def implementation() -> Any:
        return reference if impl == "cpu" and cpu.unusable is not None else IMPLEMENTATIONS[impl]

    def absent(like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(0, dtype=dtype)

    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs, options, (training,) = unflatten(arguments)
        if not torch.is_inference_mode_enabled():
            _refuse_tangents(inputs)  # of a stored graph, which does not pass `attend`
        if inputs.log_gate.is_cpu:  # other devices would have to wait for the answer
            refuse_positive_gates(inputs.log_gate)
            if inputs.key_lengths is not None:
                _check_lengths(inputs)
        # Autocast would otherwise lower the products inside the implementation.
        with torch.autocast(inputs.query.device.type, enabled=False):
            out, row_state, residual = implementation().forward(inputs, options, training)
        residual = absent(out, torch.bfloat16) if residual is None else residual
        return out.contiguous(), row_state, residual  # contiguous, as the fake kernel promises

    def backward(grad_out: Tensor, *others: Any) -> tuple[Tensor, ...]:
        out, row_state, residual, *wants = others[:6]
        inputs, options, _ = unflatten(others[6:])
        result = Result(out, row_state, residual if residual.dim() == 4 else None)
        compute = implementation().backward
        if not (wants[1] or wants[2]):
            compute = getattr(implementation(), "backward_of_rows", compute)
        with torch.autocast(grad_out.device.type, enabled=False):
            found = compute(grad_out, inputs, result, options)
        return tuple(
            absent(grad_out) if gradient is None or not wanted else gradient.contiguous()
            for gradient, wanted in zip(found, (*wants, True, True), strict=True)
        )

    ops = define(impl, lambda: getattr(implementation(), "RESIDUAL", ()))
    LIBRARY.impl(f"threshold_relative_attention_{impl}", forward, "CompositeExplicitAutograd")
    LIBRARY.impl(f"threshold_relative_attention_{impl}_backward", backward, "CompositeExplicitAutograd")
    return ops


_operators = {impl: _register(impl) for impl in IMPLEMENTATIONS}

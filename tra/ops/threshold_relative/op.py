"""The operator as PyTorch knows it: schema, fake kernels and autograd, one pair of ops for every implementation.

`impl` is already resolved here; user errors are raised in `api`.
"""

from types import ModuleType

import torch
from torch import Tensor

from tra.ops.threshold_relative import cpu, reference
from tra.ops.threshold_relative.options import Options

IMPLEMENTATIONS: dict[str, ModuleType] = {"cpu": cpu, "reference": reference}


@torch.library.custom_op("tra::threshold_relative_attention", mutates_args=())
def forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    threshold: float,
    dropout: float,
    tolerance: float,
    score_bound: float | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    # Autocast would otherwise lower the products inside the implementation.
    with torch.autocast(query.device.type, enabled=False):
        out, row_state = IMPLEMENTATIONS[impl].forward(
            query,
            key,
            value,
            log_gate,
            key_mask,
            segment_ids,
            dropout_seed,
            Options(scale, threshold, dropout, tolerance, score_bound),
        )
    # Contiguous, as the fake kernel promises.
    return out.contiguous(), row_state


@forward_op.register_fake
def _(query, key, value, *_):
    rows = query.shape[:3]
    state_dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*rows, value.shape[3]), query.new_empty(*rows, 2, dtype=state_dtype)


@torch.library.custom_op("tra::threshold_relative_attention_backward", mutates_args=())
def backward_op(
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
    scale: float,
    threshold: float,
    dropout: float,
    tolerance: float,
    score_bound: float | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(query.device.type, enabled=False):
        gradients = IMPLEMENTATIONS[impl].backward(
            grad_out,
            query,
            key,
            value,
            log_gate,
            out,
            row_state,
            key_mask,
            segment_ids,
            dropout_seed,
            Options(scale, threshold, dropout, tolerance, score_bound),
        )
    return tuple(gradient.contiguous() for gradient in gradients)


@backward_op.register_fake
def _(grad_out, query, key, value, log_gate, *_):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, log_gate))


def _setup_context(ctx, inputs, output):
    tensors, options = inputs[:7], inputs[7:]
    query, key, value, log_gate, key_mask, segment_ids, dropout_seed = tensors
    out, row_state = output
    ctx.save_for_backward(query, key, value, log_gate, out, row_state, key_mask, segment_ids, dropout_seed)
    ctx.options = options
    # A by-product for backward, not a result: no gradient may enter through it.
    ctx.mark_non_differentiable(row_state)


def _backward(ctx, grad_out, _grad_row_state):
    gradients = backward_op(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * 9)


forward_op.register_autograd(_backward, setup_context=_setup_context)

"""The operator as PyTorch knows it: schema, fake kernels and autograd, one pair of ops for every implementation.

`impl` is already resolved here; user errors are raised in `api`.
"""

from types import ModuleType

import torch
from torch import Tensor

from tra.ops.threshold_relative import reference

IMPLEMENTATIONS: dict[str, ModuleType] = {"reference": reference}


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
    impl: str,
) -> tuple[Tensor, Tensor]:
    # Autocast would otherwise lower the products inside the implementation.
    with torch.autocast(query.device.type, enabled=False):
        return IMPLEMENTATIONS[impl].forward(
            query, key, value, log_gate, key_mask, segment_ids, dropout_seed, scale, threshold, dropout
        )


@forward_op.register_fake
def _(
    query,
    key,
    value,
    log_gate,
    key_mask,
    segment_ids,
    dropout_seed,
    scale,
    threshold,
    dropout,
    impl,
):
    rows = query.shape[:3]
    out = query.new_empty(*rows, value.shape[3])
    return out, query.new_empty(rows, dtype=torch.promote_types(query.dtype, torch.float32))


@torch.library.custom_op("tra::threshold_relative_attention_backward", mutates_args=())
def backward_op(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    out: Tensor,
    log_normaliser: Tensor,
    key_mask: Tensor | None,
    segment_ids: Tensor | None,
    dropout_seed: Tensor | None,
    scale: float,
    threshold: float,
    dropout: float,
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
            log_normaliser,
            key_mask,
            segment_ids,
            dropout_seed,
            scale,
            threshold,
            dropout,
        )
    # The layout that the fake kernel promises.
    return tuple(gradient.contiguous() for gradient in gradients)


@backward_op.register_fake
def _(grad_out, query, key, value, log_gate, *_):
    return tuple(x.new_empty(x.shape) for x in (query, key, value, log_gate))


def _setup_context(ctx, inputs, output):
    *tensors, scale, threshold, dropout, impl = inputs
    query, key, value, log_gate, key_mask, segment_ids, dropout_seed = tensors
    out, log_normaliser = output
    ctx.save_for_backward(query, key, value, log_gate, out, log_normaliser, key_mask, segment_ids, dropout_seed)
    ctx.options = (scale, threshold, dropout, impl)
    # The normaliser is a by-product for backward, not a result: no gradient may enter through it.
    ctx.mark_non_differentiable(log_normaliser)


def _backward(ctx, grad_out, _grad_log_normaliser):
    gradients = backward_op(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *[None] * 7)


forward_op.register_autograd(_backward, setup_context=_setup_context)

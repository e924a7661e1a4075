"""What PyTorch knows of an operator beside its numbers: schemas, fake kernels, gradients, and that nobody may vmap it.

Each implementation is an operator of its own, with one more for its backward, and all have the same schemas.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.ops.threshold_relative.call import Inputs, Options

TENSORS = len(Inputs._fields)
SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", float | None: "float?"}
ARGUMENTS = ", ".join(
    f"{SCHEMA_TYPES[annotation]} {name}"
    for structure in (Inputs, Options)
    for name, annotation in structure.__annotations__.items()
)
"""Inputs and Options one after the other: a schema knows no structures. Nor does it know absent results: a tensor of
shape [0] takes their place."""
ARGUMENT_COUNT = TENSORS + len(Options._fields)
LIBRARY = torch.library.Library("tra", "FRAGMENT")
DOUBLE_BACKWARD = "double backward: it is differentiable once"


class Operators(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """Arguments, and whether backward may follow -> out, row_state, residual"""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]
    """grad_out, out, row_state, residual, which of query, key and value want gradients, arguments -> gradients of
    query, key, value, log_gate and row_threshold"""


def define(name: str, residual_dtypes: Callable[[], Collection[torch.dtype]]) -> Operators:
    """Define ``tra::threshold_relative_attention_{name}`` and its backward, whose kernels are registered elsewhere.

    Args:
        name: of the implementation.
        residual_dtypes: of query, for which its forward returns a residual in training.
    """

    def fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs, _, (training,) = unflatten(arguments)
        query = inputs.query
        shape = (*query.shape[:3], inputs.value.shape[3])
        keeps_residual = training and query.dtype in residual_dtypes()
        return (
            query.new_empty(shape),
            query.new_empty(*shape[:3], 2, dtype=torch.promote_types(query.dtype, torch.float32)),
            query.new_empty(shape if keeps_residual else (0,), dtype=torch.bfloat16),
        )

    def fake_backward(grad_out: Tensor, *others: Any) -> tuple[Tensor, ...]:
        inputs, options, _ = unflatten(others[6:])
        wants = (*others[3:6], True, inputs.row_threshold is not None and options.straight_through > 0.0)
        likes = (*inputs[:4], inputs.row_threshold)
        return tuple(
            like.new_empty(like.shape) if want and like is not None else grad_out.new_empty(0, dtype=torch.float32)
            for want, like in zip(wants, likes, strict=True)
        )

    full = f"threshold_relative_attention_{name}"
    _define(full, f"({ARGUMENTS}, bool training) -> (Tensor, Tensor, Tensor)", fake_forward)
    _define(
        f"{full}_backward",
        "(Tensor grad_out, Tensor out, Tensor row_state, Tensor residual, "
        f"bool wants_query, bool wants_key, bool wants_value, {ARGUMENTS}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        fake_backward,
    )
    namespace = torch.ops.tra
    operators = Operators(getattr(namespace, full).default, getattr(namespace, f"{full}_backward").default)
    # For compiled code; op.py says why not for all.
    torch.library.register_autograd(
        f"tra::{full}",
        lambda ctx, grad_out, *_: (*gradients(ctx, operators.backward, grad_out), None),
        setup_context=lambda ctx, inputs, output: save_for_backward(ctx, inputs[:-1], output),
        lib=LIBRARY,
    )
    # Without this PyTorch would return gradients of gradients from which this operator is missing.
    torch.library.register_autograd(f"tra::{full}_backward", _refuse_double_backward, lib=LIBRARY)
    return operators


class PieceOperators(NamedTuple):
    """A piece of the sequence after another, from near to far; `pieces` says what they are handed."""

    forward: Callable[..., None]
    """state, out, row_state, residual, place, arguments -> nothing: rows that end are written"""
    backward: Callable[..., tuple[Tensor, Tensor]]
    """state, gradients of query, log_gate and row_threshold, center, grad_out, out, row_state, residual, place,
    arguments -> gradients of the piece's keys and values"""
    span: Callable[[Tensor], int]
    """Any tensor on the CPU -> pieces begin where so many keys that are no padding come before, or a multiple"""


def define_pieces(name: str) -> PieceOperators:
    """Define ``tra::threshold_relative_attention_{name}_piece``, its backward and its span. They write to what they are
    given, and serve neither autograd nor compilation."""
    place = (
        "Tensor? row_segments, Tensor? row_starts, Tensor? valid_keys, "
        "int first_query, int all_queries, int first_key, int all_keys, " + ARGUMENTS
    )
    full = f"threshold_relative_attention_{name}"
    LIBRARY.define(
        f"{full}_piece(Tensor(a!) state, Tensor(b!) out, Tensor(c!) row_state, Tensor(d!) residual, {place}) -> ()"
    )
    LIBRARY.define(
        f"{full}_piece_backward(Tensor(a!) state, Tensor(b!) grad_query, Tensor(c!) grad_gate, "
        "Tensor(d!)? grad_threshold, Tensor center, Tensor grad_out, Tensor out, Tensor row_state, Tensor residual, "
        f"{place}) -> (Tensor, Tensor)"
    )
    LIBRARY.define(f"{full}_span(Tensor any) -> int")
    find = partial(getattr, torch.ops.tra)
    return PieceOperators(
        find(f"{full}_piece").default, find(f"{full}_piece_backward").default, find(f"{full}_span").default
    )


def _refuse_double_backward(*_: Any) -> Any:
    raise unsupported(DOUBLE_BACKWARD)


def save_for_backward(ctx: Any, arguments: tuple[Any, ...], result: tuple[Tensor, Tensor, Tensor]) -> None:
    """What `gradients` reads. The arguments are those of the schema."""
    ctx.save_for_backward(*result, *arguments[:TENSORS])
    ctx.options = arguments[TENSORS:]
    # By-products for backward, not results: no gradient may enter through them.
    ctx.mark_non_differentiable(*result[1:])
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, backward: Callable[..., Any], grad_out: Tensor | None) -> list[Tensor | None]:
    """Those of the arguments, None for what wants or has none."""
    wants = ctx.needs_input_grad[-ARGUMENT_COUNT - 1 : -1]
    found: list[Tensor | None] = [None] * ARGUMENT_COUNT
    if grad_out is None:
        return found
    saved = ctx.saved_tensors
    results = backward(grad_out, *saved[:3], *wants[:3], *saved[3:], *ctx.options)
    for place, gradient in zip((0, 1, 2, 3, Inputs._fields.index("row_threshold")), results, strict=True):
        if wants[place] and gradient.dim() > 1:  # otherwise absent
            found[place] = gradient
    return found


def unflatten(arguments: tuple[Any, ...]) -> tuple[Inputs, Options, tuple[Any, ...]]:
    """Inputs, Options, and what comes after them."""
    options = Options(*arguments[TENSORS:ARGUMENT_COUNT])
    return Inputs(*arguments[:TENSORS]), options, arguments[ARGUMENT_COUNT:]


def unsupported(what: str) -> NotImplementedError:
    return NotImplementedError(f"threshold_relative_attention does not support {what}")


def refuse_vmap(*_: Any) -> Any:
    raise unsupported("torch.vmap: its tensors have a batch dimension of their own")


def _define(name: str, schema: str, fake: Callable[..., Any]) -> None:
    LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"tra::{name}", fake, lib=LIBRARY)
    torch.library.register_vmap(f"tra::{name}", refuse_vmap, lib=LIBRARY)

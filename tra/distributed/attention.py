"""The operator over a sequence of which each process holds a shard.

A row first walks the keys of its own process, then asks for more, from near to far, until it is done. How far that is
depends on its gate: mostly one neighbour. Nobody sends what nobody asks for.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tra.distributed.processes import ContextParallel, Layout
from tra.ops.threshold_relative.api import ROUNDING, apply_autocast, threshold_relative_attention
from tra.ops.threshold_relative.call import Inputs, Options, Result
from tra.ops.threshold_relative.pieces import BackwardWalk, Piece, Rows, Walk, value_center, value_range

SAFE_SPREAD = 40.0
"""kSafeSpread of plan.h: rows whose scores may span more need all their keys at once."""
BOUND_SLACK = 1.01
"""By how much computed scores may pass their bounds, and more: kBoundSlack and kTypeSlack there."""


def sharded_attention(
    shards: ContextParallel,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    *,
    scale: float | None = None,
    threshold: float | Tensor = 0.0,
    straight_through: float = 0.0,
    dropout: float = 0.0,
    tolerance: float | None = None,
    score_bound: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """:func:`~tra.ops.threshold_relative_attention` of this process's rows over the keys of all processes.

    Tensors are this process's shard; masks and documents are in the layout. Every process of the group calls this.
    """
    query, key, value = apply_autocast(query, key, value)
    scale = 1.0 / math.sqrt(query.shape[3]) if scale is None else scale
    rows = query.shape[:3]
    row_threshold = threshold.expand(rows) if isinstance(threshold, Tensor) else None
    found = _row_bounds(shards, layout, query, key, scale) if score_bound is None else score_bound
    bound = torch.as_tensor(found, dtype=torch.float64)
    if score_bound is None or not 2.0 * BOUND_SLACK * score_bound <= SAFE_SPREAD:
        most = bound * BOUND_SLACK
        spread = most - torch.maximum(-most, torch.as_tensor(threshold, dtype=torch.float64))
        here = torch.tensor([bool((spread <= SAFE_SPREAD).all())]).byte()
        if not all(bool(each) for each in shards.exchange(here)):
            options: dict[str, Any] = {"scale": scale, "threshold": threshold, "straight_through": straight_through}
            options |= {"dropout": dropout, "tolerance": tolerance, "impl": impl, "score_bound": score_bound}
            return _over_all_keys(shards, layout, query, key, value, log_gate, options)
    seed = None
    if dropout > 0.0:  # one mask for the sequence: the first process draws it
        seed = shards.exchange(torch.randint(2**62, (1,)))[0]
    inputs = Inputs(
        query, key, value, log_gate, None, None, seed, row_threshold, bound if score_bound is None else None
    )
    number = 0.0 if isinstance(threshold, Tensor) else float(threshold)
    stop = ROUNDING if tolerance is None else min(float(tolerance), 1.0)
    call = Options(float(scale), number, float(straight_through), float(dropout), stop, score_bound)
    return _Sharded.apply(shards, layout, call, impl, *inputs)


def gather_keys(shards: ContextParallel, layout: Layout, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of all processes in each of them, for what is written behind these tokens; without gradients."""
    key, value = gather_all(shards, layout, key, value)
    return key, value


def gather_all(shards: ContextParallel, layout: Layout, *tensors: Tensor) -> list[Tensor]:
    """``[B, H, L, ...]``: the tensors ``[B, H, n, ...]`` of all processes in each of them, without gradients."""
    whole = []
    for own in tensors:
        missing = max(layout.lengths) - own.shape[2]
        padded = torch.nn.functional.pad(own.detach(), [0, 0] * (own.dim() - 3) + [0, missing]).contiguous()
        parts = zip(shards.exchange(padded), layout.lengths, strict=True)
        shards.traffic.bytes += padded.nbytes * (shards.size - 1)
        whole.append(torch.cat([part[:, :, :count] for part, count in parts], 2))
    return whole


def gather_before(shards: ContextParallel, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
    """``[B, H, end, ...]``: the tensors ``[B, H, n, ...]`` of this process behind those of all processes before it.

    Gradients go home. Every process of the group calls this.
    """
    return _Gathered.apply(shards, layout, *tensors)


def _row_bounds(shards: ContextParallel, layout: Layout, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """[B, Hq, n]: the bound on each row's scores that one process finds by the norms of all keys before it."""
    wide = torch.promote_types(key.dtype, torch.float32)
    norm = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float64).to(wide).double()
    begin, end = layout.span(layout.rank)
    readable = key.isfinite().all(-1)
    if layout.key_mask is not None:
        readable = readable & layout.key_mask[:, None, begin:end]
    norm = norm.where(readable, 0.0).cummax(-1).values
    before = torch.stack(shards.exchange(norm[:, :, -1].contiguous()))[: shards.rank]
    if len(before):
        norm = torch.maximum(norm, before.amax(0)[..., None])
    size = torch.tensor(scale, dtype=wide).item() * torch.linalg.vector_norm(query, dim=-1, dtype=torch.float64)
    bound = size * norm.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return bound.where(size > 0.0, 0.0).nan_to_num(nan=0.0)


def _rows(layout: Layout, inputs: Inputs, options: Options) -> Rows:
    begin, end = layout.span(layout.rank)
    segments, starts = layout.segments, layout.starts
    if segments is not None and starts is not None:
        segments, starts = segments[:, begin:end], starts[:, begin:end]
    valid = None if layout.key_mask is None else layout.key_mask.sum(1)
    return Rows(inputs, options, begin, layout.length, segments=segments, starts=starts, valid_keys=valid)


def _piece(layout: Layout, key: Tensor, value: Tensor, low: int, high: int) -> Piece:
    mask, segments = layout.key_mask, layout.segments
    return Piece(
        key,
        value,
        low,
        None if mask is None else mask[:, low:high],
        None if mask is None else mask[:, :low].sum(1),
        None if segments is None else segments[:, low:high],
    )


class _Requests:
    """Asks for keys as long as a walk needs them, and serves the others meanwhile.

    In each round a process that is not done tells all processes before it, of which one owns the keys that it wants,
    for which sequences and key heads it wants them; one that is done says that it wants none, and nothing more.
    """

    def __init__(self, shards: ContextParallel, layout: Layout, key: Tensor, value: Tensor) -> None:
        self.shards, self.layout = shards, layout
        self.both = torch.cat([key, value], dim=-1)
        self.width = key.shape[3]
        self.asked: list[tuple[int, Tensor, Piece]] = []
        """Whom, for which heads, and what it sent."""
        self.served: list[tuple[int, Tensor, int, int]] = []
        """To whom, for which heads, and which keys [low, high)."""

    def run(self, walk: Walk | BackwardWalk, own: Piece) -> None:
        shards, layout, me = self.shards, self.layout, self.shards.rank
        wants = torch.full(self.both.shape[:2], layout.asks_at_all(me))  # the first request is known without a word
        clients = {rank: torch.ones_like(wants) for rank in range(me + 1, shards.size) if layout.asks_at_all(rank)}
        sending: list[tuple[int, Any]] = []
        number = 0
        while wants.any() or clients:
            if number > 0 and wants.any():
                wants = walk.unfinished.unflatten(1, (wants.shape[1], -1)).flatten(2).any(-1).cpu()
                sending += [shards.send(wants, peer) for peer in range(me)]
            if number > 0:
                shards.wait(*[shards.receive(wanted, client) for client, wanted in clients.items()])
                clients = {client: wanted for client, wanted in clients.items() if wanted.any()}
            for client, wanted in clients.items():
                owner, low, high = layout.requests(client)[number]
                if owner == me:
                    first = layout.edges[me]
                    sending.append(shards.send(self.both[:, :, low - first : high - first][wanted], client))
                    self.served.append((client, wanted.clone(), low, high))
            coming = None
            if wants.any():
                owner, low, high = layout.requests(me)[number]
                buffer = self.both.new_empty(int(wants.sum()), high - low, self.both.shape[3])
                coming = shards.receive(buffer, owner)
            if number == 0:
                walk.visit(own)  # while the first keys travel
            if coming is not None:
                shards.wait(coming)
                both = self.both.new_zeros(*self.both.shape[:2], high - low, self.both.shape[3])
                both[wants] = buffer
                piece = _piece(layout, both[..., : self.width], both[..., self.width :], low, high)
                walk.visit(piece)
                self.asked.append((owner, wants, piece))
                shards.traffic.rounds += 1
            number += 1
        if number == 0:
            walk.visit(own)
        for _, low, high in layout.requests(me):
            if walk.done:
                break
            # A document begins with the shard, where no sum ends: keys before it, of whatever numbers, end the sum.
            nothing = self.both.new_zeros(*self.both.shape[:2], high - low, self.both.shape[3])
            walk.visit(_piece(layout, nothing[..., : self.width], nothing[..., self.width :], low, high))
        shards.wait(*sending)
        shards.traffic.calls += 1
        if self.asked:
            shards.traffic.hops += me - self.asked[-1][0]


class _Sharded(Function):
    @staticmethod
    def forward(
        ctx: Any, shards: ContextParallel, layout: Layout, options: Options, impl: str, *tensors: Tensor | None
    ) -> Tensor:
        inputs = Inputs(*tensors)  # type: ignore[arg-type]
        walk = Walk(_rows(layout, inputs, options), impl=impl, training=any(ctx.needs_input_grad))
        requests = _Requests(shards, layout, inputs.key, inputs.value)
        own = _piece(layout, inputs.key, inputs.value, *layout.span(layout.rank))
        requests.run(walk, own)
        result = walk.result()
        ctx.save_for_backward(*tensors, *result)
        ctx.call = shards, layout, options, walk.impl
        return result.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        shards, layout, options, impl = ctx.call
        saved = ctx.saved_tensors
        inputs, result = Inputs(*saved[: len(Inputs._fields)]), Result(*saved[len(Inputs._fields) :])
        begin, end = layout.span(layout.rank)
        mask = None if layout.key_mask is None else layout.key_mask[:, begin:end]
        both_ends = torch.stack(value_range(inputs.value, mask))
        center = value_center([(low, high) for low, high in shards.exchange(both_ends)], options.dropout)
        walk = BackwardWalk(_rows(layout, inputs, options), result, grad_out.contiguous(), center, impl=impl)
        requests = _Requests(shards, layout, inputs.key, inputs.value)
        own = _piece(layout, inputs.key, inputs.value, begin, end).with_gradients()
        requests.run(walk, own)
        assert own.grad_key is not None
        assert own.grad_value is not None
        # Gradients of others' keys go home, where they are added in the order of ranks.
        sending, home = [], []
        for client, heads, low, high in requests.served:
            both = own.grad_key.new_empty(int(heads.sum()), high - low, requests.both.shape[3])
            home.append((client, heads, low, both, shards.receive(both, client)))
        for owner, heads, piece in requests.asked:
            assert piece.grad_key is not None
            assert piece.grad_value is not None
            sending.append(shards.send(torch.cat([piece.grad_key, piece.grad_value], -1)[heads], owner))
        for _, heads, low, both, coming in sorted(home, key=lambda each: (each[0], -each[2])):
            shards.wait(coming)
            where = slice(low - begin, low - begin + both.shape[1])
            own.grad_key[:, :, where][heads] += both[..., : requests.width]
            own.grad_value[:, :, where][heads] += both[..., requests.width :]
        shards.wait(*sending)
        rows = walk.result()
        key, value = own.grad_key.to(inputs.key.dtype), own.grad_value.to(inputs.value.dtype)
        gradients = Inputs(rows.query, key, value, rows.log_gate, None, None, None, rows.row_threshold, None)
        return None, None, None, None, *gradients


def _over_all_keys(
    shards: ContextParallel,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Where scores are not bounded well enough to go on from a state: every process gets all keys before its own."""
    end = layout.span(layout.rank)[1]
    key, value = gather_before(shards, layout, key, value)
    key_mask, segment_ids = (None if mask is None else mask[:, :end] for mask in (layout.key_mask, layout.segments))
    return threshold_relative_attention(
        query, key, value, log_gate, key_mask=key_mask, segment_ids=segment_ids, **options
    )


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, shards: ContextParallel, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = shards, layout
        parts = [
            [own.new_empty(*own.shape[:2], count, *own.shape[3:]) for own in tensors]
            for count in layout.lengths[: layout.rank]
        ]
        pending = [shards.send(own, peer) for peer in range(layout.rank + 1, shards.size) for own in tensors]
        pending += [shards.receive(part, peer) for peer, theirs in enumerate(parts) for part in theirs]
        shards.wait(*pending)
        return tuple(torch.cat(each, 2) for each in zip(*parts, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        shards, layout = ctx.call
        begin, end = layout.span(layout.rank)
        mine = [gradient[:, :, begin:end].clone(memory_format=torch.contiguous_format) for gradient in gradients]
        home = [(own, torch.empty_like(own), peer) for peer in range(layout.rank + 1, shards.size) for own in mine]
        pending = [
            shards.send(gradient[:, :, slice(*layout.span(peer))], peer)
            for peer in range(layout.rank)
            for gradient in gradients
        ]
        pending += [shards.receive(buffer, peer) for _, buffer, peer in home]
        shards.wait(*pending)
        for own, buffer, _ in home:
            own += buffer
        return None, None, *mine

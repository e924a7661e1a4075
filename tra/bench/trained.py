"""A trained model against SDPA: the operator on the queries, keys, values and gates that the model makes of its own
text or task, and a new token of the whole model behind a cache of that.

SDPA gets the same queries, keys and values: what RoPE's attention costs at that shape, its rotation left out. A new
token is compared with that of a RoPE decoder of the same sizes, untrained: the time of RoPE does not depend on numbers,
that of TRA does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tra.attention import Context
from tra.attention.threshold_relative import OperatorAttention
from tra.bench.cases import Case
from tra.bench.timing import Work
from tra.bench.workloads import new_token, next_token
from tra.model import Block, Decoder
from tra.ops import threshold_relative_attention
from tra.runs import Run
from tra.tasks import Evaluation

LENGTHS = (4096, 16384, 65536)
QUANTILES = (0.01, 0.1, 0.5, 0.9)


class Layer(NamedTuple):
    """What one layer's attention is computed from."""

    attention: OperatorAttention
    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor
    threshold: float | Tensor

    def mixed(self, new: int | None = None) -> Tensor:
        """The operator as the layer calls it: of all tokens, or of the last few with all others cached."""
        query, gate = (x if new is None else x[:, :, -new:] for x in (self.query, self.log_gate))
        threshold = self.threshold
        if new is not None and isinstance(threshold, Tensor):
            threshold = threshold[..., -new:]
        rule = self.attention.rule(Context())
        return threshold_relative_attention(query, self.key, self.value, gate, threshold=threshold, **rule)


def trained_cases(run: Run, lengths: Sequence[int] = LENGTHS) -> Iterator[Case]:
    """At each length: attention of all tokens, attention of one token, and one token of the whole model."""
    if not all(isinstance(block.attention, OperatorAttention) for block in run.model.blocks):
        raise ValueError(
            f"run must be of a mechanism that the operator computes, such as tra, got {run.model.config.attention}"
        )
    for length in lengths:
        yield from _cases_at(run, own_tokens(run, length))


def _cases_at(run: Run, tokens: Tensor) -> Iterator[Case]:
    """The time of attention is that of all layers, divided by their number; SDPA, for which all are alike, runs on the
    first."""
    model = run.model.eval()
    config, length = model.config, tokens.shape[1]
    layers = cache(partial(layers_of, model, tokens))
    shape = f"1x{config.heads}x{length}"
    yield Case(
        "forward, a trained model's own",
        shape,
        lambda: all_layers(layers()),
        {"SDPA": lambda: sdpa(layers()[0], is_causal=True)},
        repeats=config.layers,
    )
    yield Case(
        "decode one token, a trained model's own",
        shape,
        lambda: all_layers(layers(), new=1),
        {"SDPA": lambda: sdpa(layers()[0], new=1)},
        repeats=config.layers,
    )
    options = {name: x for name, x in config.attention_options.items() if name == "qk_norm"}
    rope = replace(config, attention="rope", attention_options=options)
    yield Case(
        "new token of the trained model",
        f"1x{length}",
        lambda: own_token(model, tokens),
        {"RoPE on SDPA": lambda: new_token(rope, length)},
    )


def own_tokens(run: Run, length: int) -> Tensor:
    """``[1, length]``: the beginning of the set on which the run is measured."""
    sets = [entry.name for entry in run.recipe.evaluations] or list(run.task.evaluation_sets())
    tokens = next(run.task.evaluation_batches(Evaluation(sets[0], length, 1), 1)).tokens[:, :length]
    if tokens.shape[1] < length:
        raise ValueError(f"lengths must be at most the {tokens.shape[1]} tokens of {sets[0]}, got {length}")
    return tokens.long()


@torch.inference_mode()
def layers_of(model: Decoder, tokens: Tensor) -> list[Layer]:
    """What a model's layers compute attention from, as views like those in the model itself."""
    streams: list[Tensor] = []
    model.hidden_from(model.embedded(tokens), streams=streams)
    layers = []
    for block, stream in zip(model.blocks, streams, strict=True):
        assert isinstance(block, Block)
        assert isinstance(block.attention, OperatorAttention)
        x = block.attention_norm(stream)
        attention = block.attention
        layers.append(
            Layer(attention, *attention.project(x, Context()), attention.log_gate(x), attention.thresholds(x))
        )
    return layers


def gates_of(run: Run, length: int) -> dict[str, float]:
    """Quantiles of -log_gate over all layers, heads and tokens: how strongly the model forgets."""
    strength = -torch.cat([layer.log_gate.flatten() for layer in layers_of(run.model.eval(), own_tokens(run, length))])
    ranked = strength.sort().values
    return {f"{q:g}": round(ranked[int(q * (len(ranked) - 1))].item(), 4) for q in QUANTILES}


def all_layers(layers: Sequence[Layer], new: int | None = None) -> Work:
    return torch.inference_mode()(lambda: [layer.mixed(new) for layer in layers])


def sdpa(layer: Layer, new: int | None = None, is_causal: bool = False) -> Work:
    query = layer.query if new is None else layer.query[:, :, -new:]
    grouped = layer.query.shape[1] != layer.key.shape[1]
    attend = partial(F.scaled_dot_product_attention, query, layer.key, layer.value)
    return torch.inference_mode()(partial(attend, is_causal=is_causal, enable_gqa=grouped))


@torch.inference_mode()
def own_token(model: Decoder, tokens: Tensor) -> Work:
    """One step of generation behind a cache of these tokens."""
    cached = model.new_cache()
    model.hidden(tokens, cache=cached)
    return next_token(model, cached, tokens[:, -1:])

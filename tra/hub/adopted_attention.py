"""The attention of adopted models: gates and thresholds, and the functions that transformers calls.

A hook before each attention module computes gates and thresholds from the module's input and passes them to the
attention function "tra", which is registered beside "sdpa".
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from tra.attention.dense import dense_mix, dense_softmax, full_product, sum_from_right
from tra.attention.threshold_relative import KEEPS_ALL, THRESHOLD_RATE, LearnedThreshold
from tra.hub.packing import positioned_segments, told_segments
from tra.lookup import lookup
from tra.ops import threshold_relative_attention
from tra.ops.threshold_relative.op import IMPLEMENTATIONS
from tra.ops.visibility import visible_keys

NAME = "tra"
"""Of the attention function, of the module with gates, and of the options in a config."""


def is_number(value: Any, least: float = -math.inf) -> bool:
    """Whether it is a finite number, of at least so much; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= least


@dataclass(frozen=True)
class Options:
    """What a config remembers of an adoption; the arguments of :func:`adopt`."""

    layers: list[int] | None = None
    drop_positions: bool | list[int] = False
    gate_bias: float = 3.0
    threshold: float | str | None = "query"
    threshold_start: float = -4.0
    straight_through: float = 0.5
    tolerance: float | None = None
    impl: str = "auto"

    def __post_init__(self) -> None:
        if self.layers is not None and not isinstance(self.layers, list):
            raise ValueError(f"layers must be a list of layers, got {self.layers!r}")
        if not isinstance(self.drop_positions, bool | list):
            raise ValueError(f"drop_positions must be a list of layers, True or False, got {self.drop_positions!r}")
        for name in ("gate_bias", "threshold_start"):
            if not is_number(getattr(self, name)):
                raise ValueError(f"{name} must be a finite number, got {getattr(self, name)!r}")
        if not is_number(self.straight_through, least=0.0):
            raise ValueError(f"straight_through must be a temperature of at least 0, got {self.straight_through!r}")
        if isinstance(self.threshold, str):
            lookup(dict.fromkeys(get_args(LearnedThreshold)), self.threshold, "threshold")
            if self.straight_through == 0.0:
                raise ValueError(
                    "straight_through must be greater than 0 for a learned threshold, whose gradient passes through "
                    f"it; 0.5 does well, got {self.straight_through!r}"
                )
        elif self.threshold is not None and not is_number(self.threshold):
            raise ValueError(f"threshold must be a finite number, 'head', 'query' or None, got {self.threshold!r}")
        if self.tolerance is not None and not is_number(self.tolerance, least=0.0):
            raise ValueError(f"tolerance must be None or a number of at least 0, got {self.tolerance!r}")
        lookup({"auto": None, **IMPLEMENTATIONS}, self.impl, "impl")

    @classmethod
    def of_config(cls, stored: Any) -> "Options":
        """What a config says, which may come from a file."""
        if not isinstance(stored, dict) or not stored.keys() <= cls.__dataclass_fields__.keys():
            raise ValueError(
                f"config.tra must hold options of tra.hub.adopt ({', '.join(cls.__dataclass_fields__)}), got {stored!r}"
            )
        return cls(**stored)

    def chosen(self, name: str, layers: int) -> set[int]:
        """Which of so many layers an option names."""
        given = getattr(self, name)
        if given is None or given is True:
            return set(range(layers))
        if given is False:
            return set()
        for layer in given:
            if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < layers:
                raise ValueError(f"{name} must hold layers from 0 to {layers - 1}, got {layer!r}")
        return set(given)


class TraGates(nn.Module):
    """Gate and threshold of each head, read from each token. No linear layers: tools would quantise and adapt those."""

    def __init__(self, width: int, heads: int, options: Options) -> None:
        super().__init__()
        self.options = options
        self.gate_weight = nn.Parameter(torch.empty(heads, width))
        self.gate_bias = nn.Parameter(torch.empty(heads))
        if isinstance(options.threshold, str):
            self.threshold_bias = nn.Parameter(torch.empty(heads))
        if options.threshold == "query":
            self.threshold_weight = nn.Parameter(torch.empty(heads, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Nothing is drawn at random: every token starts with the same gate and threshold."""
        for name, parameter in self.named_parameters():
            start = {
                "gate_bias": self.options.gate_bias,
                "threshold_bias": self.options.threshold_start / THRESHOLD_RATE,
            }
            nn.init.constant_(parameter, start.get(name, 0.0))

    def forward(self, hidden: Tensor) -> tuple[Tensor, float | Tensor]:
        """The logarithm of the gates ``[B, heads, L]`` in float32; the threshold, a number or ``[B, heads, L]``."""
        # Distance multiplies the gate's error: nothing after the product is rounded to half precision.
        log_gate = F.logsigmoid(F.linear(hidden, self.gate_weight, self.gate_bias).float()).transpose(1, 2)
        threshold = self.options.threshold
        if not isinstance(threshold, str):
            return log_gate, KEEPS_ALL if threshold is None else float(threshold)
        bias = THRESHOLD_RATE * self.threshold_bias
        if threshold == "head":
            return log_gate, bias[:, None]
        return log_gate, F.linear(hidden, self.threshold_weight, bias).transpose(1, 2)


class Call(NamedTuple):
    """What the hook before an attention module tells the attention function."""

    gates: tuple[Tensor, float | Tensor] | None
    """Log gates and thresholds; None for a layer that keeps its attention."""
    options: Options
    end: int | Tensor | None
    """How many tokens a cache of fixed size holds after this call; None where there is no other than these."""
    segments: Tensor | None
    """The packed document of each token; None if there is one."""


def before_body(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hook before a whole body: what its attention modules are not told otherwise.

    GPT-2 keeps from its layers that attentions are asked for. A mask that is a matrix ``[B, 1, Lq, Lk]`` comes from the
    caller, as in tree decoding: it says by itself what sees what, so that positions say nothing of documents. Beside a
    static cache it may come from `generate`, which makes one of windows.
    """
    given = (*args, *kwargs.values())
    matrix = next((one for one in given if isinstance(one, Tensor) and one.dim() == 4), None)
    cache = next((one for one in given if isinstance(one, transformers.Cache)), None)
    if matrix is not None and not torch.compiler.is_compiling():
        refuse_matrix(matrix, 0 if cache is None else int(cache.get_seq_length()))
    decides = matrix is not None and (cache is None or not cache.is_compileable)
    return args, {**kwargs, "tra_output_attentions": kwargs.get("output_attentions"), "tra_matrix": decides}


def refuse_matrix(mask: Tensor, cached: int) -> None:
    """Raise a ValueError for a matrix that TRA cannot heed: one that sees ahead, or adds to scores."""
    seen = visible_in(mask)
    if seen.triu(cached + 1).any():
        raise ValueError("attention_mask must be causal: TRA is, got a matrix in which a token sees later ones")
    if mask.is_floating_point() and (mask.masked_fill(~seen, 0.0) != 0.0).any():
        raise ValueError("attention_mask must show or hide: in a matrix of numbers 0 or the least number, got others")


def before_attention(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, options: Options, rotary_scale: float | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The hook: what an attention module is called with, and beside it a :class:`Call` for the attention function."""
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    batch, tokens = hidden.shape[:2]
    cache = kwargs.get("past_key_values", kwargs.get("layer_past"))
    end = segments = None
    if cache is not None and cache.layers and cache.layers[min(module.layer_idx, len(cache.layers) - 1)].is_compileable:
        end = cache.get_query_offset(module.layer_idx) + tokens
    segments = told_segments(batch, tokens, hidden.device, kwargs)
    # While compiling, the data cannot tell whether a document begins behind tokens in the cache.
    looked = (cache is None or not torch.compiler.is_compiling()) and not kwargs.get("tra_matrix", False)
    if segments is None and tokens > 1 and kwargs.get("position_ids") is not None and looked:
        mask = kwargs.get("attention_mask")
        earlier: bool | Tensor = cache is not None and int(cache.get_seq_length(module.layer_idx)) > 0
        if mask is not None:  # of the new tokens; in a matrix, whether each of them sees itself
            last = mask.shape[-1] if end is None else min(int(end), mask.shape[-1])  # behind it a static cache is empty
            if earlier:  # and not all of it is padding
                before = visible_in(mask[..., : last - tokens])
                earlier = (before if mask.dim() == 2 else before[:, 0].any(dim=1)).any(dim=1, keepdim=True)
            mask = mask[..., last - tokens : last]
            mask = mask if mask.dim() == 2 else mask[:, 0].diagonal(dim1=1, dim2=2)
            mask = visible_in(mask).expand(batch, tokens)
        segments = positioned_segments(kwargs["position_ids"], mask, batch, tokens, goes_on=earlier)
    if cache is not None and not torch.compiler.is_compiling():
        packed = getattr(cache, "tra_packed", False)
        if packed and cache.get_seq_length(module.layer_idx) > 0:
            raise ValueError("past_key_values must not hold packed documents, which later tokens cannot tell apart")
        if packed or segments is not None:
            cache.tra_packed = segments is not None
    gates = getattr(module, NAME, None)
    kwargs["tra_call"] = Call(None if gates is None else gates(hidden), options, end, segments)
    if rotary_scale is not None and kwargs.get("position_embeddings") is not None:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (torch.full_like(cos, rotary_scale), torch.zeros_like(sin))
    return args, kwargs


def visible_in(mask: Tensor) -> Tensor:
    """What a mask lets see: it says so, or a very negative number is added to the scores of the rest."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    allow_is_causal_skip: bool = True,
    **keywords: Any,
) -> Tensor | None:
    """What attention modules are handed as their mask: padding ``[B, Lk]``, or for windows and masks of a user's own
    ``[B, 1, Lq, Lk]``. Packed documents are found by the hook, without a matrix."""
    if local_size is not None or use_vmap:
        keywords |= {"attention_mask": attention_mask, "local_size": local_size, "use_vmap": use_vmap}
        keywords |= {"q_offset": q_offset, "kv_offset": kv_offset, "allow_is_causal_skip": False}
        return sdpa_mask(batch_size, q_length, kv_length, **keywords)
    if attention_mask is None:
        return None
    mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    if mask.shape[1] < kv_length:  # a cache of fixed size
        mask = F.pad(mask, (0, kv_length - mask.shape[1]))
    elif not torch.compiler.is_compiling() and mask.all():
        return None
    return mask


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    tra_call: Call | None = None,
    tra_output_attentions: bool | None = None,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function "tra" of transformers: ``[B, L, Hq, D]``, and weights where they are asked for."""
    if tra_call is None:
        raise ValueError(
            f"attn_implementation must not be '{NAME}' for a model without gates: adopt it with tra.hub.adopt(model), "
            f"got {type(module).__name__}"
        )
    if keywords.get("is_causal") is False:
        raise ValueError("is_causal must be True: TRA is causal, got False")
    if output_attentions is None:
        output_attentions = tra_output_attentions
    if output_attentions is None:
        output_attentions = module.config.output_attentions
    gates, options, end, segments = tra_call
    if scaling is None:
        scaling = 1.0 / math.sqrt(query.shape[3])
    lengths = None
    if isinstance(end, Tensor):
        lengths = end.expand(len(key)).contiguous()
    elif end is not None and (attention_mask is None or attention_mask.dim() == 2):
        key, value = key[:, :, :end], value[:, :, :end]
        attention_mask = None if attention_mask is None else attention_mask[:, :end]
    queries, keys = query.shape[2], key.shape[2]
    if segments is not None and segments.shape[1] < keys:
        raise ValueError("documents must not be packed behind tokens in past_key_values")
    if attention_mask is not None and attention_mask.dim() == 4:
        matrix = visible_in(attention_mask)
        if segments is not None:
            matrix = matrix & (segments[:, None, :, None] == segments[:, None, None, :])
        visible, key_mask = matrix, None
    else:
        visible, key_mask = None, attention_mask
    if gates is not None and visible is None and softcap is None and not output_attentions:
        log_gate, threshold = gates
        learns = torch.is_grad_enabled() and options.threshold is not None
        out = threshold_relative_attention(
            query, key, value, log_gate,
            key_mask=key_mask, segment_ids=segments, key_lengths=lengths, scale=scaling, threshold=threshold,
            dropout=dropout,
            straight_through=options.straight_through if learns else 0.0,
            tolerance=options.tolerance, impl=options.impl,
        )  # fmt: skip
        return out.transpose(1, 2).contiguous(), None
    plain = key_mask is None and segments is None and lengths is None and queries in (1, keys)
    if visible is None and not (gates is None and plain):
        visible = visible_keys(queries, keys, key_mask, segments, query.device, lengths)
    if gates is None and softcap is None and not output_attentions:
        return sdpa_attention_forward(module, query, key, value, visible, dropout=dropout, scaling=scaling)
    if visible is None:
        visible = visible_keys(queries, keys, None, None, query.device, lengths)
    weights = dense_weights(query, key, gates, visible, scaling, softcap, options.straight_through)
    return dense_mix(weights, value, dropout).transpose(1, 2).contiguous(), weights if output_attentions else None


def dense_weights(
    query: Tensor,
    key: Tensor,
    gates: tuple[Tensor, float | Tensor] | None,
    visible: Tensor,
    scaling: float,
    softcap: float | None,
    straight_through: float,
) -> Tensor:
    """The attention matrix ``[B, Hq, Lq, Lk]``, for windows and soft caps, which the operator does not know.

    Gradients pass the threshold as in the operator: a step forward, a sigmoid backward.
    """
    scores = full_product(query, key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if gates is None:
        return dense_softmax(scores, visible)
    log_gate, threshold = gates
    limit = threshold[..., None] if isinstance(threshold, Tensor) else threshold
    kept = visible & (scores > limit)
    member = kept.to(scores.dtype)
    if straight_through > 0.0 and torch.is_grad_enabled():
        soft = torch.sigmoid((scores - limit) / straight_through).masked_fill(~visible, 0.0)
        member = member + (soft - soft.detach())  # 0 or 1
    distance = sum_from_right(member) - kept.to(scores.dtype)  # kept keys that are nearer
    logits = scores + log_gate[..., None] * distance
    logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
    # No key that is left out has a larger logit than the nearest kept one.
    weights = member * (logits - logits.detach().amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0.0, 1.0)


transformers.AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, attention_mask)

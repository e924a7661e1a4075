"""The decoder as a Hugging Face model."""

import copy
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.quantizers.auto import AutoQuantizationConfig
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults

from tra.attention.naming import find_mechanisms
from tra.distributed import current
from tra.hub.arguments import documents, key_mask_of, padded_mask, refuse_arguments
from tra.hub.cache import TraCache, prepare_cache
from tra.hub.config import UNDERSTOOD, NeverCopied, TraConfig, refuse_unknown
from tra.model import Block, Decoder, initialise

log = logging.get_logger(__name__)

EARLIER_NAMES = {r"^decoder\.head\.": "lm_head."}
"""What weights were called when one decoder held all of them. The rest differs by the prefix of the base model only,
which transformers adds by itself."""


class TraPreTrainedModel(NeverCopied, transformers.PreTrainedModel):
    """A decoder inside a transformers model."""

    config: TraConfig
    config_class = TraConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["TraBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: TraConfig, **keywords: Any) -> None:
        refuse_unknown(keywords)
        for keyword in keywords:
            if keyword not in UNDERSTOOD:
                raise ValueError(f"{keyword} must be given to the TraConfig, which is already there")
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As for every model, but from safetensors only and never with code that lies beside the weights."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors must be True: other files of weights may hold code, got False")
        for name in ("tp_plan", "tp_size", "distributed_config"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"{name} must be None: no mechanism divides its heads, and FSDP is Accelerate's; "
                    f"got {kwargs[name]!r}"
                )
        if (quantization := kwargs.get("quantization_config")) is not None:
            kwargs["quantization_config"] = without_gates(quantization)
        mapping = {**EARLIER_NAMES, **(kwargs.pop("key_mapping", None) or {})}
        ours = {"use_safetensors": True, "trust_remote_code": False, "key_mapping": mapping}
        loaded = super().from_pretrained(*args, **{**kwargs, **ours})
        model: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        # Saved again, weights are not called as they were before.
        model._weight_conversions = [
            entry for entry in model._weight_conversions if not set(entry.source_patterns) & EARLIER_NAMES.keys()
        ]
        return loaded

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """What was neither built here nor in the file is drawn: in a decoder by the mechanism's own rule, whatever was
        added to it by `_init_weights`."""
        for module in self.modules():
            if isinstance(module, Decoder) and not getattr(module, "_is_hf_initialized", False):
                draw_missing(module)
        super().initialize_weights()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding | nn.Linear):
            initialise(module)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        else:
            super()._init_weights(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        """ "eager" stands for the mechanism's own way, whatever that is; "sdpa" is the own way of some."""
        if attn_implementation in (None, "eager"):
            return "eager"
        on_sdpa = all(mechanism.uses_sdpa for mechanism in find_mechanisms(self.config.attention))
        if attn_implementation == "sdpa" and on_sdpa:
            return "sdpa"
        choices = "'eager' or 'sdpa'" if on_sdpa else "'eager'"
        raise ValueError(
            f"attn_implementation must be {choices}: {self.config.attention} is computed in its own way, "
            f"got {attn_implementation!r}"
        )

    @property
    def _body(self) -> Decoder:
        model: Any = self.base_model
        return model.decoder

    def get_input_embeddings(self) -> nn.Module:
        return self._body.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self._body.embedding = value

    def get_decoder(self) -> nn.Module:
        return self.base_model

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self._body.config = self.config.decoder_config()
        return embedding


def draw_missing(decoder: Decoder) -> None:
    """Draw what was not loaded, as in a new decoder, and mark all of it as done."""
    missing = {
        name: tensor
        for name, tensor in chain(decoder.named_parameters(), decoder.named_buffers())
        if not getattr(tensor, "_is_hf_initialized", False)
    }
    if missing:
        with torch.device("cpu"):
            new = Decoder(decoder.config)
        for name, tensor in chain(new.named_parameters(), new.named_buffers()):
            if name in missing:
                missing[name].copy_(tensor)
    mark_as_drawn(decoder)


def mark_as_drawn(decoder: nn.Module) -> None:
    for module in decoder.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def without_gates(quantization: Any) -> Any:
    """How to quantise, with the gates among what is left alone: a gate has few weights, and an error in it grows with
    distance."""
    if isinstance(quantization, dict):
        quantization = AutoQuantizationConfig.from_dict(quantization)
    quantization = copy.deepcopy(quantization)
    for name in ("llm_int8_skip_modules", "modules_to_not_convert"):
        if hasattr(quantization, name):
            given = getattr(quantization, name)
            setattr(quantization, name, [*(["lm_head"] if given is None else given), r".*\.gate"])
    return quantization


class TraBlock(GradientCheckpointingLayer, Block):
    """A block as transformers wants one for `gradient_checkpointing_enable`."""


class TraDecoder(Decoder):
    block_class = TraBlock


class TraModel(TraPreTrainedModel):
    """The decoder without its output head.

    Args:
        config: what determines it.
        decoder: a decoder of that config, whose body this becomes; a new one by default.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: TraConfig, decoder: "TraDecoder | None" = None, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        self.decoder = TraDecoder(config.decoder_config()) if decoder is None else decoder
        self.gradient_checkpointing = False
        del self.decoder.head
        if not self.decoder.embedding.weight.is_meta:
            mark_as_drawn(self.decoder)
        self.post_init()

    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        segment_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """What the output head reads ``[B, L, width]``, from the arguments of :class:`TraForCausalLM`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids or inputs_embeds must be given, and not both")
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.decoder.looked_up(input_ids, "input_ids")
        layers = self.config.num_hidden_layers  # fewer than there are while generation looks ahead with early exit
        if past_key_values is not None and self.gradient_checkpointing and self.training:
            log.warning_once("past_key_values is left out: blocks that are computed again would write to it twice")
            past_key_values = None
        elif use_cache and past_key_values is None and current() is None:  # all keys would be sent around
            past_key_values = TraCache(self.decoder, layers)
        refuse_arguments(kwargs, TraModel.forward)
        caches = None if past_key_values is None else prepare_cache(past_key_values, self.decoder, layers)
        first = caches[0] if caches else None
        key_mask = key_mask_of(attention_mask, first, *inputs_embeds.shape[:2])
        if segment_ids is None:
            segment_ids = documents(first, inputs_embeds, key_mask, position_ids, kwargs)
            if segment_ids is not None and current() is not None:
                raise ValueError("segment_ids must be given for packed documents in rows that processes share")
        cache = None if caches is None else [layer.stored for layer in caches]
        streams: list[Any] | None = [] if _wanted(self, "output_hidden_states", output_hidden_states) else None
        weights: list[Any] | None = [] if _wanted(self, "output_attentions", output_attentions) else None
        hidden: Any = self.decoder.hidden_from(
            inputs_embeds,
            cache=cache,
            key_mask=key_mask,
            segment_ids=segment_ids,
            streams=streams,
            weights=weights,
            layers=layers,
        )
        if caches and segment_ids is not None:
            caches[0].segments = segment_ids
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=None if streams is None else (*streams, hidden),
            attentions=None if weights is None else tuple(weights),
        )


def _wanted(model: TraModel, name: str, given: bool | None) -> bool:
    return bool(getattr(model.config, name) if given is None else given)


class TraForCausalLM(TraPreTrainedModel, transformers.GenerationMixin):
    """The decoder as a language model.

    Example:
        >>> model = TraForCausalLM(TraConfig(vocab_size=10, hidden_size=32, attention="tra")).eval()
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    accepts_loss_kwargs = True
    _tied_weights_keys = {"lm_head.weight": "model.decoder.embedding.weight"}  # noqa: RUF012

    def __init__(self, config: TraConfig, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        decoder = TraDecoder(config.decoder_config())
        head = decoder.head
        self.model = TraModel(config, decoder)
        self.lm_head = head
        if not head.weight.is_meta:
            mark_as_drawn(head)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: transformers.Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, L, vocab_size]`` of the token after each of ``input_ids [B, L]``, and with labels the loss.

        Args:
            input_ids: with a cache, the new tokens only.
            attention_mask: ``[B, cached + L]``, 0 for padding.
            position_ids: ``[B, L]``. Mechanisms find positions by themselves: these say only which documents are
                packed in a row, of which a new one begins where a position does not go on from that of the token
                before it. The cache remembers them: later tokens go on with the last document.
            past_key_values: the cache that an earlier pass returned, or an empty `DynamicCache`.
            inputs_embeds: ``[B, L, width]``, in place of input_ids.
            labels: ``[B, L]``, the tokens themselves, not shifted; -100 counts for nothing.
            use_cache: return a cache, as the config says by default.
            logits_to_keep: of the last so many positions only, or of these positions; 0 means all.
            segment_ids: ``[B, cached + L]``, integers that keep packed documents apart.
            output_attentions: return the exact attention matrix ``[B, heads, L, cached + L]`` of each layer.
            output_hidden_states: return what each block reads, then what the head reads.
            num_items_in_batch: what the summed loss is divided by, in place of the number of labels.
            cu_seq_lens_q: where packed documents begin in a single row, as `DataCollatorWithFlattening` says it for
                FlashAttention; or ``seq_idx [B, L]``, which names them.
            kwargs: these, what the loss of transformers takes, and what tools pass to any model; others are refused.
        """
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(out.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any) -> Any:
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(f"cache_implementation must be None, 'dynamic' or 'static', got {asked!r}")
        if current() is not None:
            raise ValueError(
                "generate must be called outside of context_parallel: tra.hub.generation.generate shares prompts"
            )
        return super()._prepare_cache_for_generation(generation_config, *args)  # type: ignore[misc]

    @staticmethod
    def create_masks_for_generate(
        *, attention_mask: Tensor | None, past_key_values: transformers.Cache, **_: Any
    ) -> Tensor | None:
        """What `generate` hands to a step with a static cache: padding, for all places of the cache at every step."""
        return padded_mask(attention_mask, past_key_values.get_max_length())


class TraForSequenceClassification(GenericForSequenceClassification, TraPreTrainedModel):
    """A label for each sequence, read at its last token that is not padding."""


class TraForTokenClassification(GenericForTokenClassification, TraPreTrainedModel):
    """A label for each token."""


class TraForQuestionAnswering(GenericForQuestionAnswering, TraPreTrainedModel):
    """The first and last token of an answer."""

    get_input_embeddings = TraPreTrainedModel.get_input_embeddings
    set_input_embeddings = TraPreTrainedModel.set_input_embeddings


def from_decoder(decoder: Decoder, **more: Any) -> TraForCausalLM:
    """A model with a copy of this decoder's weights; ``more`` are keywords of a TraConfig, as the special tokens."""
    model = TraForCausalLM(TraConfig.from_decoder(decoder.config, **more)).to(decoder.head.weight)  # type: ignore[arg-type]
    weights = decoder.state_dict()
    head = weights.pop("head.weight")
    model.model.decoder.load_state_dict(weights)
    model.lm_head.load_state_dict({"weight": head})
    return model.eval()


def to_decoder(model: TraForCausalLM) -> Decoder:
    """A decoder with a copy of this model's weights."""
    if not isinstance(model, TraForCausalLM):
        raise ValueError(f"model must be a TraForCausalLM, got {type(model).__name__}")
    decoder = Decoder(model.config.decoder_config()).to(model.lm_head.weight)
    decoder.load_state_dict({**model.model.decoder.state_dict(), "head.weight": model.lm_head.weight})
    return decoder.eval()

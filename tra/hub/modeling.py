"""The decoder as a Hugging Face model."""

from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tra.hub.cache import TraCache
from tra.hub.config import UNDERSTOOD, TraConfig, refuse_unknown
from tra.model import Decoder, initialise


class TraPreTrainedModel(transformers.PreTrainedModel):
    """A decoder inside a transformers model."""

    config: TraConfig
    config_class = TraConfig
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012

    def __init__(self, config: TraConfig, **keywords: Any) -> None:
        refuse_unknown(keywords)
        for keyword in keywords:
            if keyword not in UNDERSTOOD:
                raise ValueError(f"{keyword} must be given to the TraConfig, which is already there")
        super().__init__(config)
        self.decoder = Decoder(config.decoder_config())
        for tensor in chain(self.parameters(), self.buffers()):
            if not tensor.is_meta:
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As for every model, but from safetensors only and never with code that lies beside the weights."""
        if kwargs.get("use_safetensors") is False:
            raise ValueError("use_safetensors must be True: other files of weights may hold code, got False")
        return super().from_pretrained(*args, **{**kwargs, "use_safetensors": True, "trust_remote_code": False})

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """What was neither built here nor in the file begins as in a new decoder, by the mechanism's own rule."""
        missing = {
            name: tensor
            for name, tensor in chain(self.decoder.named_parameters(), self.decoder.named_buffers())
            if not getattr(tensor, "_is_hf_initialized", False)
        }
        if missing:
            with torch.device("cpu"):
                new = Decoder(self.config.decoder_config())
            for name, tensor in chain(new.named_parameters(), new.named_buffers()):
                if name in missing:
                    missing[name].copy_(tensor)

    def _init_weights(self, module: nn.Module) -> None:
        """Called for an embedding and a head that grow."""
        if isinstance(module, nn.Embedding | nn.Linear):
            initialise(module)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, "eager"):
            raise ValueError(f"attn_implementation must be None: attention decides, got {attn_implementation!r}")
        return "eager"

    @property
    def gradient_checkpointing(self) -> bool:
        """Where transformers looks for the decoder's checkpoint_blocks, which `gradient_checkpointing_enable` sets."""
        return self.decoder.checkpoint_blocks

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        self.decoder.checkpoint_blocks = enable

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.embedding

    def set_input_embeddings(self, value: Any) -> None:
        self.decoder.embedding = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.decoder.config = self.config.decoder_config()
        return embedding

    def hidden(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TraCache | None = None,
        inputs_embeds: Tensor | None = None,
        segment_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """What the output head reads ``[B, L, width]``, from the arguments of :class:`TraForCausalLM`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids or inputs_embeds must be given, and not both")
        if past_key_values is not None and not isinstance(past_key_values, TraCache):
            raise ValueError(f"past_key_values must be a TraCache, got {type(past_key_values).__name__}")
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if use_cache and past_key_values is None:
            past_key_values = TraCache(self.decoder)
        cached = 0 if past_key_values is None else past_key_values.get_seq_length()
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_attentions and cached:
            raise ValueError("output_attentions needs all tokens in one pass: it must be used with use_cache=False")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.decoder.looked_up(input_ids, "input_ids")
        key_mask = key_mask_of(attention_mask, inputs_embeds.shape[0], cached + inputs_embeds.shape[1])
        streams: list[Any] | None = [] if output_attentions or output_hidden_states else None
        hidden: Any = self.decoder.hidden_from(
            inputs_embeds,
            cache=None if past_key_values is None else past_key_values.layers,
            key_mask=key_mask,
            segment_ids=segment_ids,
            streams=streams,
        )
        out = BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)
        if streams is not None and output_hidden_states:
            out.hidden_states = (*streams, hidden)
        if streams is not None and output_attentions:
            weights: Any = self.decoder.attention_weights_from(streams, key_mask=key_mask, segment_ids=segment_ids)
            out.attentions = tuple(weights)
        return out


def key_mask_of(attention_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """True for tokens and False for padding; None, which is faster, if there is no padding."""
    if attention_mask is None:
        return None
    if attention_mask.shape != (batch, keys):
        raise ValueError(
            f"attention_mask must have the shape [batch, cached + new tokens] = {[batch, keys]}, 0 for padding, "
            f"got {list(attention_mask.shape)}"
        )
    key_mask = attention_mask.bool()
    # While compiling, the data cannot decide.
    return key_mask if torch.compiler.is_compiling() or not key_mask.all() else None


class TraModel(TraPreTrainedModel):
    """The decoder without its output head."""

    _keys_to_ignore_on_load_unexpected = [r"^decoder\.head\."]  # noqa: RUF012

    def __init__(self, config: TraConfig, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        del self.decoder.head
        self.post_init()

    forward = can_return_tuple(TraPreTrainedModel.hidden)


class TraForCausalLM(TraPreTrainedModel, transformers.GenerationMixin):
    """The decoder as a language model.

    Example:
        >>> model = TraForCausalLM(TraConfig(vocab_size=10, hidden_size=32, attention="tra")).eval()
        >>> model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4).shape
        torch.Size([1, 7])
    """

    accepts_loss_kwargs = True

    def __init__(self, config: TraConfig, **keywords: Any) -> None:
        super().__init__(config, **keywords)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        return self.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder.head = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> Any:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        if generation_config.use_cache and model_kwargs.get("past_key_values") is None:
            model_kwargs["past_key_values"] = TraCache(self.decoder)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: TraCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        segment_ids: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, L, vocab_size]`` of the token after each of ``input_ids [B, L]``, and with labels the loss.

        Args:
            input_ids: with a cache, the new tokens only.
            attention_mask: ``[B, cached + L]``, 0 for padding.
            past_key_values: the cache that an earlier pass returned.
            inputs_embeds: ``[B, L, width]``, in place of input_ids.
            labels: ``[B, L]``, the tokens themselves, not shifted; -100 counts for nothing.
            segment_ids: ``[B, cached + L]``, integers that keep packed documents apart.
            use_cache: return a cache; by default when no gradient is recorded.
            output_attentions: return the exact attention matrix ``[B, heads, L, L]`` of each layer.
            output_hidden_states: return what each block reads, then what the head reads.
            logits_to_keep: of the last so many positions only, or of these positions; 0 means all.
            num_items_in_batch: what the summed loss is divided by, in place of the number of labels.
        """
        out = self.hidden(
            input_ids,
            attention_mask,
            past_key_values,
            inputs_embeds,
            segment_ids,
            use_cache,
            output_attentions,
            output_hidden_states,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.head(out.last_hidden_state[:, kept])  # type: ignore[index]
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, vocab_size=self.config.vocab_size, num_items_in_batch=num_items_in_batch
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=out.past_key_values,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


def from_decoder(decoder: Decoder, **more: Any) -> TraForCausalLM:
    """A model with a copy of this decoder's weights; ``more`` are keywords of a TraConfig, as the special tokens."""
    model = TraForCausalLM(TraConfig.from_decoder(decoder.config, **more))
    model.decoder.to(decoder.head.weight).load_state_dict(decoder.state_dict())
    return model.eval()

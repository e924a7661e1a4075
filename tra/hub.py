"""The decoder as a Hugging Face model: `import tra.hub` registers it with the Auto classes of transformers.

The weights of a :class:`~tra.model.Decoder` keep their names behind the prefix ``decoder.``; a saved folder holds JSON
and safetensors only, and loading one runs no code from it.
"""

from collections.abc import Mapping
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from tra.attention.selective import SelectiveAttention
from tra.lookup import lookup
from tra.model import SIZES, Decoder, DecoderConfig, initialise

NAMES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "kv_heads": "num_key_value_heads",
    "attention": "attention",
    "qk_norm": "qk_norm",
    "dropout": "dropout",
    "residual": "residual",
}
"""What each field of a DecoderConfig is called in a TraConfig."""

UNDERSTOOD = (
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
)
"""Keywords that transformers writes or passes and that are no fields."""


class TraConfig(transformers.PreTrainedConfig):
    """Everything that determines a model: a DecoderConfig in the words of transformers, and the special tokens.

    An unknown keyword is an error. There is no greatest length.

    Example:
        >>> TraConfig(vocab_size=100, attention="rope").decoder_config().width
        256
    """

    model_type = "tra"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    vocab_size: int = SIZES["medium"].vocabulary
    num_hidden_layers: int = DecoderConfig.layers
    num_attention_heads: int = DecoderConfig.heads
    hidden_size: int = DecoderConfig.width
    num_key_value_heads: int | None = DecoderConfig.kv_heads
    attention: str = DecoderConfig.attention
    qk_norm: bool = DecoderConfig.qk_norm
    dropout: float = DecoderConfig.dropout
    residual: str = DecoderConfig.residual
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_unknown(kwargs)
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be False: the output head has weights of its own, got True")
        self.decoder_config()  # raises what is wrong
        super().__post_init__(**kwargs)

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **more: Any) -> "TraConfig":
        """The config of this decoder; ``more`` are keywords of a TraConfig."""
        return cls(**{theirs: getattr(config, ours) for ours, theirs in NAMES.items()}, **more)

    def decoder_config(self) -> DecoderConfig:
        return DecoderConfig(**{ours: getattr(self, theirs) for ours, theirs in NAMES.items()})

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As for every config, but a keyword that changes nothing is an error."""
        config, unused = super().from_dict(config_dict, return_unused_kwargs=True, **kwargs)
        if return_unused_kwargs:
            return config, unused
        refuse_unknown(unused)
        return config


def refuse_unknown(keywords: Mapping[str, Any]) -> None:
    """Raise a ValueError for a keyword that means nothing to a TraConfig, with the nearest that does."""
    known = {*(field.name for field in fields(TraConfig)), *UNDERSTOOD}
    own = {name: None for name in TraConfig.__annotations__ if name != "model_type"}
    for keyword in keywords:
        if keyword not in known:
            lookup(own, keyword, "keyword")


class TraCache(transformers.Cache):
    """What `generate` keeps from token to token: for each layer, whatever its mechanism stores."""

    is_compileable = False
    layers: list[Any]

    def __init__(self, decoder: Decoder) -> None:
        super().__init__(layers=decoder.new_cache())  # type: ignore[arg-type]
        self.revised = any(isinstance(module, SelectiveAttention) for module in decoder.modules())
        """Whether later tokens change what is stored of earlier ones."""

    @property
    def is_croppable(self) -> bool:
        return not self.revised

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return len(self.layers[layer_idx])

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.get_seq_length() > 0:
            self.batch_select_indices(torch.arange(self.layers[0].batch).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(f"tokens_to_remove must not be positive, got {tokens_to_remove}")
        if tokens_to_remove < 0 and self.revised:
            raise ValueError("the cache of selective attention cannot be cropped: its last tokens masked earlier ones")
        for layer in self.layers:
            layer.crop(len(layer) + tokens_to_remove)

    def reset(self) -> None:
        for layer in self.layers:
            layer.crop(0)


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
            inputs_embeds = self.decoder.embedding(input_ids)
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


transformers.AutoConfig.register(TraConfig.model_type, TraConfig, exist_ok=True)
transformers.AutoModel.register(TraConfig, TraModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(TraConfig, TraForCausalLM, exist_ok=True)

"""A decoder's config in the words of transformers."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import transformers

from tra import plugins
from tra.lookup import lookup
from tra.model import SIZES, DecoderConfig

NAMES = {
    "vocabulary": "vocab_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "kv_heads": "num_key_value_heads",
    "attention": "attention",
    "attention_options": "attention_options",
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
    attention_options: dict[str, Any] | None = None
    dropout: float = DecoderConfig.dropout
    residual: str = DecoderConfig.residual
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        plugins.require(kwargs.pop("plugins", []))
        refuse_unknown(kwargs)
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings must be False: the output head has weights of its own, got True")
        self.attention_options = self.decoder_config().attention_options  # raises what is wrong
        super().__post_init__(**kwargs)

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **more: Any) -> "TraConfig":
        """The config of this decoder; ``more`` are keywords of a TraConfig."""
        return cls(**{theirs: getattr(config, ours) for ours, theirs in NAMES.items()}, **more)

    def decoder_config(self) -> DecoderConfig:
        values = {ours: getattr(self, theirs) for ours, theirs in NAMES.items()}
        return DecoderConfig(**{**values, "attention_options": self.attention_options or {}})

    def to_dict(self) -> dict[str, Any]:
        """As for every config, with the plug-in that the mechanism comes from, if it is not built in."""
        needed = plugins.source("MECHANISMS", self.attention)
        return {**super().to_dict(), **({} if needed is None else {"plugins": [needed]})}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As for every config, but a keyword that changes nothing is an error, and so is a plug-in that is missing.

        Configs that version 0.1 wrote are read too.
        """
        config_dict = dict(config_dict)
        if "qk_norm" in config_dict and "attention_options" not in config_dict:
            ours = {name: config_dict[theirs] for name, theirs in NAMES.items() if theirs in config_dict}
            earlier = DecoderConfig.from_dict({**ours, "qk_norm": config_dict.pop("qk_norm")})
            config_dict["attention_options"] = earlier.attention_options
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

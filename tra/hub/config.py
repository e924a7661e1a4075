"""A decoder's config in the words of transformers."""

import os
from collections.abc import Iterable
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import transformers

from tra import plugins
from tra.attention.naming import plugins_of
from tra.errors import how_to_install
from tra.hub.adapters import tell_peft
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
    "tied_embeddings": "tie_word_embeddings",
    "head_width": "head_dim",
    "hidden": "intermediate_size",
    "norm_epsilon": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
}
"""What each field of a DecoderConfig is called in a TraConfig."""

UNDERSTOOD = (
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
)
"""Keywords that transformers writes or passes and that are no fields."""

MODULE = "tra_model"
"""The module beside a model's weights that leads to this package."""


def leads_to(module: str, names: Iterable[str]) -> str:
    """The text of that module."""
    return f"""\
# The model is in the package threshold-relative-attention; this file only leads there.
try:
    from {module} import {", ".join(names)}
except ImportError as error:
    raise ImportError("this model needs a package: {how_to_install("hub")}") from error
"""


AUTO_MAP = {
    "AutoConfig": f"{MODULE}.TraConfig",
    "AutoModel": f"{MODULE}.TraModel",
    "AutoModelForCausalLM": f"{MODULE}.TraForCausalLM",
    "AutoModelForQuestionAnswering": f"{MODULE}.TraForQuestionAnswering",
    "AutoModelForSequenceClassification": f"{MODULE}.TraForSequenceClassification",
    "AutoModelForTokenClassification": f"{MODULE}.TraForTokenClassification",
}
"""What a config tells tools that know nothing of this package but its files."""


class NeverCopied:
    """To save a model never copies the code of this package beside it: a file leads here."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Nothing."""


class TraConfig(NeverCopied, transformers.PreTrainedConfig):
    """Everything that determines a model: a DecoderConfig in the words of transformers, and the special tokens.

    Where Llama has a name for something, so does this. ``attention_bias`` is Llama's, biases in all four projections or
    in none; by default there is one in that of the output. An unknown keyword is an error; an unknown key of a file is
    kept. There is no greatest length.

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
    head_dim: int | None = None
    intermediate_size: int | None = None
    rms_norm_eps: float | None = None
    attention_bias: bool | None = None
    mlp_bias: bool = True
    attention: str = DecoderConfig.attention
    attention_options: dict[str, Any] | None = None
    dropout: float = DecoderConfig.dropout
    residual: str = DecoderConfig.residual
    use_cache: bool = True
    tie_word_embeddings: bool = DecoderConfig.tied_embeddings
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        plugins.require(kwargs.pop("plugins", []))
        refuse_unknown(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.attention_options = self.decoder_config().attention_options  # raises what is wrong
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 2 * self.hidden_size
        kwargs.pop("auto_map", None)  # which tools rewrite, and which is always the same
        self.auto_map = dict(AUTO_MAP)
        super().__post_init__(**kwargs)

    @classmethod
    def from_decoder(cls, config: DecoderConfig, **more: Any) -> "TraConfig":
        """The config of this decoder; ``more`` are keywords of a TraConfig."""
        return cls(**{theirs: getattr(config, ours) for ours, theirs in NAMES.items()}, **more)

    def decoder_config(self) -> DecoderConfig:
        values = {ours: getattr(self, theirs) for ours, theirs in NAMES.items()}
        if self.num_key_value_heads == self.num_attention_heads:
            values["kv_heads"] = None
        if self.num_attention_heads * (self.head_dim or 0) == self.hidden_size:
            values["head_width"] = None
        if self.intermediate_size == 2 * self.hidden_size:
            values["hidden"] = None
        return DecoderConfig(**{**values, "attention_options": self.attention_options or {}})

    def to_dict(self) -> dict[str, Any]:
        """As for every config, with the plug-ins that its mechanisms come from, if they are not built in."""
        tell_peft(self.model_type)  # which asks for this before it looks for layers to tune
        needed = plugins_of(self.attention)
        found = {**super().to_dict(), **({"plugins": needed} if needed else {})}
        if not self.auto_map:
            del found["auto_map"]
        return found

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """As for every config, but a plug-in that is missing is an error, and so is a misspelt keyword.

        Configs that version 0.1 wrote are read too.
        """
        config_dict = dict(config_dict)
        if "qk_norm" in config_dict and "attention_options" not in config_dict:
            ours = {name: config_dict[theirs] for name, theirs in NAMES.items() if theirs in config_dict}
            earlier = DecoderConfig.from_dict({**ours, "qk_norm": config_dict.pop("qk_norm")})
            config_dict["attention_options"] = earlier.attention_options
        others = {key: config_dict.pop(key) for key in unknown(config_dict) if key != "plugins"}
        config, unused = super().from_dict(config_dict, return_unused_kwargs=True, **kwargs)
        for key, value in others.items():
            if not hasattr(cls, key):  # as the name of a method is one
                setattr(config, key, value)
        if return_unused_kwargs:
            return config, unused
        refuse_unknown(key for key in unused if get_close_matches(key, OWN))
        return config

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As for every config, with the file that the ``auto_map`` names. An empty one leaves both out."""
        if self.auto_map:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            Path(save_directory, f"{MODULE}.py").write_text(leads_to("tra.hub", "*"))
        super().save_pretrained(save_directory, *args, **kwargs)


OWN = [name for name in TraConfig.__annotations__ if name != "model_type"]


def unknown(keywords: Iterable[str]) -> list[str]:
    """Those that mean nothing to a TraConfig."""
    known = {*(field.name for field in fields(TraConfig)), *UNDERSTOOD}
    return [keyword for keyword in keywords if keyword not in known]


def refuse_unknown(keywords: Iterable[str]) -> None:
    """Raise a ValueError for a keyword that means nothing to a TraConfig, with the nearest that does."""
    for keyword in unknown(keywords):
        lookup(dict.fromkeys(OWN), keyword, "keyword")

"""What determines a decoder, and the paper's sizes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.random import fork_rng

from tra.attention import Attention
from tra.attention.naming import find_mechanisms
from tra.attention.options import options_of
from tra.lookup import lookup
from tra.signatures import among, check_count, check_types, checked_options, format_value

LARGEST = {"vocabulary": 1 << 32, "layers": 10_000}
LARGEST |= dict.fromkeys(("heads", "width", "head_width", "hidden"), 1 << 20)
"""What a config may ask for: far beyond any model, and little enough that a damaged or hostile one fails at once."""


@dataclass(frozen=True)
class DecoderConfig:
    """Everything that determines a decoder. What is wrong with it is said when it is made.

    Example:
        >>> DecoderConfig(vocabulary=6, attention="rope", attention_options={"theta": 10_000}).label
        'rope theta=10000'
    """

    vocabulary: int
    """Number of tokens."""
    layers: int = 4
    heads: int = 4
    width: int = 256
    kv_heads: int | None = None
    """Key and value heads shared by groups of query heads; as many as heads by default."""
    attention: str = "tra"
    """Name of the mechanism. Several joined by "+" take turns: "rope+tra" has TRA in every second layer."""
    attention_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Options of the mechanism that are not left to their defaults, by name; `qk_norm` is one of every mechanism. Of
    several mechanisms, all that have an option get it."""
    dropout: float = 0.01
    """On the embedding, the attention weights and the hidden units of the MLP."""
    residual: Literal["normalised", "pre_norm"] = "normalised"
    """Add each layer to the normalised stream (the authors' code) or to the stream itself (ordinary pre-norm)."""
    tied_embeddings: bool = False
    """The output head has the embedding's weights, not its own; they begin as a head's do."""
    head_width: int | None = None
    """Width of each head, ``width // heads`` by default."""
    hidden: int | None = None
    """Hidden units of the MLP, twice the width by default."""
    norm_epsilon: float | None = None
    """What norms add to the mean square, the rounding of the dtype by default."""
    attention_bias: bool | None = None
    """Biases in all projections of the attention or in none; in that of its output only by default."""
    mlp_bias: bool = True
    """Biases in the projections of the MLP."""

    def __post_init__(self) -> None:
        mechanisms = find_mechanisms(self.attention)
        check_types(self, but=("attention_options",))
        for name, largest in LARGEST.items():
            check_count(name, getattr(self, name), largest)
        if self.norm_epsilon is not None and not 0.0 <= self.norm_epsilon <= 1.0:
            raise ValueError(f"norm_epsilon must be None or in [0, 1], got {self.norm_epsilon!r}")
        if len(mechanisms) > self.layers:
            raise ValueError(
                f"attention must name at most {self.layers} mechanisms, one for each layer, got {self.attention!r}"
            )
        known = {name: option for mechanism in mechanisms for name, option in options_of(mechanism).items()}
        options = checked_options(known, self.attention_options, "attention_options", self.attention)
        for mechanism in mechanisms:  # an option must suit each of those that have it
            own = options_of(mechanism)
            given = {name: value for name, value in options.items() if name in own}
            checked_options(own, given, "attention_options", self.attention)
        object.__setattr__(self, "attention_options", options)
        with fork_rng(devices=[]), torch.device("meta"), _WithoutRandomNumbers():
            for layer in range(len(mechanisms)):
                self.new_attention(layer)  # raises what the mechanism finds wrong

    @property
    def label(self) -> str:
        """Mechanism and options, as a table names them."""
        return " ".join([self.attention, *(f"{name}={format_value(x)}" for name, x in self.attention_options.items())])

    def new_attention(self, layer: int) -> Attention:
        """The mechanism with its options, for the block of that index."""
        mechanisms = find_mechanisms(self.attention)
        mechanism = mechanisms[layer % len(mechanisms)]
        own = {name: value for name, value in self.attention_options.items() if name in options_of(mechanism)}
        for name, given in (("head_width", self.head_width), ("bias", self.attention_bias)):
            if given is not None:  # which plug-ins need not know
                own[name] = given
        return mechanism(self.width, self.heads, self.kv_heads, layer=layer, dropout=self.dropout, **own)

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "DecoderConfig":
        """What `dataclasses.asdict` wrote, now or in version 0.1.

        That had no ``attention_options``, but ``qk_norm`` beside the other fields, and lambda of differential attention
        started at 0.8 in every layer.
        """
        values = dict(stored)
        if "attention_options" not in values:
            qk_norm = values.pop("qk_norm", True)
            options = {} if qk_norm is True else {"qk_norm": qk_norm}
            if values.get("attention") == "differential":
                options["lambda_start"] = 0.8
            values["attention_options"] = options
        names = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in names:
                raise ValueError(among("what is stored of a DecoderConfig", names, name))
        if "vocabulary" not in values:
            raise ValueError("vocabulary must be in what is stored of a DecoderConfig")
        return cls(**values)


class _WithoutRandomNumbers(TorchFunctionMode):
    """Skips drawing normal numbers: on the meta device, where there are none, that loads the compiler for a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.mul_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        if func is torch.randn:
            return torch.empty(*args, **{name: x for name, x in kwargs.items() if name != "generator"})
        return func(*args, **kwargs)


SIZES = {
    "mini": DecoderConfig(vocabulary=6, layers=4, heads=4, width=256),
    "medium": DecoderConfig(vocabulary=50257, layers=8, heads=8, width=512),
}
"""The paper's sizes, by name."""


def sized(size: str, **changes: Any) -> DecoderConfig:
    """A named size with changes, e.g. ``sized("mini", attention="rope")``."""
    return replace(lookup(SIZES, size, "size"), **changes)

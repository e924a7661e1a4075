"""TRA in a pretrained model of transformers: weights kept, attention replaced through its public interfaces.

The class of an adopted model is a subclass of the original with its own model type, so that it is not loaded as the
original by mistake; its attention is in :mod:`tra.hub.adopted_attention`.
"""

import copy as copying
import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError
from torch import nn
from transformers.utils import logging

from tra.attention.threshold_relative import LearnedThreshold
from tra.errors import RunError
from tra.files import written_aside
from tra.hub.adapters import tell_peft
from tra.hub.adopted_attention import NAME, Options, TraGates, before_attention, before_body
from tra.hub.config import MODULE, NeverCopied, leads_to
from tra.hub.modeling import mark_as_drawn
from tra.runs.folder import PRETRAINED, RECIPE

if TYPE_CHECKING:
    from tra.hub.healing import Healing

FAMILIES = (
    "cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "llama", "mistral", "olmo", "olmo2", "phi", "phi3",
    "qwen2", "qwen3", "smollm3",
)  # fmt: skip
"""Model types that can be adopted; each of them is tested."""

REASONS = {
    "falcon": "its attention does not go through transformers' AttentionInterface",
    "gpt_oss": "its attention has sinks, which TRA has no place for",
    "llama4_text": "its attention is in chunks",
    "opt": "its learned positions end at a length",
    "tra": "it is a model of this package, whose config names its attention",
}
"""Why other models cannot be adopted, where that is known."""

AUTO_CLASSES = {
    "AutoModel": transformers.MODEL_MAPPING,
    "AutoModelForCausalLM": transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    "AutoModelForQuestionAnswering": transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
    "AutoModelForSequenceClassification": transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "AutoModelForTokenClassification": transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
}
"""Which models of a family can be adopted: those that these classes build, by the mapping that says which."""


def adopt(
    model: transformers.PreTrainedModel | str | Path,
    *,
    layers: Sequence[int] | None = None,
    drop_positions: bool | Sequence[int] = False,
    gate_bias: float = Options.gate_bias,
    threshold: float | LearnedThreshold | None = "query",
    threshold_start: float = Options.threshold_start,
    straight_through: float = Options.straight_through,
    tolerance: float | None = None,
    impl: str = "auto",
    copy: bool = False,
) -> Any:
    """Put TRA into a pretrained model: its attention becomes TRA, its weights stay.

    A gate and a threshold are added to each head. With the defaults nearly every key is kept at first, each step of
    distance costs a little, and RoPE stays: the model reads longer texts at once, and a short training heals what it
    lost. With ``gate_bias=100, threshold=None`` the logits are those of the original.

    Args:
        model: a model of transformers, which is changed in place, or the folder or name of one, which is loaded.
        layers: which layers become TRA, from 0; all by default. The others keep their attention.
        drop_positions: layers that lose their rotary embedding, True for all. GPT-2, whose positions are learned and
            added once, takes True or False.
        gate_bias: what gates start from, before the sigmoid. 3 is a decay of 0.95 for each kept key, 100 is none.
        threshold: a key is kept when its score is greater: a number, or learned for each "head" or set by each "query";
            None keeps every key.
        threshold_start: where a learned threshold starts. A value below most scores keeps nearly every key.
        straight_through: temperature of the gradient through the threshold, which a learned one needs.
        tolerance, impl: as for :func:`tra.threshold_relative_attention`.
        copy: leave the model as it is and return an adopted copy.

    Returns:
        The model, whose class is a subclass of what it was: ``TraLlamaForCausalLM`` for ``LlamaForCausalLM``.

    Example:
        >>> model = transformers.LlamaForCausalLM(
        ...     transformers.LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...                              num_attention_heads=4))
        >>> type(adopt(model)).__name__
        'TraLlamaForCausalLM'
    """
    options = Options(
        _listed(layers),
        _listed(drop_positions),
        gate_bias,
        threshold,
        threshold_start if isinstance(threshold, str) else Options.threshold_start,
        straight_through,
        tolerance,
        impl,
    )
    if isinstance(model, str | Path):
        model = _loaded(model)
    elif copy:
        model = copying.deepcopy(model)
    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(f"model must be a model of transformers or a folder, got {type(model).__name__}")
    refuse_others(model)
    if not any(checked_layers(options, model)):
        raise ValueError("layers must name at least one layer unless drop_positions does, got []")
    model.config.__class__ = adopted_class(type(model.config))
    model.config.tra = asdict(options)
    model.set_attn_implementation(NAME)
    attach(model)
    return model


def _listed(layers: Any) -> Any:
    """A list, which JSON can hold, of any sequence of layers; whatever is none is left as it is."""
    return list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else layers


def adopt_folder(model: str | Path, folder: str | Path, healing: "Healing | None" = None, **options: Any) -> None:
    """Adopt the model of one folder, or of the hub, and write it to another with its tokenizer.

    Args:
        model: folder or name of the original, which is left as it is; with ``healing`` it may be adopted already.
        folder: what to write, which must not exist yet; it appears whole or not at all.
        healing: text to train the adopted model on.
        options: as for :func:`adopt`.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"folder must not exist yet, got {folder}")
    logging.disable_progress_bar()
    try:
        loaded = _loaded(model)
        tokenizer = _tokenizer_of(str(model))
    except OSError as error:  # which transformers raises for whatever cannot be found
        raise ValueError(f"model must be a folder or a name on the hub, got {model}: {error}") from error
    if healing is None or not isinstance(loaded, Adopted):
        adopt(loaded, **options)
    elif options:
        raise ValueError(f"{next(iter(options))} must be left out for a model that is adopted already")
    if healing is not None:
        from tra.hub.healing import heal  # needs accelerate

        heal(loaded, tokenizer, healing)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with written_aside(folder) as aside:
            loaded.save_pretrained(aside)
            if tokenizer is not None:
                tokenizer.save_pretrained(aside)
    except (OSError, SafetensorError) as error:
        raise RunError(f"could not write {folder}: {error}") from error


def _loaded(model: str | Path) -> Any:
    """The model of a folder or of the hub; a run of this package is refused, because it is no model of transformers."""
    if (Path(model) / RECIPE).is_file() or str(model).startswith(PRETRAINED):
        raise ValueError(
            f"model must be one of transformers, but {model} is a run of this package, whose attention is chosen when "
            "it is trained: tra train RECIPE --attention tra"
        )
    return transformers.AutoModelForCausalLM.from_pretrained(model)


def _tokenizer_of(model: str) -> Any:
    """That of a folder which has one, None otherwise."""
    if Path(model).is_dir() and not any(Path(model).glob("tokenizer*")):
        return None
    return transformers.AutoTokenizer.from_pretrained(model)


def unadopt(model: transformers.PreTrainedModel) -> Any:
    """Take TRA out again, in place: the class, config and attention of the original, without gates and thresholds.

    Weights stay as they are. If only gates and thresholds were trained since, this is the original model. Its
    ``attn_implementation`` is the one that transformers chooses by itself.
    """
    if not isinstance(model, Adopted):
        raise ValueError(f"model must be one that was adopted, got {type(model).__name__}")
    for module in model.modules():
        for handle in vars(module).pop("tra_handles", ()):
            handle.remove()
        if isinstance(getattr(module, NAME, None), TraGates):
            delattr(module, NAME)
    del model.config.tra
    model.config.__class__ = model.config.original
    for body in model.modules():
        if isinstance(body, Adopted):
            body.__class__ = body.original
    model.set_attn_implementation(model.get_correct_attn_implementation(None))
    return model


def refuse_others(model: transformers.PreTrainedModel) -> None:
    """Raise a ValueError for a model that cannot be adopted, with the reason."""
    if isinstance(model, Adopted):
        raise ValueError(f"model must not be adopted already, got {type(model).__name__}: unadopt it first")
    kind = model.config.model_type
    if kind not in FAMILIES:
        reason = REASONS.get(kind, "no test covers it")
        raise ValueError(f"model must be one of {', '.join(FAMILIES)}, got {kind!r}: {reason}")
    config = transformers.CONFIG_MAPPING[kind]
    if type(model.config) is not config:
        raise ValueError(f"model must have a {config.__name__}, got a {type(model.config).__name__}")
    known = classes_for(config).values()
    if type(model) not in known:
        names = ", ".join(sorted(one.__name__ for one in known))
        raise ValueError(f"model must be one of {names}, got {type(model).__name__}")
    causal = [module.is_causal for module in attention_modules(model)]
    if not getattr(model.config, "is_causal", True) or not all(causal):
        raise ValueError("model must be causal, got one with is_causal=False")
    if getattr(model.config, "add_cross_attention", False):
        raise ValueError("model must not have cross-attention, got add_cross_attention=True")
    absent = [parameter.is_meta for parameter in model.parameters()]
    if any(absent) and not all(absent):
        raise ValueError(
            "model must not be offloaded, got weights on the meta device: adopt it as it is on one device, and offload "
            "the saved folder"
        )


def checked_layers(options: Options, model: transformers.PreTrainedModel) -> tuple[set[int], set[int]]:
    """The layers that become TRA, and those that lose their positions."""
    count = model.config.num_hidden_layers
    if model.config.model_type.removeprefix("tra_") == "gpt2" and not isinstance(options.drop_positions, bool):
        raise ValueError(
            "drop_positions must be True or False for GPT-2, which adds positions once for all layers, "
            f"got {options.drop_positions!r}"
        )
    return options.chosen("layers", count), options.chosen("drop_positions", count)


def attention_modules(model: nn.Module) -> Iterator[Any]:
    """Those that call an attention function, as transformers writes them."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("layer_idx", "scaling", "is_causal")):
            yield module


def attach(model: Any) -> None:
    """Add gates and hooks where they are missing. A model and the base model in it share their config."""
    config = model.config
    for body in model.modules():
        if isinstance(body, transformers.PreTrainedModel) and not isinstance(body, Adopted):
            body.__class__ = adopted_class(type(body))
            # What a class can return beside its output, such as hidden states, is noted when one of it is made.
            transformers.PreTrainedModel.__init__(type(body).__new__(type(body)), config)
    if config.tra is None:
        config.tra = asdict(Options())
    options = Options.of_config(config.tra)
    with_gates, without_positions = checked_layers(options, model)
    found = list(attention_modules(model))
    if len(found) != config.num_hidden_layers:
        raise ValueError(f"model must have {config.num_hidden_layers} attention modules, got {len(found)}")
    for module in found:
        if "tra_handles" in vars(module):
            continue
        if module.layer_idx in with_gates:
            like = next(parameter for parameter in module.parameters())
            gates = TraGates(config.hidden_size, config.num_attention_heads, options)
            setattr(module, NAME, gates.to(device=like.device, dtype=model.dtype))
            if not like.is_meta:  # and not still to be loaded: they are never drawn again
                mark_as_drawn(gates)
        scale = rotary_scale(model, module) if module.layer_idx in without_positions else None
        hook = functools.partial(before_attention, options=options, rotary_scale=scale)
        module.tra_handles = [module.register_forward_pre_hook(hook, with_kwargs=True)]
    inner: Any = model.base_model
    if "tra_handles" not in vars(inner):
        inner.tra_handles = [inner.register_forward_pre_hook(before_body, with_kwargs=True)]
        if isinstance(inner, transformers.GPT2Model) and options.drop_positions is True:
            inner.tra_handles += [
                inner.wpe.register_forward_pre_hook(_first_positions),
                inner.wpe.register_forward_hook(_no_positions),
            ]


def _first_positions(module: nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Position 0 for every token, which the table holds however long the text is."""
    return torch.zeros_like(args[0])


def _no_positions(module: nn.Module, args: tuple[torch.Tensor, ...], embedded: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(embedded)


def rotary_scale(model: nn.Module, attention: Any) -> float:
    """The factor on cosines and sines, as YaRN has one: a part of the scores that is not position, so that it stays."""
    for module in model.modules():
        for name in (f"{getattr(attention, 'layer_type', None)}_attention_scaling", "attention_scaling"):
            if hasattr(module, name):
                return float(getattr(module, name))
    return 1.0


class AdoptedConfig(NeverCopied):
    """What configs of adopted models have in common, in front of the config of the original."""

    original: type
    tra: dict[str, Any] | None

    @property
    def output_attentions(self) -> bool:
        """Whether to return all attentions, which no other attention function is needed for."""
        return self._output_attentions

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    def to_dict(self) -> dict[str, Any]:
        """As for every config, with where tools that know nothing of this package find its classes."""
        tell_peft(type(self).model_type, self.original.model_type)  # type: ignore[attr-defined]
        models = {auto: f"{MODULE}.Tra{model.__name__}" for auto, model in classes_for(self.original).items()}
        auto_map = {"AutoConfig": f"{MODULE}.{type(self).__name__}", **models}
        return {**super().to_dict(), "auto_map": auto_map}  # type: ignore[misc]

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As for every config, with the file that the ``auto_map`` names."""
        names = sorted(
            {type(self).__name__, *(f"Tra{model.__name__}" for model in classes_for(self.original).values())}
        )
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        Path(save_directory, f"{MODULE}.py").write_text(leads_to(__name__, names))
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]


class Adopted(NeverCopied):
    """What adopted models have in common, in front of the class of the original."""

    original: type
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = False

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        attach(self)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, TraGates):
            module.reset_parameters()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args: Any, **kwargs: Any) -> str:
        if attn_implementation not in (None, NAME, "eager"):  # which stands for a model's own way
            raise ValueError(
                f"attn_implementation must be '{NAME}' for an adopted model, which is another model without its gates; "
                f"unadopt it first, got {attn_implementation!r}"
            )
        return NAME


def classes_for(config: type) -> dict[str, type]:
    """The models of a config that can be adopted, by the name of the class that builds them."""
    mappings: dict[str, Any] = AUTO_CLASSES
    return {name: mapping[config] for name, mapping in mappings.items() if config in mapping}


def adopted_class(original: Any) -> Any:
    """The subclass that a class of transformers becomes: ``TraLlamaModel`` for ``LlamaModel``."""
    return globals()[f"Tra{original.__name__}"]


def _new_config_class(base: Any) -> Any:
    class Config(AdoptedConfig, base):
        model_type = f"tra_{base.model_type}"
        original = base
        tra: dict[str, Any] | None = None

    return Config


def _new_model_class(base: Any, config: Any) -> Any:
    # `generate` belongs to classes that name it themselves.
    generation = (transformers.GenerationMixin,) if issubclass(base, transformers.GenerationMixin) else ()

    class Model(Adopted, base, *generation):  # type: ignore[misc]
        config_class = config
        original = base

    return Model


def register() -> None:
    """Tell transformers of every class that a model may become."""
    for family in FAMILIES:
        original = transformers.CONFIG_MAPPING[family]
        config = _named(_new_config_class(original), original)
        transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
        for auto, model in classes_for(original).items():
            getattr(transformers, auto).register(config, _named(_new_model_class(model, config), model), exist_ok=True)


def _named(new: Any, original: Any) -> Any:
    new.__name__ = new.__qualname__ = name = f"Tra{original.__name__}"
    new.__doc__ = f"`{original.__name__}` with TRA, made by :func:`adopt`."
    globals()[name] = new
    return new


register()

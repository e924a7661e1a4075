"""TRA in models of transformers: nothing else changes, and what it computes is TRA."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.hub.families import (
    OPEN,
    SIZES,
    VOCABULARY,
    WINDOW,
    WITH_WINDOWS,
    adopted,
    build_family,
    close,
    every_family,
    some_families,
    tokens_of,
)
from tests.hub.models import build
from tra.hub import adopt, unadopt


@every_family
@torch.no_grad()
def test_with_open_gates_and_every_key_kept_the_logits_are_those_of_the_original(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    expected = model(tokens).logits
    assert expected.std() > 0.05
    copied = adopt(model, **OPEN, copy=True)
    assert type(copied).__name__ == f"Tra{type(model).__name__}"
    close(copied(tokens).logits, expected)
    assert torch.equal(model(tokens).logits, expected), "the original was left alone"


SOMETIMES: list[tuple[str, dict[str, Any]]] = [
    ("cohere", {"use_qk_norm": True}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True}),
    ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 1.0}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    ("olmo", {"clip_qkv": 0.5}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"sliding_window": WINDOW, "partial_rotary_factor": 0.5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    ("smollm3", {"no_rope_layers": [1, 0, 1]}),
]


@pytest.mark.parametrize("family, changes", SOMETIMES, ids=[family for family, _ in SOMETIMES])
@torch.no_grad()
def test_what_only_some_models_of_a_family_have_stays(family: str, changes: dict[str, Any]) -> None:
    model, tokens = build_family(family, **changes), tokens_of()
    expected = model(tokens).logits
    if changes.keys() & {"clip_qkv", "no_rope_layers", "qk_layernorm", "scale_attn_by_inverse_layer_idx"}:
        assert not torch.allclose(expected, build_family(family)(tokens).logits, atol=1e-3)
    adopt(model, **OPEN)
    close(model(tokens).logits, expected)
    cache = model(tokens[:, :9]).past_key_values
    close(model(tokens[:, 9:], past_key_values=cache).logits, expected[:, 9:])


@every_family
@torch.no_grad()
def test_without_positions_it_is_the_same_model_without_positions(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    found = adopt(model, **OPEN, drop_positions=True, copy=True)(tokens).logits
    assert not torch.allclose(found, model(tokens).logits, atol=1e-3)
    if family == "gpt2":
        model.transformer.wpe.weight.zero_()
    else:
        rotary = model.base_model.rotary_emb
        rotary.register_forward_hook(lambda module, args, out: (torch.ones_like(out[0]), torch.zeros_like(out[1])))
    close(found, model(tokens).logits)


@every_family
@torch.no_grad()
def test_tokens_one_by_one_and_in_pieces_with_a_cache(family: str) -> None:
    model, tokens = adopted(family), tokens_of()
    expected = model(tokens, use_cache=False).logits
    cache, found = None, []
    for piece in tokens.split([5, 1, 4, 1, 1, 1], dim=1):
        out = model(piece, past_key_values=cache)
        cache = out.past_key_values
        found.append(out.logits)
    close(torch.cat(found, dim=1), expected)


@every_family
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(family: str) -> None:
    model, alone = adopted(family), tokens_of(1, 9)
    padded = torch.cat([torch.randint(1, VOCABULARY, (1, 4)), alone], dim=1)
    tokens, mask = torch.cat([padded, tokens_of(1, 13)]), torch.ones(2, 13, dtype=torch.long)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    close(model(tokens, attention_mask=mask, position_ids=positions).logits[:1, 4:], model(alone).logits)
    options = {"max_new_tokens": 5, "do_sample": False}
    together = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(together[:1, 13:], model.generate(alone, **options)[:, 9:])


@every_family
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model, documents = adopted(family), [tokens_of(1, length) for length in (5, 1, 8)]
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    row = torch.cat(documents, dim=1)
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    begins = torch.tensor([0, 5, 6, 14], dtype=torch.int32)
    flattened = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 8, "max_length_k": 8}
    for packing in (
        {"position_ids": positions},
        {"position_ids": positions, "use_cache": False},
        {"position_ids": positions, **flattened},
        {"position_ids": positions, "seq_idx": torch.tensor([[0] * 5 + [1] + [2] * 8])},
    ):
        close(model(row, **packing).logits, alone)
    cache = model(row, position_ids=positions, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="must not hold packed documents"):
        model(tokens_of(1, 1), past_key_values=cache)
    cache.reset()
    model(documents[2][:, :7], past_key_values=cache)
    close(model(documents[2][:, 7:], past_key_values=cache).logits, alone[:, -1:])


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_a_document_that_begins_behind_a_cache_is_refused(family: str) -> None:
    model, tokens = adopted(family), tokens_of(2, 10)
    for positions in ([0, 1, 2, 3, 4], [5, 6, 0, 1, 2]):
        cache = model(tokens[:, :5]).past_key_values
        with pytest.raises(ValueError, match="documents must not be packed behind tokens in past_key_values"):
            model(tokens[:, 5:], past_key_values=cache, position_ids=torch.tensor([positions]))
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    for cut in (3, 6, 7):  # a row begins in the second piece where the first is padding
        cache = model(tokens[:, :cut], attention_mask=mask[:, :cut], position_ids=positions[:, :cut]).past_key_values
        later = {"attention_mask": mask, "position_ids": positions[:, cut:], "past_key_values": cache}
        found = model(tokens[:, cut:], **later).logits
        close(found[0, max(6 - cut, 0) :], expected[0, max(6, cut) :])
        close(found[1], expected[1, cut:])


def test_windows_in_a_static_cache_keep_documents_and_padding_apart() -> None:
    """`generate` makes a matrix of windows, which knows of padding and not of documents."""
    model, tokens = adopted("mistral", {"sliding_window": WINDOW}), tokens_of(2, 9)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    static = {**options, "cache_implementation": "static", "disable_compile": True}
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    expected = model.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **static), expected)
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]]).expand(2, -1)
    with pytest.raises(ValueError, match="must not hold packed documents"):
        model.generate(tokens, attention_mask=torch.ones_like(tokens), position_ids=packed, **static)


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@torch.no_grad()
def test_documents_that_padding_separates_do_not_see_each_other(family: str) -> None:
    model, first, second = adopted(family), tokens_of(1, 5), tokens_of(1, 6)
    row = torch.cat([first, tokens_of(1, 2), second], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 2 + [1] * 6])
    positions = torch.tensor([[*range(5), 0, 0, *range(6)]])
    close(model(row, attention_mask=mask, position_ids=positions).logits[:, 7:], model(second).logits)


def test_windows_and_the_operator_agree_where_a_window_holds_everything() -> None:
    """Mistral with a window is computed with matrices, without one by the operator: logits and gradients."""
    models = [adopted("mistral", {"sliding_window": size}, straight_through=0.5) for size in (None, 1000)]
    models[1].load_state_dict(models[0].state_dict())
    tokens, mask = tokens_of(), torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    losses = [
        model(tokens, attention_mask=mask, position_ids=positions, labels=tokens.where(mask > 0, -100)).loss
        for model in models
    ]
    close(losses[0], losses[1])
    gradients = [
        torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, models, strict=True)
    ]
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)
    names = dict(models[0].named_parameters())
    touched = [
        name for name, gradient in zip(names, gradients[0], strict=True) if "threshold_bias" in name and gradient.any()
    ]
    assert touched, "thresholds learn"


@torch.no_grad()
def test_windows_stay_windows() -> None:
    model, tokens = adopted("mistral", {"sliding_window": 6, "num_hidden_layers": 1}), tokens_of(1, 20)
    other = torch.cat([tokens_of(1, 8), tokens[:, 8:]], dim=1)
    assert torch.equal(model(tokens).logits[:, 13:], model(other).logits[:, 13:])
    assert not torch.allclose(model(tokens).logits[:, 12], model(other).logits[:, 12])


@every_family
@torch.no_grad()
def test_weights_that_are_asked_for_are_those_that_mixed_the_values(family: str) -> None:
    model, tokens = adopted(family), tokens_of()
    out = model(tokens, output_attentions=True, output_hidden_states=True)
    assert len(out.attentions) == 3
    assert len(out.hidden_states) == 4
    close(out.logits, model(tokens).logits)
    for weights in out.attentions:
        assert weights.shape == (2, 4, 13, 13)
        assert (weights.triu(1) == 0).all()
        assert (weights.tril() == 0).any(), "some keys are left out"
        total = weights.sum(-1)
        close(total, (total > 0).float())


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@torch.no_grad()
def test_layers_that_are_not_chosen_keep_their_attention(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    expected = model(tokens).logits
    half = adopt(model, layers=[1], gate_bias=1.0, copy=True)
    assert [hasattr(layer.self_attn, "tra") for layer in half.model.layers] == [False, True, False]
    assert not torch.allclose(half(tokens).logits, expected, atol=1e-3)
    half.model.layers[1].self_attn.tra.gate_bias.fill_(100.0)
    half.model.layers[1].self_attn.tra.threshold_bias.fill_(-1e20)
    close(half(tokens).logits, expected)
    none = adopt(model, layers=[], drop_positions=[0], copy=True)
    assert not torch.allclose(none(tokens).logits, expected, atol=1e-3)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    close(half(tokens, attention_mask=mask).logits[:, 3:], model(tokens, attention_mask=mask).logits[:, 3:])
    cache = half(tokens[:, :9]).past_key_values
    close(half(tokens[:, 9:], past_key_values=cache).logits, expected[:, 9:])


@some_families
def test_beams_and_static_caches_generate_what_recomputing_generates(family: str) -> None:
    model, tokens = adopted(family), tokens_of(2, 7)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = tokens
    with torch.no_grad():
        for _ in range(6):
            expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(model.generate(tokens, **options), expected)
    mask = torch.ones_like(tokens)
    static = {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(model.generate(tokens, attention_mask=mask, **options, **static), expected)
    beams = model.generate(tokens, **options, num_beams=3)
    assert torch.equal(beams, model.generate(tokens, **options, num_beams=3, use_cache=False))


@some_families
@torch.no_grad()
def test_a_static_cache_in_pieces_and_with_padding(family: str) -> None:
    model, tokens = adopted(family), tokens_of(2, 12)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    expected = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache = transformers.StaticCache(config=model.config, max_cache_len=20)
    found = []
    for start, end in ((0, 6), (6, 10), (10, 11), (11, 12)):
        part = {"attention_mask": mask[:, :end], "position_ids": positions[:, start:end]}
        found.append(model(tokens[:, start:end], past_key_values=cache, **part).logits)
    close(torch.cat(found, dim=1)[1], expected[1])
    close(torch.cat(found, dim=1)[0, 3:], expected[0, 3:])


@every_family
@torch.no_grad()
def test_half_precision_loses_no_more_than_the_original_does(family: str) -> None:
    model, tokens = build_family(family), tokens_of()
    exact = model(tokens).logits
    original = (model.bfloat16()(tokens).logits - exact).abs().mean()
    adopt(model, **OPEN)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert (model(tokens).logits - exact).abs().mean() < 1.5 * original


@torch.no_grad()
def test_yarn_keeps_its_factor_where_positions_are_dropped() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 10_000.0}
    model, tokens = build_family("llama", rope_parameters=rope), tokens_of()
    scale = model.model.rotary_emb.attention_scaling
    assert scale != 1.0
    found = adopt(model, **OPEN, drop_positions=True, copy=True)(tokens).logits
    rotary = model.model.rotary_emb
    rotary.register_forward_hook(lambda module, args, out: (torch.full_like(out[0], scale), torch.zeros_like(out[1])))
    close(found, model(tokens).logits)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3", "longrope"])
@torch.no_grad()
def test_rope_that_is_scaled_stays_scaled(kind: str) -> None:
    """Within the length of the original and beyond it, where "dynamic" and "longrope" change."""
    more: dict[str, Any] = {"original_max_position_embeddings": 8} if kind in ("yarn", "llama3", "longrope") else {}
    own = {
        "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "longrope": {"short_factor": [1.0, 1.0, 2.0, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0]},
    }
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10_000.0, **more, **own.get(kind, {})}
    model = build_family("llama", rope_parameters=rope, max_position_embeddings=16)
    copied, plain = adopt(model, **OPEN, copy=True), build_family("llama")
    for tokens in (tokens_of(1, 7), tokens_of(1, 40)):
        close(copied(tokens).logits, model(tokens).logits)
    assert not torch.allclose(copied(tokens).logits, plain(tokens).logits, atol=1e-3)


def test_gpt2_without_positions_reads_beyond_its_last_position() -> None:
    model, tokens = adopted("gpt2", {"n_positions": 16}, drop_positions=True), tokens_of(1, 40)
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()


@torch.no_grad()
def test_a_config_can_ask_for_attentions() -> None:
    model, tokens = adopted("llama"), tokens_of()
    expected = model(tokens, output_attentions=True).attentions
    model.config.output_attentions = True
    close(torch.stack(model(tokens).attentions), torch.stack(expected))


@pytest.mark.parametrize("stored", [5, {"gates": 1}, {"layers": 3}, {"layers": [9]}, {"drop_positions": None}])
def test_options_that_a_config_cannot_mean_are_named(stored: Any) -> None:
    config = adopted("llama").config
    config.tra = stored
    with pytest.raises(ValueError, match=r"(config\.tra|layers|drop_positions) must (hold|be)"):
        transformers.AutoModelForCausalLM.from_config(config)


def tiny(family: str, **more: Any) -> Any:
    config = transformers.CONFIG_MAPPING[family]
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY, **more}
    return transformers.AutoModelForCausalLM.from_config(config(**sizes))


def test_what_cannot_be_adopted_is_named_with_the_reason() -> None:
    for family, reason in (
        ("falcon", "does not go through transformers' AttentionInterface"),
        ("opt", "learned positions"),
        ("bloom", "no test covers it"),
    ):
        with pytest.raises(ValueError, match=f"model must be one of .*, got '{family}': .*{reason}"):
            adopt(tiny(family, **({"ffn_dim": 32, "word_embed_proj_dim": 32} if family == "opt" else {})))
    model = build_family("llama")
    for wrong, message in (
        ({"layers": []}, r"layers must name at least one layer unless drop_positions does, got \[\]"),
        ({"layers": [3]}, "layers must hold layers from 0 to 2, got 3"),
        ({"layers": [True]}, "layers must hold layers from 0 to 2, got True"),
        ({"layers": 1}, "layers must be a list of layers, got 1"),
        ({"layers": "02"}, "layers must be a list of layers, got '02'"),
        ({"drop_positions": 1}, "drop_positions must be a list of layers, True or False, got 1"),
        ({"drop_positions": [-1]}, "drop_positions must hold layers from 0 to 2, got -1"),
        ({"threshold": "token"}, "threshold"),
        ({"threshold": float("nan")}, "threshold must be a finite number"),
        ({"threshold": True}, "threshold must be a finite number"),
        ({"threshold_start": None}, "threshold_start must be a finite number"),
        ({"gate_bias": float("inf")}, "gate_bias must be a finite number"),
        ({"gate_bias": "3"}, "gate_bias must be a finite number, got '3'"),
        ({"straight_through": 0.0}, "straight_through must be greater than 0"),
        ({"straight_through": None}, "straight_through must be a temperature of at least 0"),
        ({"tolerance": -1.0}, "tolerance must be None or"),
        ({"impl": "fast"}, "impl"),
    ):
        with pytest.raises(ValueError, match=message):
            adopt(model, **wrong)  # type: ignore[arg-type]
        assert type(model) is transformers.LlamaForCausalLM, "nothing is half done"
    with pytest.raises(ValueError, match="drop_positions must be True or False for GPT-2"):
        adopt(build_family("gpt2"), drop_positions=[0])
    with pytest.raises(ValueError, match="model must be a model of transformers or a folder, got Linear"):
        adopt(torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"got 'tra': it is a model of this package"):
        adopt(build("tra"))

    class OwnConfig(transformers.LlamaConfig): ...

    with pytest.raises(ValueError, match="model must have a LlamaConfig, got a OwnConfig"):
        adopt(transformers.LlamaForCausalLM(OwnConfig(**SIZES)))
    adopt(model)
    with pytest.raises(ValueError, match="model must not be adopted already"):
        adopt(model)
    with pytest.raises(ValueError, match="model must be one that was adopted"):
        unadopt(build_family("llama"))


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "llama"])
def test_attention_that_is_not_causal_is_refused(family: str) -> None:
    name = "is_causal" if family == "llama" else "use_bidirectional_attention"
    with pytest.raises(ValueError, match="model must be causal"):
        adopt(build_family(family, **{name: family != "llama"}))
    with pytest.raises(ValueError, match="is_causal must be True"):
        adopted(family)(tokens_of(), is_causal=False)


def test_a_model_that_is_offloaded_is_refused_and_an_adopted_folder_is_offloaded(tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    rest = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    loading: dict[str, Any] = {"device_map": {**places, **rest}, "offload_folder": str(tmp_path / "offloaded")}
    build_family("llama").save_pretrained(tmp_path / "original")
    with pytest.raises(ValueError, match="model must not be offloaded, got weights on the meta device"):
        adopt(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original", **loading))
    model, tokens = adopted("llama"), tokens_of()
    model.save_pretrained(tmp_path / "adopted")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adopted", **loading)
    with torch.no_grad():
        close(found(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", sorted(WITH_WINDOWS))
@torch.no_grad()
def test_generation_beyond_the_window_of_a_layer(family: str) -> None:
    model, tokens = adopted(family), tokens_of(1, 9)
    found = model.generate(tokens, max_new_tokens=8, do_sample=False)
    expected = tokens
    for _ in range(8):
        expected = torch.cat([expected, model(expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)

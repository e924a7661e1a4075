"""What works with a Llama works here: arguments, weights, caches, attentions and heads, on four models each."""

import copy
import json
import string
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DataCollatorWithFlattening,
    DynamicCache,
)

from tests.hub.kinds import build_kind, config_of, every_kind, own_kinds, tokens_of
from tests.hub.models import VOCABULARY, generate
from tra.hub import TraCache, TraConfig, TraModel, TraPreTrainedModel


@every_kind
@torch.no_grad()
def test_the_model_without_its_head_is_the_base_model(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of()
    assert model.base_model_prefix == "model"
    assert model.base_model is model.model is model.get_decoder()
    hidden = model.base_model(tokens).last_hidden_state
    torch.testing.assert_close(model.get_output_embeddings()(hidden), model(tokens).logits)


@every_kind
def test_candidates_of_the_first_layer_change_no_token(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(batch=1)
    assert torch.equal(generate(model, tokens, assistant_early_exit=1), generate(model, tokens))
    assert model.config.num_hidden_layers == 2


@every_kind
@torch.no_grad()
def test_arguments_that_tools_pass_change_nothing(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of()
    expected = model(tokens).logits
    positions = torch.arange(9)[None]
    for extra in (
        {"position_ids": positions},
        {"position_ids": positions, "cache_position": torch.arange(9)},
        {"token_type_ids": torch.zeros_like(tokens)},
        {"attention_mask": torch.ones_like(tokens), "position_ids": positions.expand(2, 9)},
    ):
        torch.testing.assert_close(model(tokens, **extra).logits, expected)
        if not {"cache_position", "token_type_ids"} & extra.keys():  # which `generate` itself refuses
            assert torch.equal(generate(model, tokens, **extra), generate(model, tokens))


@every_kind
def test_generation_ends_at_a_string(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(batch=1)
    letters = {letter: index for index, letter in enumerate(string.ascii_lowercase[:VOCABULARY])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(letters, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    free = generate(model, tokens)[0, 9:]
    options = {"stop_strings": [tokenizer.decode(free[3])], "tokenizer": tokenizer}
    stopped = generate(model, tokens, attention_mask=torch.ones_like(tokens), **options)[0, 9:]
    assert torch.equal(stopped, free[: (free == free[3]).nonzero()[0, 0] + 1])


@every_kind
@torch.no_grad()
def test_labels_that_are_shifted_already(kind: str) -> None:
    model, tokens, targets = build_kind(kind), tokens_of(), tokens_of()
    expected = F.cross_entropy(model(tokens).logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(tokens, labels=tokens, shift_labels=targets).loss, expected)


@every_kind
@torch.no_grad()
def test_positions_that_restart_keep_documents_apart(kind: str) -> None:
    model, documents = build_kind(kind), [tokens_of(1, length) for length in (5, 1, 8)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    packed = model(torch.cat(documents, dim=1), position_ids=positions, use_cache=False).logits
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    joined = model(torch.cat(documents, dim=1), use_cache=False).logits
    assert not torch.allclose(joined[:, 5:], alone[:, 5:], atol=1e-2), "together they would see each other"


@every_kind
def test_trainer_on_packed_documents_has_the_gradient_of_single_ones(kind: str, tmp_path: Path) -> None:
    model = build_kind(kind)
    rows = [{"input_ids": tokens_of(1, length)[0].tolist()} for length in (7, 4, 9)]
    losses = []
    for row in rows:
        ids = torch.tensor([row["input_ids"]])
        losses.append(F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum"))
    expected = sum(losses) / (6 + 3 + 8)
    weight = model.get_output_embeddings().weight
    (gradient,) = torch.autograd.grad(expected, weight)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=3, max_steps=1, learning_rate=1.0, max_grad_norm=0.0,
        optim="sgd", report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no",
        lr_scheduler_type="constant", dataloader_pin_memory=False,
    )  # fmt: skip
    before = weight.detach().clone()
    collator = DataCollatorWithFlattening()
    transformers.Trainer(model, arguments, train_dataset=rows, data_collator=collator).train()
    torch.testing.assert_close(before - weight.detach(), gradient, rtol=1e-3, atol=1e-5)


@every_kind
def test_a_new_head_is_drawn(kind: str, tmp_path: Path) -> None:
    build_kind(kind).save_pretrained(tmp_path)
    for auto in (AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoModelForQuestionAnswering):
        found = []
        for _ in range(2):
            torch.manual_seed(1)
            torch.full((64, 64), torch.nan)  # which the next allocation would find
            model = auto.from_pretrained(tmp_path)
            head = model.qa_outputs if auto is AutoModelForQuestionAnswering else model.score
            found.append(head.weight.detach())
        assert torch.equal(found[0], found[1])
        assert 0.01 < found[0].std() < 0.03
        assert head.bias is None or (head.bias == 0).all()


class Scored(TraPreTrainedModel):
    """A head that somebody else adds."""

    def __init__(self, config: TraConfig) -> None:
        super().__init__(config)
        self.model = TraModel(config)
        self.score = nn.Linear(config.hidden_size, 3)
        self.own = nn.Linear(config.hidden_size, 3, bias=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is getattr(self, "own", None):
            nn.init.constant_(module.weight, 7.0)


@own_kinds
def test_a_head_that_a_subclass_adds_is_drawn_as_it_says(kind: str, tmp_path: Path) -> None:
    build_kind(kind).save_pretrained(tmp_path)
    for model in (Scored.from_pretrained(tmp_path), Scored(config_of(kind))):
        assert (model.own.weight == 7).all()
        assert 0.01 < model.score.weight.std() < 0.03
        assert (model.score.bias == 0).all()


@every_kind
def test_trained_weights_are_never_drawn_again(kind: str, tmp_path: Path) -> None:
    model = build_kind(kind)
    model.save_pretrained(tmp_path)
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again, loaded, copied = model, AutoModelForCausalLM.from_pretrained(tmp_path), copy.deepcopy(model)
    for one in (again, loaded, copied):
        one.post_init()
        one.init_weights()
    for one in (again, loaded, copied, copy.deepcopy(loaded)):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in one.state_dict().items())
    model.resize_token_embeddings(VOCABULARY + 3)
    model.post_init()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor[:VOCABULARY] if tensor.shape[0] == VOCABULARY + 3 else tensor, expected[name]), name


@every_kind
def test_a_key_that_a_file_has_and_the_config_does_not_know_is_kept(kind: str, tmp_path: Path) -> None:
    build_kind(kind).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "my_tool": {"a": [1]}, "gguf_file": None}))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    assert loaded.config.my_tool == {"a": [1]}
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["my_tool"] == {"a": [1]}
    assert AutoConfig.from_pretrained(tmp_path / "again").my_tool == {"a": [1]}
    assert copy.deepcopy(loaded.config).my_tool == {"a": [1]}


def test_a_key_that_is_the_name_of_a_method_does_not_take_its_place() -> None:
    assert callable(TraConfig.from_dict({"vocab_size": 5, "to_dict": 3, "decoder_config": 4}).decoder_config)


@every_kind
def test_the_number_of_key_heads_is_resolved(kind: str) -> None:
    assert config_of(kind, num_key_value_heads=None).num_key_value_heads == 4


@every_kind
@torch.no_grad()
def test_an_empty_cache_that_a_tool_holds_grows_under_its_hands(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(length=12)
    expected = model(tokens).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        parts = [model(piece, past_key_values=cache, use_cache=True).logits for piece in tokens.split([5, 1, 6], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), expected)
        assert cache.get_seq_length() == 12
        assert cache.get_mask_sizes(3, 0) == (15, 0)
        assert len(cache) == len(cache.layers) == 2
        assert cache.layers[0].keys.shape == cache.layers[0].values.shape == (2, 2, 12, 8)
        assert not cache.is_compileable
        assert cache.is_initialized
        assert cache.is_croppable
        assert cache.get_max_length() == -1
    filled = DynamicCache()
    assert torch.equal(generate(model, tokens, past_key_values=filled), generate(model, tokens))
    assert filled.get_seq_length() == 12 + 16 - 1


@every_kind
@torch.no_grad()
def test_a_cache_is_cut_reordered_repeated_and_reset(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(length=12)

    def rest(cache: Any, rows: Tensor, start: int) -> None:
        found = model(tokens[rows, start:], past_key_values=cache, use_cache=True).logits
        torch.testing.assert_close(found, model(tokens[rows]).logits[:, start:])

    def filled() -> Any:
        return model(tokens[:, :7], use_cache=True).past_key_values

    cache = filled()
    cache.crop(-3)
    rest(cache, torch.arange(2), 4)
    cache = filled()
    cache.crop(0)
    cache.reorder_cache(torch.tensor([1, 0]))
    rest(cache, torch.tensor([1, 0]), 7)
    cache = filled()
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 2]))
    rest(cache, torch.tensor([0, 1, 1]), 7)
    cache.reset()
    assert cache.get_seq_length() == 0
    rest(cache, torch.arange(2), 0)
    with pytest.raises(ValueError, match="positive"):
        cache.crop(1)


@own_kinds
def test_caches_of_other_kinds_are_refused_by_name(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of()
    for asked in ("quantized", "offloaded", "offloaded_static"):
        with pytest.raises(
            ValueError, match=f"cache_implementation must be None, 'dynamic' or 'static', got '{asked}'"
        ):
            generate(model, tokens, cache_implementation=asked)
    sliding = transformers.StaticCache(transformers.MistralConfig(sliding_window=4, num_hidden_layers=2), 30)
    with pytest.raises(
        ValueError, match=r"past_key_values must be .* got a StaticCache of 2 StaticSlidingWindowLayers"
    ):
        model(tokens, past_key_values=sliding)
    offloaded_static = transformers.StaticCache(config=model.config, max_cache_len=30, offloading=True)
    with pytest.raises(ValueError, match="past_key_values must not be offloaded"):
        model(tokens, past_key_values=offloaded_static)
    offloaded = DynamicCache()
    offloaded.offloading = True
    with pytest.raises(ValueError, match="past_key_values must not be offloaded"):
        model(tokens, past_key_values=offloaded)
    with pytest.raises(ValueError, match="with the 2 layers of the model, got a TraCache of 1 TraLayers"):
        model(tokens, past_key_values=TraCache(build_kind(kind, num_hidden_layers=1).model.decoder))


@every_kind
def test_gradients_pass_through_a_cache(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of(length=12)
    expected = torch.autograd.grad(model(tokens).logits[:, 8:].square().sum(), list(model.parameters()))
    cache = model(tokens[:, :8], use_cache=True).past_key_values
    later = model(tokens[:, 8:], past_key_values=cache).logits
    for one, other in zip(torch.autograd.grad(later.square().sum(), list(model.parameters())), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert isinstance(model.train()(tokens).past_key_values, transformers.Cache)


@every_kind
def test_attentions_of_each_step(kind: str) -> None:
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 3}
    model = build_kind(kind, attn_implementation="eager")
    out = generate(model, tokens_of(), **options)
    shapes = [[tuple(layer.shape) for layer in step] for step in out.attentions]
    assert shapes == [[(2, 4, new, total)] * 2 for new, total in ((9, 9), (1, 10), (1, 11))]
    assert all(
        (layer.sum(-1) - 1).abs().max() < 1e-5 or kind in ("tra", "adopted")
        for step in out.attentions
        for layer in step
    )
    matrices = model.train()(tokens_of(), output_attentions=True)
    for matrix in matrices.attentions:
        matrix.retain_grad()
    matrices.logits[0, -1].sum().backward()
    assert all(matrix.grad.abs().sum() > 0 for matrix in matrices.attentions)


@every_kind
def test_labels_of_sequences_and_of_tokens_are_learned(kind: str) -> None:
    """Whether a sequence ends with a small token; padded on the right, so that the last token must be found."""
    tokens = tokens_of(batch=32, length=8)
    lengths = torch.randint(3, 9, (32,))
    tokens[torch.arange(8) >= lengths[:, None]] = 0
    mask = (tokens != 0).long()
    small = (tokens < 10).long()
    last = small[torch.arange(32), lengths - 1]
    for auto, labels in ((AutoModelForSequenceClassification, last), (AutoModelForTokenClassification, small)):
        torch.manual_seed(0)
        model = auto.from_config(config_of(kind, num_labels=2)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(25):
            loss = model(tokens, attention_mask=mask, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        right = model.eval()(tokens, attention_mask=mask).logits.argmax(-1) == labels
        assert right[labels >= 0].float().mean() > 0.95, auto


@every_kind
@torch.no_grad()
def test_every_loss_that_a_classifier_may_have(kind: str) -> None:
    """The kind of problem decides it: classes, several labels at once, or numbers."""
    tokens, mask = tokens_of(3, 6), torch.ones(3, 6, dtype=torch.long)
    for problem, labels, loss in (
        ("single_label_classification", torch.tensor([0, 2, 1]), F.cross_entropy),
        ("multi_label_classification", torch.rand(3, 3).round(), F.binary_cross_entropy_with_logits),
        ("regression", torch.randn(3, 3), F.mse_loss),
    ):
        model = build_kind(kind, AutoModelForSequenceClassification, num_labels=3, problem_type=problem)
        out = model(tokens, attention_mask=mask, labels=labels)
        assert out.logits.shape == (3, 3)
        torch.testing.assert_close(out.loss, loss(out.logits, labels))
    model = build_kind(kind, AutoModelForQuestionAnswering)
    begins, ends = torch.tensor([1, 0, 3]), torch.tensor([2, 5, 3])
    out = model(tokens, attention_mask=mask, start_positions=begins, end_positions=ends)
    assert out.start_logits.shape == out.end_logits.shape == (3, 6)
    expected = (F.cross_entropy(out.start_logits, begins) + F.cross_entropy(out.end_logits, ends)) / 2
    torch.testing.assert_close(out.loss, expected)


@every_kind
@torch.no_grad()
def test_the_loss_is_divided_by_the_labels_of_the_whole_batch(kind: str) -> None:
    model, tokens = build_kind(kind), tokens_of()
    out = model(tokens, labels=tokens, num_items_in_batch=torch.tensor(5))
    torch.testing.assert_close(out.loss, model(tokens, labels=tokens).loss * (2 * 8) / 5)


@every_kind
@torch.no_grad()
def test_a_matrix_of_what_sees_what_is_heeded_or_refused(kind: str) -> None:
    """Two continuations of one text in one row: tokens 5 and 6 do not see each other, and stand at one position."""
    model, tokens = build_kind(kind), tokens_of(1, 7)
    seen, positions = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril(), torch.tensor([[0, 1, 2, 3, 4, 5, 5]])
    seen[..., 6, 5] = False
    if kind in ("tra", "rope"):
        with pytest.raises(ValueError, match=r"attention_mask must have the shape \[batch, cached \+ new tokens\]"):
            model(tokens, attention_mask=seen, position_ids=positions)
        return
    other = torch.cat([tokens[:, :5], tokens[:, 6:]], dim=1)
    expected = [model(one).logits[:, 5] for one in (tokens[:, :6], other)]
    numbers = torch.zeros(1, 1, 7, 7).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, numbers):
        found = model(tokens, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[:, 5], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[:, 6], expected[1], rtol=1e-4, atol=1e-5)
        later = {"attention_mask": mask[:, :, 4:], "position_ids": positions[:, 4:]}
        found = model(tokens[:, 4:], past_key_values=model(tokens[:, :4]).past_key_values, **later).logits
        torch.testing.assert_close(found[:, 1], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[:, 2], expected[1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_matrix_that_is_more_than_a_mask_is_refused_by_an_adopted_model() -> None:
    model, tokens = build_kind("adopted"), tokens_of(1, 7)
    causal = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="attention_mask must be causal"):
        model(tokens, attention_mask=causal | causal.mT)
    with pytest.raises(ValueError, match="attention_mask must show or hide"):
        model(tokens, attention_mask=torch.full((1, 1, 7, 7), -1.0).masked_fill(~causal, float("-inf")))


@every_kind
@torch.no_grad()
def test_tied_embeddings_are_one_tensor_and_stored_once(kind: str, tmp_path: Path) -> None:
    model, tokens = build_kind(kind, tie_word_embeddings=True), tokens_of()
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert len(list(model.parameters())) == len(list(build_kind(kind).parameters())) - 1
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert torch.equal(loaded(tokens).logits, expected)
    loaded.resize_token_embeddings(VOCABULARY + 2)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    torch.testing.assert_close(loaded(tokens).logits[..., :VOCABULARY], expected)


def test_an_attention_implementation_is_taken_where_it_is_the_mechanisms_own(tmp_path: Path) -> None:
    for kind in ("rope", "llama"):
        model = build_kind(kind, attn_implementation="sdpa")
        assert model.config._attn_implementation == "sdpa"
        model.set_attn_implementation("eager")
        assert model.config._attn_implementation == "eager"
    model = build_kind("tra")
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="attn_implementation must be 'eager': tra is computed in its own way, got 's"):
        AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    for kind in ("tra", "rope", "selective"):
        model = build_kind(kind)
        settings = model.config.to_dict()
        for asked in ("flash_attention_2", "flex_attention", "kernels-community/flash-attn"):
            with pytest.raises(ValueError, match=f"attn_implementation must be 'eager'.* got '{asked}'"):
                model.set_attn_implementation(asked)
            with pytest.raises(ValueError, match=f"attn_implementation must be 'eager'.* got '{asked}'"):
                AutoModelForCausalLM.from_config(copy.deepcopy(model.config), attn_implementation=asked)
        assert model.config.to_dict() == settings
        assert model.config._attn_implementation == "eager"


@own_kinds
def test_tensor_parallelism_is_refused(kind: str, tmp_path: Path) -> None:
    build_kind(kind).save_pretrained(tmp_path)
    asked = transformers.distributed.DistributedConfig(tp_plan="auto")
    for wrong in ({"tp_plan": "auto"}, {"tp_size": 2}, {"distributed_config": asked}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be None: no mechanism divides its heads"):
            AutoModelForCausalLM.from_pretrained(tmp_path, **wrong)


@every_kind
@pytest.mark.filterwarnings("default:.*is deprecated and will be removed in v6:FutureWarning")  # its name
def test_how_to_checkpoint_gradients_is_heeded(kind: str) -> None:
    model, tokens = build_kind(kind, num_hidden_layers=4).train(), tokens_of()
    expected = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    layers = [layer for layer in model.modules() if isinstance(layer, transformers.GradientCheckpointingLayer)]
    for options, again in (
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, [2, 2, 2, 2]),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": False, "preserve_rng_state": False}}, [2, 2, 2, 2]),
        ({"every_n_layers": 2}, [2, 1, 2, 1]),
    ):
        calls: list[nn.Module] = []
        hooks = [layer.register_forward_pre_hook(lambda layer, _, calls=calls: calls.append(layer)) for layer in layers]
        model.gradient_checkpointing_enable(**options)
        model.zero_grad()
        out = model(tokens, labels=tokens)
        assert out.past_key_values is None
        out.loss.backward()
        assert [calls.count(layer) for layer in layers] == again
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        for hook in hooks:
            hook.remove()
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing

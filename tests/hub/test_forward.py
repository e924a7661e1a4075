"""What a model returns for its inputs: loss, attentions, hidden states; wrong inputs by name."""

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from tests.hub.models import VOCABULARY, build, every_mechanism, generate, left_padded, prompt
from tra.attention import Context
from tra.hub import TraCache


@torch.no_grad()
def test_the_loss_is_that_of_the_next_token_and_leaves_out_minus_100() -> None:
    model, tokens = build(), prompt(batch=3, length=9)
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[2, 5] = -100
    out = model(tokens, labels=labels)
    scored = [(row, place) for row in range(3) for place in range(1, 9) if labels[row, place] != -100]
    losses = [F.cross_entropy(out.logits[row, place - 1], tokens[row, place]) for row, place in scored]
    assert len(scored) == 24 - 3 - 1
    torch.testing.assert_close(out.loss, torch.stack(losses).mean())
    shared = model(tokens, labels=labels, num_items_in_batch=50).loss
    torch.testing.assert_close(shared, torch.stack(losses).sum() / 50)


@torch.no_grad()
def test_outputs_that_may_be_asked_for() -> None:
    model, tokens = build(), prompt()
    full = model(tokens, output_hidden_states=True)
    assert [tuple(states.shape) for states in full.hidden_states] == [(2, 7, 32)] * 3
    assert torch.equal(full.hidden_states[0], model.model.decoder.embedding(tokens))
    torch.testing.assert_close(model.lm_head(full.hidden_states[-1]), full.logits)
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, full.logits[:, -2:])
    places = torch.tensor([4, 1])
    torch.testing.assert_close(model(tokens, logits_to_keep=places).logits, full.logits[:, places])
    loss, logits = model(tokens, labels=tokens, use_cache=False, return_dict=False)
    torch.testing.assert_close(logits, full.logits)
    assert loss.shape == ()
    assert model(tokens, use_cache=False).past_key_values is None
    assert isinstance(full.past_key_values, TraCache)
    model.config.use_cache = False
    assert model(tokens).past_key_values is None
    assert torch.equal(model(inputs_embeds=model.model.decoder.embedding(tokens)).logits, model(tokens).logits)


@every_mechanism
@torch.no_grad()
def test_attentions_are_the_exact_matrices(attention: str) -> None:
    model = build(attention, num_key_value_heads=4)
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (9, 6)])
    attentions = model(tokens, attention_mask=mask, output_attentions=True).attentions
    expected = model.model.decoder.attention_weights(tokens, key_mask=mask.bool())
    assert len(attentions) == 2
    for found, exact in zip(attentions, expected, strict=True):
        assert found.shape == (2, 4, 9, 9)
        assert torch.equal(found, exact)
        assert (found.triu(1) == 0).all()
        assert (found[1, ..., :3] == 0).all()
    # The matrix explains what the layer does with the values.
    layer, read = model.model.decoder.blocks[0], model.model.decoder.embedding(tokens)
    value = layer.attention.value(layer.attention_norm(read)).unflatten(-1, (4, 8)).transpose(1, 2)
    mixed = layer.attention.postprocess(attentions[0] @ value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(
        layer.attention.output(mixed), layer.attention(layer.attention_norm(read), Context(key_mask=mask.bool()))
    )
    if attention not in ("differential", "stick-breaking"):
        total = attentions[0].sum(-1)
        torch.testing.assert_close(total, (total > 0).float())


@every_mechanism
def test_attentions_while_generating_are_the_last_rows_of_those_of_all_tokens(attention: str) -> None:
    model = build(attention)
    tokens, mask = left_padded([torch.randint(VOCABULARY, (length,)) for length in (9, 6)])
    options = {"output_attentions": True, "return_dict_in_generate": True, "max_new_tokens": 4}
    out = generate(model, tokens, attention_mask=mask, **options)
    assert torch.equal(out.sequences, generate(model, tokens, attention_mask=mask, max_new_tokens=4))
    known = torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    with torch.no_grad():
        whole = model(out.sequences[:, :-1], attention_mask=known, output_attentions=True).attentions
    for step, found in enumerate(out.attentions):
        rows = slice(0, 9) if step == 0 else slice(8 + step, 9 + step)
        for layer, expected in zip(found, whole, strict=True):
            torch.testing.assert_close(layer, expected[:, :, rows, : 9 + step])


@every_mechanism
def test_gradients_pass_through_the_attentions(attention: str) -> None:
    """A step of gradient descent on the weights that were returned is one on the loss: they are what it was made of."""
    model, tokens = build(attention, num_hidden_layers=1), prompt()
    out = model(tokens, labels=tokens, output_attentions=True)
    with torch.no_grad():
        torch.testing.assert_close(out.loss, model(tokens, labels=tokens).loss)
    expected = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    (matrix,) = out.attentions
    through, *found = torch.autograd.grad(out.loss, [matrix, *model.parameters()])
    assert through.shape == matrix.shape
    assert through.abs().sum() > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_packed_documents_do_not_see_each_other() -> None:
    model, first, second = build(), prompt(length=6), prompt(length=9)
    segment_ids = torch.tensor([[0] * 6 + [1] * 9] * 2)
    packed = model(torch.cat([first, second], dim=1), segment_ids=segment_ids).logits
    torch.testing.assert_close(packed[:, 6:], model(second).logits)


@torch.no_grad()
def test_wrong_inputs_are_named() -> None:
    model, tokens = build(), prompt()
    for wrong, message in (
        ({"attention_mask": torch.ones(2, 1, 7, 7)}, r"attention_mask must have the shape .* = \[2, 7\]"),
        ({"attention_mask": torch.ones(2, 6)}, r"attention_mask must have the shape .* = \[2, 7\].* got \[2, 6\]"),
        ({"past_key_values": ((tokens, tokens),)}, "past_key_values must be a TraCache or a DynamicCache, got tuple"),
        ({"position_ids": torch.arange(6)[None]}, r"position_ids must have the shape .* = \[2, 7\], got \[1, 6\]"),
        ({"inputs_embeds": torch.zeros(2, 7, 32)}, "input_ids or inputs_embeds must be given, and not both"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **wrong)


@torch.no_grad()
def test_an_argument_that_means_nothing_is_refused() -> None:
    model, tokens = build(), prompt()
    for wrong, message in (
        ({"foo": 1}, "argument must be one of .*, got 'foo'"),
        ({"segment_id": tokens}, "did you mean 'segment_ids'"),
        ({"attention_masks": tokens}, "did you mean 'attention_mask'"),
        ({"is_causal": False}, "is_causal must be True"),
    ):
        for called in (model, model.model):
            with pytest.raises(ValueError, match=message):
                called(tokens, **wrong)


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    model, tokens = build(), prompt()
    for other, message in (
        (build(num_hidden_layers=3), "with the 2 layers of the model, got a TraCache of 3"),
        (build(num_key_value_heads=4), "2 key heads of width 8, got one of .* with 4 key heads of width 8"),
        (build(num_attention_heads=2), "with 2 key heads of width 16"),
        (build("rope"), "layer 0 is ThresholdRelativeAttention .*, got one of RotaryAttention"),
        (build("tra", attention_options={"qk_norm": False}), "got one of .* without QK-norm"),
    ):
        cache = other(tokens).past_key_values
        with pytest.raises(ValueError, match=message):
            model(tokens[:, :1], past_key_values=cache)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(torch.zeros(2, 4, 7, 8), torch.zeros(2, 4, 7, 8), layer)
    with pytest.raises(ValueError, match="must hold 2 key heads of width 8 in layer 0, got 4 of width 8"):
        model(tokens[:, :1], past_key_values=cache)
    cache = DynamicCache()
    for layer in range(3):
        cache.update(torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 8), layer)
    with pytest.raises(ValueError, match="must hold the 2 layers of the model, got 3"):
        model(tokens[:, :1], past_key_values=cache)

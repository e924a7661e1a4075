"""Packed rows: whatever says which documents share a row is understood, and a cache remembers it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache

from tests.hub.models import VOCABULARY, build, generate, prompt
from tra.hub.packing import positioned_segments, segments_of_lengths

mechanisms = pytest.mark.parametrize("attention", ["tra", "rope", "alibi"])


def packed() -> tuple[list[Tensor], Tensor, Tensor]:
    """Three documents, a row of them, and their positions."""
    documents = [prompt(1, length) for length in (5, 1, 8)]
    positions = torch.cat([torch.arange(document.shape[1]) for document in documents])[None]
    return documents, torch.cat(documents, dim=1), positions


@mechanisms
@torch.no_grad()
def test_what_collators_pass_keeps_documents_apart(attention: str) -> None:
    model, (documents, row, positions) = build(attention), packed()
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = collator([{"input_ids": document[0].tolist()} for document in documents])
    assert {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"} <= batch.keys()
    lengths = {name: batch[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")}
    for arguments in ({"position_ids": positions}, lengths, {"seq_idx": batch["seq_idx"]}, dict(batch)):
        arguments = {name: value for name, value in arguments.items() if name not in ("input_ids", "labels")}
        torch.testing.assert_close(model(row, **arguments).logits, alone, rtol=1e-4, atol=1e-5)


@mechanisms
@torch.no_grad()
def test_tokens_after_a_packed_prompt_see_the_last_document_only(attention: str) -> None:
    model, (documents, row, positions) = build(attention), packed()
    more = prompt(1, 3)
    last = torch.cat([documents[-1], more], dim=1)
    expected = model(last).logits[:, -3:]
    for given in ({"position_ids": positions}, {"segment_ids": torch.tensor([[0] * 5 + [1] + [2] * 8])}):
        cache = model(row, **given).past_key_values
        found = [model(token, past_key_values=cache).logits for token in more.split(1, dim=1)]
        torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)
    alone = generate(model, documents[-1], max_new_tokens=6)[:, 8:]
    assert torch.equal(generate(model, row, position_ids=positions, max_new_tokens=6)[:, 14:], alone)
    beams = generate(model, documents[-1], max_new_tokens=4, num_beams=3)[:, 8:]
    assert torch.equal(generate(model, row, position_ids=positions, max_new_tokens=4, num_beams=3)[:, 14:], beams)


@mechanisms
@torch.no_grad()
def test_a_document_may_begin_behind_a_cache(attention: str) -> None:
    model, (documents, row, positions) = build(attention), packed()
    alone = torch.cat([model(document).logits for document in documents], dim=1)
    cache, found = DynamicCache(), []
    for part in torch.arange(14).split([3, 2, 1, 6, 2]):
        out = model(row[:, part], position_ids=positions[:, part], past_key_values=cache)
        found.append(out.logits)
    torch.testing.assert_close(torch.cat(found, dim=1), alone, rtol=1e-4, atol=1e-5)
    cache.crop(-3)  # of the eight tokens of the last document, five are left
    again = model(row[:, 11:], past_key_values=cache).logits
    torch.testing.assert_close(again, alone[:, 11:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["tra", "nope"])
@torch.no_grad()
def test_documents_that_padding_separates_do_not_see_each_other(attention: str) -> None:
    model, first, second = build(attention), prompt(1, 5), prompt(1, 6)
    row = torch.cat([first, prompt(1, 2), second], dim=1)
    mask = torch.tensor([[1] * 5 + [0] * 2 + [1] * 6])
    positions = torch.tensor([[*range(5), 0, 0, *range(6)]])
    found = model(row, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[:, 7:], model(second).logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[:, :5], model(first).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "positions, mask, expected",
    [
        ([0, 1, 2, 3], None, None),
        ([4, 5, 6, 7], None, None),
        ([0, 1, 0, 1], None, [0, 0, 1, 1]),
        ([0, 0, 0, 1], None, [0, 1, 2, 2]),
        ([1, 1, 0, 1], [0, 0, 1, 1], None),  # as `generate` counts padding on the left
        ([0, 1, 2, 3], [0, 0, 1, 1], None),
        ([0, 1, 1, 2], [1, 1, 0, 1], None),  # padding is not counted
        ([0, 1, 2, 3], [1, 1, 0, 1], None),  # padding is counted
        ([0, 1, 0, 0], [1, 1, 0, 1], [0, 0, 0, 1]),
        ([0, 1, 0, 0], [1, 1, 1, 0], [0, 0, 1, 1]),
    ],
)
def test_positions_say_where_documents_begin(positions: Any, mask: Any, expected: Any) -> None:
    key_mask = None if mask is None else torch.tensor([mask]).bool()
    found = positioned_segments(torch.tensor([positions]), key_mask, 1, 4)
    assert (None if found is None else found[0].tolist()) == expected


def test_lengths_say_where_documents_begin() -> None:
    begins = torch.tensor([0, 2, 2, 3, 6], dtype=torch.int32)
    assert segments_of_lengths(begins, 6, "cu_seq_lens_q").tolist() == [0, 0, 2, 3, 3, 3]
    for wrong in ([0, 2, 5], [1, 6], [0, 4, 3, 6], [0]):
        with pytest.raises(ValueError, match="cu_seq_lens_q must rise from 0 to the 6 tokens"):
            segments_of_lengths(torch.tensor(wrong), 6, "cu_seq_lens_q")


@torch.no_grad()
def test_wrong_packing_is_named() -> None:
    model, tokens = build(), prompt(2, 7)
    begins = torch.tensor([0, 7], dtype=torch.int32)
    for wrong, message in (
        ({"cu_seq_lens_q": begins, "cu_seq_lens_k": begins}, "cu_seq_lens_q must come with a batch of 1"),
        ({"cu_seq_lens_k": begins}, "cu_seq_lens_q must be given and equal to cu_seq_lens_k"),
        ({"seq_idx": torch.zeros(1, 7)}, r"seq_idx must have the shape .* = \[2, 7\], got \[1, 7\]"),
    ):
        with pytest.raises(ValueError, match=message):
            model(tokens, **wrong)
    cache = model(tokens).past_key_values
    with pytest.raises(ValueError, match="past_key_values must hold no tokens where cu_seq_lens_q or seq_idx"):
        model(torch.randint(VOCABULARY, (2, 3)), past_key_values=cache, seq_idx=torch.zeros(2, 3))

"""Mechanisms on FlexAttention, as on a GPU, against the same mechanisms with all biases in memory."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.testing import assert_close

from tra.attention import MECHANISMS, Attention, Context, flex
from tra.attention.cache import Cache

ON_FLEX = ("alibi", "fot", "kerple", "nape", "rope", "ssmax", "t5")
BATCH, LENGTH, CACHED = 2, 150, 40  # more than a block of 128


def masks(kind: str) -> dict[str, Tensor]:
    if kind == "padded":  # at both ends; the first queries see nothing
        place = torch.arange(LENGTH)
        return {"key_mask": torch.stack([place >= 9, place < 140])}
    if kind == "packed":
        return {"segment_ids": (torch.arange(LENGTH) + torch.tensor([[0], [30]])) // 60}
    return {}


def module(name: str) -> Attention:
    torch.manual_seed(0)
    return MECHANISMS[name](32, 4, 2).eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Send what a GPU would take to FlexAttention, in eager mode, and count."""
    made: list[None] = []

    def counted(*arguments: Any, **options: Any) -> Tensor:
        made.append(None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            return flex_attention(*arguments, **options)

    monkeypatch.setattr(flex, "suits", lambda query, context, dropout: query.shape[2] > 1 and not context.exact)
    monkeypatch.setattr(flex, "_flex", lambda: counted)
    return made


@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
@pytest.mark.parametrize("name", ON_FLEX)
@torch.no_grad()
def test_outputs_are_those_of_the_dense_bias(name: str, kind: str, request: pytest.FixtureRequest) -> None:
    """In two pieces, of which the second has fewer queries than keys."""
    x, attention = torch.randn(BATCH, LENGTH, 32), module(name)
    expected = attention(x, Context(**masks(kind)))
    calls = request.getfixturevalue("calls")
    cache, given = Cache(), masks(kind)
    first = attention(x[:, :CACHED], Context(cache, **{key: mask[:, :CACHED] for key, mask in given.items()}))
    found = torch.cat([first, attention(x[:, CACHED:], Context(cache, **given))], dim=1)
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(calls) == (0 if (name, kind) == ("rope", "plain") else 2), "rope needs no bias: SDPA is faster"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention has gradients on a GPU only")
@pytest.mark.parametrize("name", ON_FLEX)
def test_gradients_are_those_of_the_dense_bias(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, given = torch.randn(BATCH, LENGTH, 32).cuda(), {key: mask.cuda() for key, mask in masks("padded").items()}
    on_flex, dense = module(name).cuda(), module(name).cuda()
    on_flex(x, Context(**given)).square().sum().backward()
    monkeypatch.setattr(flex, "suits", lambda *call: False)
    dense(x, Context(**given)).square().sum().backward()
    for (label, left), right in zip(dense.named_parameters(), on_flex.parameters(), strict=True):
        assert left.grad is not None
        assert_close(right.grad, left.grad, rtol=1e-2, atol=1e-3, msg=label)


def test_a_gpu_takes_it_for_many_queries_without_dropout() -> None:
    with torch.device("meta"):
        query = torch.empty(1, 1, 2, 8)
    assert not flex.suits(query, Context(), 0.0)

    class OnGpu:
        is_cuda = True

        def __init__(self, queries: int) -> None:
            self.shape = (1, 1, queries, 8)

    assert flex.suits(OnGpu(2), Context(), 0.0)  # type: ignore[arg-type]
    assert not flex.suits(OnGpu(1), Context(), 0.0)  # type: ignore[arg-type]
    assert not flex.suits(OnGpu(2), Context(), 0.1)  # type: ignore[arg-type]
    assert not flex.suits(OnGpu(2), Context(exact=True), 0.0)  # type: ignore[arg-type]


@torch.no_grad()
def test_compiled_as_on_a_gpu_it_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x, attention, given = torch.randn(BATCH, LENGTH, 32), module("fot"), masks("padded")
    expected = attention(x, Context(**given))
    monkeypatch.setattr(flex, "suits", lambda query, context, dropout: True)
    assert_close(attention(x, Context(**given)), expected, rtol=1e-4, atol=1e-5)
